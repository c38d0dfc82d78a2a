"""`kv_connector_extra_config`, parsed once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from tierkv.blocks import slot_bytes
from tierkv.codec import parse_codec
from tierkv.errors import ConfigError
from tierkv.reach import AUTO, Policy
from tierkv.urls import TierURL, nearest, parse_size

_WHERE = "kv_connector_extra_config"


LOAD_PARAM: Final = "tierkv_load"
"""The key of a request's `kv_transfer_params` that says when its hits are loaded."""


class LoadWhen(enum.StrEnum):
    """When a hit is loaded."""

    AUTO = "auto"
    """Where that is expected to be quicker than computing it."""
    ALWAYS = "always"
    NEVER = "never"
    """For single requests only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may write in `kv_connector_extra_config`.

    url: the storage tier, like ``nvme:///mnt/kv?capacity=500GiB``. "": pinned RAM only.
    pinned: bytes of the arena of each rank; written like ``8GiB``.
    policy: which boundaries are kept (`auto`, `dense`, `end`, `interval:4096`), or `engine`: those
        that the engine's `prefix_cache_retention_interval` keeps in its own pool.
    min_hit_tokens: hits that spare fewer tokens than this are not loaded.
    load: `auto`: nor those whose load would, by what was measured, take longer than computing them
        again; `always`: all others are. A request may say otherwise (`LOAD_PARAM`).
    identity: names the weights where they cannot be told from files; part of the namespace.
    salt: keeps this cache apart from others over the same model; part of the namespace.
    open_timeout_s: how long the engine's start waits for the tier to open before it fails.
    read_timeout_s, write_timeout_s: deadline of one move in the tier.
    hang_timeout_s: a keeper that owes an answer and is silent for so long is ended and started
        anew; its moves fail.
    load_timeout_s: how long a request waits for its load, queueing included, before the engine
        recomputes it.
    close_timeout_s: how long a shutdown waits for saves on their way.
    io_threads: threads of the keeper for checksums and I/O.
    codec: ``lz4`` stores blocks compressed where that saves an eighth; ``none`` does not. Blocks
        are read whichever they were stored with.
    device_checksums: sum the blocks of a save where their pages are; see `tierkv.open`.
    """

    url: str = ""
    pinned: int = 4 << 30
    policy: Policy = AUTO
    min_hit_tokens: int = 0
    load: LoadWhen = LoadWhen.AUTO
    identity: str = ""
    salt: str = ""
    open_timeout_s: float = 60.0
    read_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    hang_timeout_s: float = 5.0
    load_timeout_s: float = 20.0
    close_timeout_s: float = 30.0
    io_threads: int = 4
    codec: str = "none"
    device_checksums: bool = False

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Options:
        """Options from the engine's dict; `ConfigError` names what is wrong and the nearest key."""
        known = tuple(f.name for f in fields(cls))
        for key in config:
            if key not in known:
                raise ConfigError(
                    f"{_WHERE}: unknown option {key!r}{nearest(key, known)}; "
                    f"known: {', '.join(known)}"
                )
        options = cls(**{key: _PARSERS[key](key, value) for key, value in config.items()})
        parse_codec(options.codec, options.url, f"{_WHERE}: codec")
        return options


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{_WHERE}: {key} is {value!r}; write a string")
    return value


def _url(key: str, value: Any) -> str:
    text = _text(key, value)
    if text:
        TierURL.parse(text)  # refused here, before a keeper is started for it
    return text


def _size(key: str, value: Any) -> int:
    nbytes = slot_bytes(parse_size(value, f"{_WHERE}: {key}"))
    if not nbytes:
        raise ConfigError(f"{_WHERE}: {key} is {value!r}; write a size like 8GiB")
    return nbytes


def _policy(key: str, value: Any) -> Policy:
    return Policy.parse(_text(key, value))


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{_WHERE}: {key} is {value!r}; write seconds above 0")
    return float(value)


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{_WHERE}: {key} is {value!r}; write a whole number above 0")
    return value


def _count_or_none(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{_WHERE}: {key} is {value!r}; write a whole number, or 0 for none")
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{_WHERE}: {key} is {value!r}; write true or false")
    return value


def _load(key: str, value: Any) -> LoadWhen:
    if value not in (LoadWhen.AUTO, LoadWhen.ALWAYS):
        raise ConfigError(
            f"{_WHERE}: {key} is {value!r}{nearest(str(value), ('auto', 'always'))}; "
            "write auto or always"
        )
    return LoadWhen(value)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "url": _url,
    "pinned": _size,
    "policy": _policy,
    "min_hit_tokens": _count_or_none,
    "load": _load,
    "identity": _text,
    "salt": _text,
    "open_timeout_s": _seconds,
    "read_timeout_s": _seconds,
    "write_timeout_s": _seconds,
    "hang_timeout_s": _seconds,
    "load_timeout_s": _seconds,
    "close_timeout_s": _seconds,
    "io_threads": _count,
    "codec": _text,
    "device_checksums": _flag,
}
