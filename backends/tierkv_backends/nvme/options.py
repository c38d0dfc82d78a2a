"""The options of an ``nvme://`` URL, parsed once."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from tierkv.errors import ConfigError
from tierkv.urls import TierURL, nearest, parse_size
from tierkv_backends.nvme.format import PAGE

DEFAULT_SEGMENT_BYTES: Final = 256 << 20
MIN_SEGMENT_BYTES: Final = 64 << 10
MAX_SEGMENT_BYTES: Final = 4 << 30
MAX_THREADS: Final = 64
FREE_SHARE: Final = 0.2
"""Share of the free space that a root takes where no capacity is given."""

_E = TypeVar("_E", bound=enum.StrEnum)


class Direct(enum.StrEnum):
    """Whether the page cache is passed by."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class EngineName(enum.StrEnum):
    """Who moves payload between memory and segments."""

    THREADS = "threads"
    KVIKIO = "kvikio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``nvme:///PATH?…`` asks for.

    root: directory that all namespaces share.
    capacity_bytes: hard quota of the root in physical bytes; None: a share of the free space.
    segment_bytes: size of a segment file.
    direct: O_DIRECT where it works, always (open fails without), or never.
    threads: size of the I/O pool.
    engine: vectored calls of the pool's threads, or kvikio (`tierkv_backends.gds.engine`).
    """

    root: Path
    capacity_bytes: int | None = None
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    direct: Direct = Direct.AUTO
    threads: int = 4
    engine: EngineName = EngineName.THREADS

    @classmethod
    def parse(cls, url: TierURL, *, engine_is_an_option: bool = True) -> Options:
        """`ConfigError` names what is wrong in `url` and what to write instead."""
        choice = ("engine",) if engine_is_an_option else ()
        given = url.take(("capacity", "segment", "direct", "threads", *choice))
        where = f"tier URL {url.text!r}"
        if url.host or not url.path.startswith("/"):
            raise ConfigError(f"{where}: write an absolute path, like nvme:///mnt/kv")
        capacity = given.get("capacity")
        return cls(
            root=Path(url.path),
            capacity_bytes=(
                None if capacity is None else parse_size(capacity, f"{where}: capacity")
            ),
            segment_bytes=_segment(given.get("segment"), where),
            direct=_one_of(Direct, "direct", given.get("direct", "auto"), where),
            threads=_threads(given.get("threads", "4"), where),
            engine=_one_of(EngineName, "engine", given.get("engine", "threads"), where),
        )


def _segment(text: str | None, where: str) -> int:
    if text is None:
        return DEFAULT_SEGMENT_BYTES
    nbytes = parse_size(text, f"{where}: segment")
    if not MIN_SEGMENT_BYTES <= nbytes <= MAX_SEGMENT_BYTES or nbytes % PAGE:
        raise ConfigError(
            f"{where}: segment={text}; write a multiple of 4096 from 64KiB to 4GiB, like 256MiB"
        )
    return nbytes


def _one_of(choices: type[_E], option: str, text: str, where: str) -> _E:
    try:
        return choices(text)
    except ValueError:
        known = [str(choice) for choice in choices]
        raise ConfigError(
            f"{where}: {option}={text}{nearest(text, known)}; write one of {', '.join(known)}"
        ) from None


def _threads(text: str, where: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_THREADS:
        raise ConfigError(f"{where}: threads={text}; write a number from 1 to {MAX_THREADS}")
    return int(text)
