"""Where every block is: one dict per group from hash to row, everything else in columns.

The index holds state; it decides nothing and is written by `tierkv.ledger` only. A row lives while
its block is somewhere (pinned or in the tier), on its way somewhere, or leased. A million rows
cost about 155 bytes each with the key (bench/index.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES, Keys

Rows = NDArray[np.int64]
"""int64[n] of row numbers."""

NO_SLOT: Final = -1


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


class Index:
    """Columns over rows: `group`, `pinned`, `tier`, `offset`, `leases`, … are arrays."""

    _COLUMNS: Final = (
        ("group", np.uint16),
        ("pinned", np.uint8),
        ("tier", np.uint8),
        ("read", np.uint8),
        ("leases", np.int32),
        ("tier_leases", np.int32),
        ("depth", np.int32),
        ("tick", np.int64),
        ("offset", np.int64),
    )

    group: NDArray[np.uint16]
    """Index of the group in the layout."""
    pinned: NDArray[np.uint8]
    """`Pinned`."""
    tier: NDArray[np.uint8]
    """`Tier`."""
    read: NDArray[np.uint8]
    """1 once the block has served a hit since it was stored."""
    leases: NDArray[np.int32]
    """How many promises and moves use the slot or wait for it."""
    tier_leases: NDArray[np.int32]
    """How many of those read the storage tier."""
    depth: NDArray[np.int32]
    """Where the block ends in its prompt, in tokens: ends of prompts go first."""
    tick: NDArray[np.int64]
    """The ledger's clock at the last use."""
    offset: NDArray[np.int64]
    """Byte offset of the arena slot, or NO_SLOT."""

    def __init__(self, group_count: int, capacity: int = 1024) -> None:
        self._row_of: list[dict[bytes, int]] = [{} for _ in range(group_count)]
        self._hash: list[bytes | None] = [None] * capacity
        self._free: list[int] = list(range(capacity - 1, -1, -1))
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
        row = self._free.pop()
        self._row_of[group][block_hash] = row
        self._hash[row] = block_hash
        self.group[row] = group
        self.depth[row] = depth
        return row

    def add_many(self, groups: NDArray[np.uint16], names: Sequence[bytes]) -> Rows:
        """New rows for n keys that have none, one hash in `names` for each."""
        self._reserve(len(names))
        first = len(self._free) - len(names)
        rows, self._free[first:] = self._free[first:], []
        tables, hashes = self._row_of, self._hash
        if len(groups) and (groups == groups[0]).all():
            tables[int(groups[0])].update(zip(names, rows, strict=True))
        else:
            for group, name, row in zip(groups.tolist(), names, rows, strict=True):
                tables[group][name] = row
        for name, row in zip(names, rows, strict=True):
            hashes[row] = name
        made = np.array(rows, np.int64)
        self.group[made] = groups
        return made

    def add_all(self, keys: Keys) -> Rows:
        """Rows of all keys, made where there were none."""
        packed, step = keys.hashes, HASH_BYTES
        names = [packed[i : i + step] for i in range(0, len(packed), step)]
        tables = self._row_of
        distinct = set(names)
        if len(distinct) == len(names) and all(t.keys().isdisjoint(distinct) for t in tables):
            return self.add_many(keys.groups, names)  # a restart: little is known yet
        rows = np.empty(len(keys), np.int64)
        for i, (group, name) in enumerate(zip(keys.groups.tolist(), names, strict=True)):
            row = tables[group].get(name, -1)
            rows[i] = row if row >= 0 else self.add(group, name)
        return rows

    def find_all(self, keys: Keys) -> Rows:
        """Rows of all keys; -1 where a key has none."""
        tables = self._row_of
        return np.fromiter((tables[g].get(h, -1) for g, h in keys), np.int64, len(keys))

    def keys_of(self, rows: Rows) -> Keys:
        """The keys of rows, forgotten ones included."""
        return Keys(self.group[rows], b"".join(self._hash[r] or b"" for r in rows.tolist()))

    def live(self) -> Rows:
        """Every row that can be found by key."""
        return np.fromiter((r for t in self._row_of for r in t.values()), np.int64, len(self))

    def forget(self, row: int) -> None:
        """Make the key unknown at once; the row itself stays until `reap`."""
        if self.is_known(row):
            del self._row_of[int(self.group[row])][self._hash[row] or b""]

    def is_known(self, row: int) -> bool:
        """Whether the row's key still leads to it."""
        block_hash = self._hash[row]
        table = self._row_of[int(self.group[row])]
        return block_hash is not None and table.get(block_hash) == row

    def reap(self, row: int) -> None:
        """Give a row back once nothing refers to it: absent everywhere and not leased."""
        if self.pinned[row] or self.tier[row] or self.leases[row] or self.offset[row] != NO_SLOT:
            return
        if self._hash[row] is None:
            return
        self.forget(row)
        self._hash[row] = None
        for name, _ in self._COLUMNS:
            getattr(self, name)[row] = 0
        self.offset[row] = NO_SLOT
        self._free.append(row)

    def _reserve(self, n: int) -> None:
        """Have n free rows, at least as many as there are rows now where it must grow."""
        old, short = len(self._hash), n - len(self._free)
        if short <= 0:
            return
        capacity = old
        while capacity - old < short:
            capacity *= 2
        self._hash.extend([None] * (capacity - old))
        for name, _ in self._COLUMNS:
            column = getattr(self, name)
            wider = np.zeros(capacity, column.dtype)
            wider[:old] = column
            setattr(self, name, wider)
        self.offset[old:] = NO_SLOT
        self._free.extend(range(capacity - 1, old - 1, -1))
