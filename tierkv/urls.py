"""Tier URLs and sizes, parsed once at the edge: ``nvme:///mnt/kv?capacity=500GiB``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from tierkv.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int, what: str) -> int:
    """Bytes from ``20GiB``, ``500GB``, ``4096``. `ConfigError` names `what`."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"{what}: {text} is negative; write a size like 20GiB")
        return text
    match = _SIZE.fullmatch(str(text))
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{what}: {text!r} is not a size; write it like 20GiB, 500GB or 4096")
    return int(float(match.group(1)) * _UNITS[unit])


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest of `known`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True, slots=True)
class TierURL:
    """One storage tier in words: scheme, host, path and options as they were written."""

    text: str
    scheme: str
    host: str
    path: str
    options: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> TierURL:
        """Split a URL; `ConfigError` where it is none, or says what no tier could mean."""
        if not isinstance(text, str):
            raise ConfigError(f"tier URL {text!r} is of type {type(text).__name__}; write a str")
        try:
            parts = urlsplit(text)
        except ValueError as exc:  # a bracket that is not closed
            raise ConfigError(f"tier URL {text!r}: {exc}; write it like nvme:///mnt/kv") from exc
        if not parts.scheme or "://" not in text:
            raise ConfigError(
                f"tier URL {text!r} has no scheme; write it like nvme:///mnt/kv?capacity=20GiB"
            )
        if parts.fragment:
            raise ConfigError(
                f"tier URL {text!r}: what follows # would be ignored; write # in a path as %23, "
                "and options after ?"
            )
        if "\0" in unquote(parts.path):
            raise ConfigError(f"tier URL {text!r}: the path has a NUL byte; no file can")
        options = tuple(parse_qsl(parts.query, keep_blank_values=True))
        names = [k for k, _ in options]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"tier URL {text!r}: option {name!r} is written twice")
        return cls(text, parts.scheme, parts.netloc, unquote(parts.path), options)

    def take(self, known: Iterable[str]) -> dict[str, str]:
        """The options as a dict; `ConfigError` with the nearest known name for any other."""
        names = tuple(known)
        for key, _ in self.options:
            if key not in names:
                raise ConfigError(
                    f"tier URL {self.text!r}: unknown option {key!r}{nearest(key, names)}; "
                    f"{self.scheme} knows: {', '.join(names) or 'none'}"
                )
        return dict(self.options)
