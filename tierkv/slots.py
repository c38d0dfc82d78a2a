"""Where in the arena a block lies: a best-fit allocator over bytes that merges what is freed.

Slots are as large as their block (rounded up to `ARENA_ALIGN`), not as large as the largest
group's: a small tier holds as many small blocks as its bytes allow. Neighbors of one batch get
neighboring slots where a hole is large enough, so that they are freed together and move in fewer
vectors. Pure bookkeeping: no memory is touched here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import slot_bytes

_FEW: Final = 64
"""Below this many slots, giving them back one by one is faster (bench/ledger.py)."""


class SlotAllocator:
    """Hands out byte ranges of an arena of `capacity_bytes` (a multiple of `ARENA_ALIGN`)."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._length_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        if capacity_bytes:
            self._add_hole(0, capacity_bytes)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a slot for a block of `nbytes`, or None where no hole is large enough."""
        need = slot_bytes(nbytes)
        at = bisect_left(self._by_size, (need, -1))
        if at == len(self._by_size):
            return None
        length, start = self._by_size.pop(at)
        del self._length_at[start], self._start_by_end[start + length]
        if length > need:
            self._add_hole(start + need, length - need)
        self.free_bytes -= need
        return start

    def allocate_run(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: offsets for blocks of `sizes`, in order, as many from the front as fit.

        sizes: int64[n], multiples of `ARENA_ALIGN`. Where one hole takes them all they lie side by
        side.
        """
        if not len(sizes):
            return np.empty(0, np.int64)
        ends = sizes.cumsum()
        start = self.allocate(int(ends[-1]))
        if start is not None:
            ends -= sizes
            ends += start
            return ends
        offsets: list[int] = []
        for n in sizes.tolist():
            offset = self.allocate(n)
            if offset is None:
                break
            offsets.append(offset)
        return np.array(offsets, np.int64)

    def free(self, offset: int, nbytes: int) -> None:
        """Give back the slot of a block of `nbytes`; merges with free neighbors."""
        length = slot_bytes(nbytes)
        self.free_bytes += length
        before = self._start_by_end.get(offset)
        if before is not None:
            length += self._remove_hole(before)
            offset = before
        if offset + length in self._length_at:
            length += self._remove_hole(offset + length)
        self._add_hole(offset, length)

    def free_all(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Give back n distinct slots, each of so many bytes of the arena.

        Many at once are merged in columns: one by one, each would move the list of holes.
        """
        if len(offsets) < max(_FEW, len(self._by_size) // 8):
            for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
                self.free(offset, length)
            return
        self.free_bytes += int(lengths.sum())
        holes = np.array(self._by_size, np.int64).reshape(-1, 2)
        starts = np.concatenate([holes[:, 1], offsets])
        ends = starts + np.concatenate([holes[:, 0], lengths])
        order = np.argsort(starts)
        starts, ends = starts[order], ends[order]
        first = np.append(True, starts[1:] != ends[:-1])
        last = np.append(first[1:], True)
        at, to = starts[first].tolist(), ends[last].tolist()
        sizes = (ends[last] - starts[first]).tolist()
        self._length_at = dict(zip(at, sizes, strict=True))
        self._start_by_end = dict(zip(to, at, strict=True))
        self._by_size = sorted(zip(sizes, at, strict=True))

    def _add_hole(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_by_end[start + length] = start
        insort(self._by_size, (length, start))

    def _remove_hole(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_by_end[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
        return length
