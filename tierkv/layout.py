"""What a model's KV cache looks like: groups, block sizes, and the two numbers derived from them.

A `Layout` is resolved once, on the side that decides; everyone else receives it. Pure: no I/O
except `Layout.from_file`, no torch.
"""

from __future__ import annotations

import difflib
import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tierkv.errors import LayoutError


class GroupKind(enum.StrEnum):
    """How a group's blocks serve a hit (the rows of the reachability table, `tierkv.reach`)."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"
    COMPRESSOR = "compressor"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share one block table.

    name: unique within the layout.
    block_tokens: tokens per block.
    block_bytes: real bytes of one block, all layers of the group together, padding excluded.
    padded_block_bytes: what the engine allocates for it (0: the same as `block_bytes`).
    window_tokens: SLIDING_WINDOW: the window, counting the token itself; a token at position p
        attends to positions `p - (window_tokens - 1) .. p`. COMPRESSOR: tokens that one
        compressed entry reads, `ratio` of them new.
    extra_tokens: SLIDING_WINDOW only: further tokens below the window that the engine keeps.
    chunk_tokens: CHUNKED_LOCAL only: a token attends to its own chunk of this many tokens.
    ratio: COMPRESSOR only: tokens per compressed entry.
    draft: the group is looked up one block further than the hit (EAGLE, MTP). The mark is shared,
        see `Layout.lookahead_blocks`.
    """

    name: str
    kind: GroupKind
    block_tokens: int
    block_bytes: int
    padded_block_bytes: int = 0
    window_tokens: int = 0
    extra_tokens: int = 0
    chunk_tokens: int = 0
    ratio: int = 0
    draft: bool = False

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if not self.name or not isinstance(self.name, str):
            raise LayoutError('a group has no name; write "name": "..." in every group')
        kinds = [str(k) for k in GroupKind]
        if self.kind not in kinds:
            raise LayoutError(
                f"{where}: unknown kind {str(self.kind)!r}{_choice(str(self.kind), kinds)}; "
                f"kinds: {', '.join(kinds)}"
            )
        object.__setattr__(self, "kind", GroupKind(self.kind))
        for key in _NUMBERS:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool):
                raise LayoutError(f"{where}: {key} is {value!r}; write a whole number")
        if self.block_tokens < 1:
            raise LayoutError(f"{where}: block_tokens is {self.block_tokens}; write 1 or more")
        if self.block_bytes < 1:
            raise LayoutError(f"{where}: block_bytes is {self.block_bytes}; write 1 or more")
        if self.padded_block_bytes and self.padded_block_bytes < self.block_bytes:
            raise LayoutError(
                f"{where}: padded_block_bytes {self.padded_block_bytes} is below block_bytes "
                f"{self.block_bytes}; leave it out where nothing is padded"
            )
        self._check_geometry(where)

    def _check_geometry(self, where: str) -> None:
        allowed = _GEOMETRY.get(self.kind, ())
        for key in ("window_tokens", "extra_tokens", "chunk_tokens", "ratio"):
            value = getattr(self, key)
            if value and key not in allowed:
                kinds = [str(k) for k, keys in _GEOMETRY.items() if key in keys]
                raise LayoutError(
                    f"{where}: {key} belongs to kind {' or '.join(map(repr, kinds))}; "
                    f"this group is {str(self.kind)!r}, leave it out"
                )
            least = 0 if key == "extra_tokens" or key not in allowed else 1
            if value < least:
                raise LayoutError(f"{where}: {key} is {value}; write {least} or more")
        if self.kind is GroupKind.COMPRESSOR and self.window_tokens < self.ratio:
            raise LayoutError(
                f"{where}: window_tokens {self.window_tokens} is below ratio {self.ratio}; "
                "an entry reads at least its own tokens, write window_tokens >= ratio"
            )

    @property
    def reusable(self) -> bool:
        """Whether blocks of this group can ever serve a hit."""
        return self.kind is not GroupKind.SCRATCH


_NUMBERS = (
    *("block_tokens", "block_bytes", "padded_block_bytes"),
    *("window_tokens", "extra_tokens", "chunk_tokens", "ratio"),
)

_GEOMETRY: Mapping[GroupKind, tuple[str, ...]] = {
    GroupKind.SLIDING_WINDOW: ("window_tokens", "extra_tokens"),
    GroupKind.CHUNKED_LOCAL: ("chunk_tokens",),
    GroupKind.COMPRESSOR: ("window_tokens", "ratio"),
}


def _choice(value: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The group table with the hash unit and the hit alignment, resolved once.

    hash_block_tokens: token granularity of the block-hash chain. 0 resolves it: one reusable
        group: its block size; several: the GCD of their block sizes. An engine may say otherwise.
    alignment_tokens: token granularity at which a hit can end. 0 resolves it: the LCM of the
        reusable groups' block sizes.
    Raises `LayoutError` in one line for anything that cannot be.
    """

    groups: tuple[Group, ...]
    hash_block_tokens: int = 0
    alignment_tokens: int = 0
    _by_name: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = self.groups
        if not groups:
            raise LayoutError('a layout needs at least one group; "groups" is empty')
        for key in ("hash_block_tokens", "alignment_tokens"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise LayoutError(f"layout: {key} is {value!r}; write a whole number, or 0")
        names = [g.name for g in groups]
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise LayoutError(f"group name {min(twice)!r} is used twice; names must be unique")
        sizes = [g.block_tokens for g in groups if g.reusable]
        if not sizes:
            raise LayoutError("no group is reusable: a layout of 'scratch' groups stores nothing")
        unit = self.hash_block_tokens or math.gcd(*sizes)
        alignment = self.alignment_tokens or math.lcm(*sizes)
        for g in groups:
            if g.reusable and g.block_tokens % unit:
                raise LayoutError(
                    f"group {g.name!r}: block_tokens {g.block_tokens} is not a multiple of "
                    f"hash_block_tokens {unit}; set hash_block_tokens to {math.gcd(*sizes)}, or "
                    "the group's kind to 'scratch' where its blocks are never reused"
                )
            if g.reusable and alignment % g.block_tokens:
                raise LayoutError(
                    f"group {g.name!r}: alignment_tokens {alignment} is not a multiple of "
                    f"block_tokens {g.block_tokens}; set alignment_tokens to a multiple of "
                    f"{math.lcm(*sizes)}"
                )
        object.__setattr__(self, "hash_block_tokens", unit)
        object.__setattr__(self, "alignment_tokens", alignment)
        object.__setattr__(self, "_by_name", {n: i for i, n in enumerate(names)})
        text = repr((groups, unit, alignment)).encode()
        object.__setattr__(self, "_hash", xxhash.xxh3_64_intdigest(text) >> 4)

    def __hash__(self) -> int:
        # Worked out once: what is cached for a layout is asked for many times in every step.
        return self._hash

    def index_of(self, name: str) -> int:
        """Position of the group called `name`; `LayoutError` with the nearest name otherwise."""
        try:
            return self._by_name[name]
        except KeyError:
            known = list(self._by_name)
            raise LayoutError(
                f"no group is called {name!r}{_choice(name, known)}; groups: {', '.join(known)}"
            ) from None

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Real bytes per block, one entry a group."""
        return tuple(g.block_bytes for g in self.groups)

    @property
    def lookahead_blocks(self) -> tuple[int, ...]:
        """Blocks beyond the hit that its lookup needs: 1 for draft groups, else 0; one a group.

        Groups of equal kind, block size and window share one lookup in an engine, so a mark on one
        is a mark on all of them. Recurrent and scratch groups have no look-ahead.
        """
        marked = {_lookup_class(g) for g in self.groups if g.draft}
        never = (GroupKind.RECURRENT, GroupKind.SCRATCH)
        return tuple(int(g.kind not in never and _lookup_class(g) in marked) for g in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that `from_dict` reads (DESIGN section 10)."""
        out = []
        for g in self.groups:
            d: dict[str, Any] = {
                "name": g.name,
                "kind": str(g.kind),
                "block_tokens": g.block_tokens,
                "block_bytes": g.block_bytes,
            }
            for key in _GROUP_KEYS[4:]:
                if getattr(g, key):
                    d[key] = getattr(g, key)
            out.append(d)
        return {
            "hash_block_tokens": self.hash_block_tokens,
            "alignment_tokens": self.alignment_tokens,
            "groups": out,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """Build a layout from its JSON form; unknown keys and kinds are refused by name."""
        known = ("hash_block_tokens", "alignment_tokens", "groups", "source", "name")
        for key in data:
            if key not in known:
                raise LayoutError(
                    f"layout: unknown key {key!r}{_choice(key, known)}; known: {', '.join(known)}"
                )
        raw = data.get("groups")
        if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
            raise LayoutError('layout: "groups" must be a list with at least one group')
        return cls(
            tuple(_group(g, i) for i, g in enumerate(raw)),
            _tokens(data, "hash_block_tokens", "layout"),
            _tokens(data, "alignment_tokens", "layout"),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Layout:
        """Read a layout file (JSON); `LayoutError` names the file and what is wrong in it."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as exc:
            raise LayoutError(f"layout file {path}: {exc.strerror}") from exc
        except ValueError as exc:
            raise LayoutError(f"layout file {path}: not JSON ({exc})") from exc
        if not isinstance(data, dict):
            raise LayoutError(f'layout file {path}: must be an object with "groups"')
        try:
            return cls.from_dict(data)
        except LayoutError as exc:
            raise LayoutError(f"layout file {path}: {exc}") from exc


_GROUP_KEYS = (
    "name",
    "kind",
    "block_tokens",
    "block_bytes",
    "padded_block_bytes",
    "window_tokens",
    "extra_tokens",
    "chunk_tokens",
    "ratio",
    "draft",
)


def _lookup_class(group: Group) -> tuple[GroupKind, int, int, int, int]:
    return (group.kind, group.block_tokens, group.window_tokens, group.chunk_tokens, group.ratio)


def _tokens(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LayoutError(f"{where}: {key} is {value!r}; write a whole number")
    return value


def _group(raw: Any, position: int) -> Group:
    where = f"groups[{position}]"
    if not isinstance(raw, Mapping):
        raise LayoutError(f"{where}: must be an object")
    for key in raw:
        if key not in _GROUP_KEYS:
            raise LayoutError(
                f"{where}: unknown key {key!r}{_choice(key, _GROUP_KEYS)}; "
                f"known: {', '.join(_GROUP_KEYS)}"
            )
    for key in ("name", "kind", "block_tokens", "block_bytes"):
        if key not in raw:
            raise LayoutError(f"{where}: {key!r} is missing")
    kinds = [str(k) for k in GroupKind]
    if raw["kind"] not in kinds:
        raise LayoutError(
            f"{where}: unknown kind {raw['kind']!r}{_choice(str(raw['kind']), kinds)}; "
            f"kinds: {', '.join(kinds)}"
        )
    draft = raw.get("draft", False)
    if not isinstance(draft, bool):
        raise LayoutError(f"{where}: draft is {draft!r}; write true or false")
    return Group(
        name=str(raw["name"]),
        kind=GroupKind(raw["kind"]),
        draft=draft,
        **{k: _tokens(raw, k, where) for k in _GROUP_KEYS if k not in ("name", "kind", "draft")},
    )
