"""What of one prompt is there, asked in runs of blocks: the index seen along a chain of hashes.

A million-token prompt has hundreds of thousands of units. Whatever is asked here costs what is
there, in passes over whole columns; no question is asked block by block in Python.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv.index import Index, Rows, Tier
from tierkv.layout import Layout

_FIRST_RUN: Final = 32
_GROWTH: Final = 8
"""Runs grow by this factor while all of it is there, so that a miss at the front stays cheap and a
million tokens take few passes (bench/planner.py)."""

_RESIDENT: Final = int(Tier.RESIDENT)  # Python 3.11 takes 2 us to find a member of an enum

_FEW: Final = 4
"""Below this many blocks a loop is faster than numpy (bench/planner.py)."""


Blocks = NDArray[np.int64]
"""int64[n] of block indices: block i of a group covers tokens [i * block_tokens, …)."""

NO_BLOCKS: Final[Blocks] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Some blocks of one prompt, as columns: uint16[n] of groups, int64[n] of block indices."""

    groups: NDArray[np.uint16]
    blocks: Blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, which: NDArray[Any] | slice) -> Chosen:
        """Those at these positions, or where the mask is true."""
        return Chosen(self.groups[which], self.blocks[which])

    @classmethod
    def of(cls, blocks_by_group: Iterable[Blocks]) -> Chosen:
        """All blocks of a list with one entry a group."""
        parts = [(g, blocks) for g, blocks in enumerate(blocks_by_group) if len(blocks)]
        if not parts:
            return NOTHING
        groups = [np.full(len(blocks), g, np.uint16) for g, blocks in parts]
        if len(parts) == 1:
            return cls(groups[0], parts[0][1])
        return cls(np.concatenate(groups), np.concatenate([blocks for _, blocks in parts]))

    def by_group(self) -> list[tuple[int, Blocks]]:
        """(group, its blocks) of every group that has some."""
        if not len(self):
            return []
        first = int(self.groups[0])
        if (self.groups == first).all():
            return [(first, self.blocks)]
        there = np.flatnonzero(np.bincount(self.groups)).tolist()
        return [(g, self.blocks[self.groups == g]) for g in there]

    def __add__(self, other: Chosen) -> Chosen:
        if not len(self) or not len(other):
            return self if len(self) else other
        return Chosen(
            np.concatenate([self.groups, other.groups]),
            np.concatenate([self.blocks, other.blocks]),
        )


NOTHING: Final = Chosen(np.empty(0, np.uint16), NO_BLOCKS)


@functools.lru_cache(maxsize=64)
def _units(layout: Layout) -> tuple[int, ...]:
    """Hashes of the chain per block of each group; 0 for a group whose blocks have no hash."""
    unit = layout.hash_block_tokens
    return tuple(g.block_tokens // unit if g.reusable else 0 for g in layout.groups)


class Stock:
    """A view of the index for one prompt (`tierkv.reach.View`).

    hashes: the chain, one hash per unit of the layout; blocks beyond it are not there. A sequence
        whose slices are quick: a list.
    """

    __slots__ = ("_finders", "_hashes", "_index", "_step", "_step_units", "_units")

    def __init__(self, index: Index, layout: Layout, hashes: Sequence[bytes]) -> None:
        self._index = index
        self._hashes = hashes
        self._units = _units(layout)
        self._step = layout.alignment_tokens
        self._step_units = layout.alignment_tokens // layout.hash_block_tokens
        self._finders = [index.finder(g) for g in range(len(layout.groups))]

    def names(self, group: int, blocks: NDArray[np.int64], *, run: bool = False) -> list[bytes]:
        """The hashes that name these blocks.

        run: they are consecutive: read as a slice, ten times as fast.
        """
        units = self._units[group]
        if run:
            first = (int(blocks[0]) + 1) * units - 1
            return list(self._hashes[first : first + len(blocks) * units : units])
        places = (blocks + 1) * units - 1
        return list(map(self._hashes.__getitem__, places.tolist()))

    def boundary_names(self) -> Sequence[bytes]:
        """The hash at every multiple of the alignment, in order."""
        return self._hashes[self._step_units - 1 :: self._step_units]

    def last_seen(self, seen: Container[bytes]) -> int:
        """The last boundary (tokens) whose hash is in `seen`, or 0.

        Hashes are a chain: where one was seen, all before it were, as long as none is forgotten.
        """
        names = self.boundary_names()
        return bisect_left(names, True, key=lambda name: name not in seen) * self._step

    def rows_of(self, group: int, names: Sequence[bytes]) -> Rows:
        """Rows of the blocks with these names; -1 where a block has none."""
        return self._index.rows_of(group, names)

    def rows(self, group: int, first: int, end: int) -> Rows:
        """Rows of the blocks `[first, end)`; -1 where a block has none."""
        units = self._units[group]
        names = self._hashes[(first + 1) * units - 1 : end * units : units]
        rows = np.full(end - first, -1, np.int64)
        rows[: len(names)] = self.rows_of(group, names)
        return rows

    def loadable(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of these rows could be loaded now, or are on their way into the arena."""
        index = self._index
        there: NDArray[np.bool_] = index.pinned[rows] != 0  # Pinned.ABSENT
        there |= index.tier[rows] == _RESIDENT
        return there

    def first_missing(self, group: int, first: int, end: int) -> int:
        """See `tierkv.reach.View`."""
        if end - first <= _FEW:
            return next((b for b in range(first, end) if not self._is_there(group, b)), end)
        size = _FIRST_RUN
        while first < end:
            stop = min(first + size, end)
            rows = self.rows(group, first, stop)
            there = (rows >= 0) & self.loadable(rows)
            at = int(there.argmin())
            if not there[at]:
                return first + at
            first, size = stop, size * _GROWTH
        return end

    def last_ends(self, groups: Sequence[int], low: int, high: int) -> int:
        """See `tierkv.reach.View`."""
        units = self._step_units
        top = min(high // self._step, len(self._hashes) // units)
        bottom = low // self._step + 1
        size = 1
        while top >= bottom:
            start = max(bottom, top - size + 1)
            ends = np.arange(start, top + 1)
            names = self._hashes[start * units - 1 : top * units : units]
            for group in groups:
                rows = self.rows_of(group, names)
                there = (rows >= 0) & self.loadable(rows)
                if not there.all():
                    ends = ends[there]
                    names = [names[i] for i in np.flatnonzero(there).tolist()]
                if not len(ends):
                    break
            if len(ends):
                return int(ends[-1]) * self._step
            top, size = start - 1, max(_FIRST_RUN, size * _GROWTH)
        return 0

    def _is_there(self, group: int, block: int) -> bool:
        at = (block + 1) * self._units[group] - 1
        if at >= len(self._hashes):
            return False
        row, index = self._finders[group](self._hashes[at], -1), self._index
        return row >= 0 and bool(index.pinned.item(row) or index.tier.item(row) == _RESIDENT)


class SeenBoundaries:
    """Hashes at the boundaries of earlier prompts, where the index does not tell what is shared.

    most: how many are remembered; the oldest prompts are forgotten first. 2**18 take 40 MB.
    """

    def __init__(self, most: int = 1 << 18) -> None:
        self._most = most
        self._names: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, names: Sequence[bytes]) -> None:
        """Remember a prompt's hashes, given in order; what was known is as good as new."""
        for name in names:
            self._names.pop(name, None)
        # From the end: what is forgotten first is an end, so that a chain never has a hole.
        self._names.update(dict.fromkeys(reversed(names)))
        while len(self._names) > self._most:
            del self._names[next(iter(self._names))]

    def clear(self) -> None:
        """Forget all."""
        self._names.clear()
