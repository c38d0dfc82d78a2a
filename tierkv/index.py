"""Where every block is: one dict per group from hash to row, everything else in columns.

The index holds state; it decides nothing and is written by `tierkv.ledger` only. A row lives while
its block is somewhere (pinned or in the tier), on its way somewhere, or leased. A million rows
cost about 160 bytes each with the key (bench/restart.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES, Keys

Rows = NDArray[np.int64]
"""int64[n] of row numbers."""

NO_SLOT: Final = -1

_AT_ONCE: Final = 1 << 16
"""Keys that are entered together. A million at once leave 75 MB of holes in the heap."""

_UNUSED: Final = 0
_FORGOTTEN: Final = 1
"""In use, but its key leads nowhere, or to a newer row."""
_KNOWN: Final = 2


class Pinned(enum.IntEnum):
    """Where a block stands in the arena."""

    ABSENT = 0
    FILLING = 1
    """A slot is claimed; a copy or a read is filling it. Promised to nobody yet."""
    RESIDENT = 2


class Tier(enum.IntEnum):
    """Where a block stands in the storage tier, counting all ranks together."""

    ABSENT = 0
    WRITING = 1
    RESIDENT = 2
    """Every rank has it."""
    SUSPENDED = 3
    """Some rank's tier is down; it was resident before. Not promised."""


@dataclass(frozen=True, slots=True, eq=False)
class News:
    """Blocks that can be loaded from somewhere now, or not any more.

    in_tier: from the storage tier; else from pinned RAM. gone: not any more.
    """

    keys: Keys
    in_tier: bool
    gone: bool


def distinct(rows: Rows) -> Rows:
    """Every row once, in order. `np.unique` takes half a second for a million (numpy 2.4)."""
    ordered: Rows = np.sort(rows)
    once: Rows = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(rows)]]
    return once


def _part(keys: Keys, start: int, end: int) -> Keys:
    return Keys(keys.groups[start:end], keys.hashes[start * HASH_BYTES : end * HASH_BYTES])


class Index:
    """Columns over rows: `group`, `pinned`, `tier`, `offset`, `leases`, … are arrays."""

    _COLUMNS: Final = (
        ("_life", np.uint8),
        ("group", np.uint16),
        ("pinned", np.uint8),
        ("tier", np.uint8),
        ("read", np.uint8),
        ("uses", np.uint8),
        ("leases", np.int32),
        ("tier_leases", np.int32),
        ("depth", np.int32),
        ("gap", np.int32),
        ("tick", np.int64),
        ("offset", np.int64),
    )

    _life: NDArray[np.uint8]
    """`_UNUSED`, `_FORGOTTEN` or `_KNOWN`."""
    group: NDArray[np.uint16]
    """Index of the group in the layout."""
    pinned: NDArray[np.uint8]
    """`Pinned`."""
    tier: NDArray[np.uint8]
    """`Tier`."""
    read: NDArray[np.uint8]
    """1 once the block has served a hit since it was stored."""
    uses: NDArray[np.uint8]
    """How many prompts hit the block, at most 255, before it left and came back included."""
    leases: NDArray[np.int32]
    """How many promises and moves use the slot or wait for it."""
    tier_leases: NDArray[np.int32]
    """How many of those read the storage tier."""
    depth: NDArray[np.int32]
    """Where the block ends in its prompt, in tokens: ends of prompts go first."""
    gap: NDArray[np.int32]
    """Ticks between its last two uses; 0 before the second."""
    tick: NDArray[np.int64]
    """The ledger's clock at the last use."""
    offset: NDArray[np.int64]
    """Byte offset of the arena slot, or NO_SLOT."""

    def __init__(self, group_count: int, capacity: int = 1024) -> None:
        self._row_of: list[dict[bytes, int]] = [{} for _ in range(group_count)]
        self._hash: NDArray[Any] = np.full(capacity, None, object)
        self._free: Rows = np.arange(capacity - 1, -1, -1)
        self._spare = capacity  # so many of `_free` are rows, the last is taken first
        self.news: list[News] | None = None
        """Grows while somebody listens; None: nobody does."""
        for name, dtype in self._COLUMNS:
            setattr(self, name, np.zeros(capacity, dtype))
        self.offset.fill(NO_SLOT)

    def __len__(self) -> int:
        """Blocks that can be found by key."""
        return sum(map(len, self._row_of))

    def finder(self, group: int) -> Callable[[bytes, int], int]:
        """The fast way to look keys of one group up: `finder(g)(hash, -1)` is a row or -1."""
        return self._row_of[group].get

    def find(self, group: int, block_hash: bytes) -> int:
        """Row of a key, or -1."""
        return self._row_of[group].get(block_hash, -1)

    def add(self, group: int, block_hash: bytes, depth: int = 0) -> int:
        """A new row for a key that has none."""
        self._reserve(1)
        self._spare -= 1
        row = int(self._free[self._spare])
        self._row_of[group][block_hash] = row
        self._hash[row] = block_hash
        self._life[row] = _KNOWN
        self.group[row] = group
        self.depth[row] = depth
        return row

    def add_many(self, groups: NDArray[np.uint16], names: Sequence[bytes]) -> Rows:
        """New rows for n keys that have none, one hash in `names` for each."""
        self._reserve(len(names))
        end = self._spare
        self._spare -= len(names)
        made = self._free[self._spare : end][::-1].copy()
        rows, tables = made.tolist(), self._row_of
        if len(groups) and (groups == groups[0]).all():
            tables[int(groups[0])].update(zip(names, rows, strict=True))
        else:
            for group, name, row in zip(groups.tolist(), names, rows, strict=True):
                tables[group][name] = row
        self._hash[made] = names
        self._life[made] = _KNOWN
        self.group[made] = groups
        return made

    def add_all(self, keys: Keys) -> Rows:
        """Rows of all keys, made where there were none."""
        if len(keys) > _AT_ONCE:
            self._reserve(len(keys) - len(self))
            cuts = range(0, len(keys), _AT_ONCE)
            return np.concatenate([self.add_all(_part(keys, at, at + _AT_ONCE)) for at in cuts])
        names = np.frombuffer(keys.hashes, f"V{HASH_BYTES}")
        rows = np.empty(len(keys), np.int64)
        for group, table in enumerate(self._row_of):
            at = np.flatnonzero(keys.groups == group)
            mine: list[bytes] = names[at].tolist()
            found = self.rows_of(group, mine)
            new = np.flatnonzero(found < 0)
            if len(new):
                fresh = mine if len(new) == len(mine) else [mine[i] for i in new.tolist()]
                before = len(table)
                found[new] = made = self.add_many(np.full(len(new), group, np.uint16), fresh)
                if len(table) - before < len(new):  # a key was given twice: its last row stays
                    found[new] = self.rows_of(group, fresh)
                    self._unmake(np.setdiff1d(made, found[new]))
            rows[at] = found
        return rows

    def rows_of(self, group: int, names: Sequence[bytes]) -> Rows:
        """Rows of the blocks of one group with these hashes; -1 where a block has none."""
        table = self._row_of[group]
        if not table:
            return np.full(len(names), -1, np.int64)
        return np.fromiter(map(table.get, names, repeat(-1)), np.int64, len(names))

    def find_all(self, keys: Keys) -> Rows:
        """Rows of all keys; -1 where a key has none."""
        tables = self._row_of
        return np.fromiter((tables[g].get(h, -1) for g, h in keys), np.int64, len(keys))

    def keys_of(self, rows: Rows) -> Keys:
        """The keys of rows, forgotten ones included."""
        return Keys(self.group[rows], b"".join(self._hash[rows].tolist()))

    def tell(self, rows: Rows, *, in_tier: bool, gone: bool = False) -> None:
        """These rows become, or with `gone` cease to be, resident in RAM or in the tier."""
        if self.news is not None and len(rows):
            self.news.append(News(self.keys_of(rows), in_tier, gone))

    def live(self) -> Rows:
        """Every row that can be found by key."""
        return np.flatnonzero(self._life == _KNOWN)

    def forget(self, row: int) -> None:
        """Make the key unknown at once; the row itself stays until `reap`."""
        if self.is_known(row):
            del self._row_of[int(self.group[row])][self._hash[row]]
            self._life[row] = _FORGOTTEN

    def forget_all(self, rows: Rows) -> None:
        """`forget` for n distinct rows. A million take a tenth of a second (bench/ledger.py)."""
        rows = rows[self._life[rows] == _KNOWN]
        self._life[rows] = _FORGOTTEN
        left = len(self) - len(rows)
        if left < len(rows):  # fewer stay than go: keeping is the smaller work
            for table in self._row_of:
                table.clear()
            if left:
                stay = self.live()
                for group, name, row in zip(
                    self.group[stay].tolist(), self._hash[stay].tolist(), stay.tolist(), strict=True
                ):
                    self._row_of[group][name] = row
            return
        for group, name in zip(self.group[rows].tolist(), self._hash[rows].tolist(), strict=True):
            del self._row_of[group][name]

    def is_known(self, row: int) -> bool:
        """Whether the row's key still leads to it."""
        return bool(self._life[row] == _KNOWN)

    def are_known(self, rows: slice) -> NDArray[np.bool_]:
        """As `known`, for neighbors: no copy of the column."""
        known: NDArray[np.bool_] = self._life[rows] == _KNOWN
        return known

    def known(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of these rows' keys still lead to them."""
        known: NDArray[np.bool_] = self._life[rows] == _KNOWN
        return known

    def reap(self, row: int) -> None:
        """Give a row back once nothing refers to it: absent everywhere and not leased."""
        if self.pinned[row] or self.tier[row] or self.leases[row] or self.offset[row] != NO_SLOT:
            return
        if self._life[row] == _UNUSED:
            return
        self.forget(row)
        self._hash[row] = None
        for name, _ in self._COLUMNS:
            getattr(self, name)[row] = 0
        self.offset[row] = NO_SLOT
        self._free[self._spare] = row
        self._spare += 1

    def reap_all(self, rows: Rows) -> None:
        """`reap` for n rows, of which some may be named twice."""
        idle = (self.pinned[rows] == Pinned.ABSENT) & (self.tier[rows] == Tier.ABSENT)
        idle &= (self.leases[rows] == 0) & (self.offset[rows] == NO_SLOT)
        rows = distinct(rows[idle & (self._life[rows] != _UNUSED)])
        if len(rows):
            self.forget_all(rows)
            self._unmake(rows)

    def _unmake(self, rows: Rows) -> None:
        """Have distinct rows that no key leads to free for other blocks."""
        self._hash[rows] = None
        for name, _ in self._COLUMNS:
            getattr(self, name)[rows] = 0
        self.offset[rows] = NO_SLOT
        self._free[self._spare : self._spare + len(rows)] = rows
        self._spare += len(rows)

    def _reserve(self, n: int) -> None:
        """Have n free rows, at least as many as there are rows now where it must grow."""
        old, short = len(self._hash), n - self._spare
        if short <= 0:
            return
        capacity = old
        while capacity - old < short:
            capacity *= 2
        hashes = np.full(capacity, None, object)
        hashes[:old] = self._hash
        self._hash = hashes
        for name, _ in self._COLUMNS:
            column = getattr(self, name)
            wider = np.zeros(capacity, column.dtype)
            wider[:old] = column
            setattr(self, name, wider)
        self.offset[old:] = NO_SLOT
        spare = self._free[: self._spare]
        self._free = np.empty(capacity, np.int64)
        self._free[: len(spare)] = spare
        self._spare += capacity - old
        self._free[len(spare) : self._spare] = np.arange(capacity - 1, old - 1, -1)
