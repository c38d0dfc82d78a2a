"""Room in the arena: slots for rows, and who leaves when there is none.

The other half of the ledger's state: together they are the only writers of the index. Pure
bookkeeping; no memory is touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv import policy
from tierkv.blocks import slot_bytes
from tierkv.errors import CapacityError
from tierkv.index import NO_SLOT, Index, Pinned, Rows, Tier, distinct
from tierkv.slots import SlotAllocator

# Python 3.11 takes 2 us to find a member of an enum.
_ABSENT: Final = int(Pinned.ABSENT)
_RESIDENT: Final = int(Pinned.RESIDENT)
_STORED: Final = int(Tier.RESIDENT)


class Room:
    """Slots of an arena of `arena_bytes`, with eviction by `tierkv.policy`.

    slot_table: int64[groups], bytes of the arena that one block of each group takes.
    evicted_by_group, evicted_bytes: blocks evicted so far, and the bytes that their slots gave.
    """

    def __init__(self, index: Index, block_bytes: tuple[int, ...], arena_bytes: int) -> None:
        self.slots = SlotAllocator(arena_bytes)
        self.slot_table = policy.slot_table(block_bytes)
        self.evicted_by_group = [0] * len(block_bytes)
        self.evicted_bytes = 0
        self._index = index
        self._block_bytes = block_bytes
        self._victims: deque[tuple[int, int]] = deque()

    def share(self, part: float) -> int:
        """Bytes of that part of the arena. `CapacityError` where they hold not even one block."""
        largest = int(self.slot_table.argmax())
        need, nbytes = int(self.slot_table[largest]), int(self.slots.capacity_bytes * part)
        if nbytes < need:
            raise CapacityError(
                f"pinned: {self.slots.capacity_bytes} bytes hold no block of group {largest} "
                f"({self._block_bytes[largest]} bytes); write at least "
                f"{slot_bytes(int(need / part) + 1)}"
            )
        return nbytes

    def sizes(self, rows: Rows) -> NDArray[np.int64]:
        """int64[n]: bytes of the arena that each row's block takes."""
        return self.slot_table[self._index.group[rows]]

    def slot_bytes(self, rows: Rows) -> int:
        """Bytes of the arena that these rows' blocks take together."""
        return int(self.sizes(rows).sum())

    def claim(self, sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Offsets of slots of `sizes`, evicting what no lease holds; as many as fit, in order.

        sizes: bytes of the arena: of `slot_table`.
        """
        sizes = np.asarray(sizes, np.int64)
        if not len(sizes):
            return np.empty(0, np.int64)
        total = int(sizes.sum())
        while self.slots.free_bytes < total and self._evict_one():
            pass
        offsets = self.slots.allocate_run(sizes)
        if len(offsets) == len(sizes):
            return offsets
        found, evicted = offsets.tolist(), 0
        while len(found) < len(sizes):
            # Free bytes may suffice but lie in pieces: go on in the order of eviction, up to
            # four times what is needed, then decline.
            freed = self._evict_one() if evicted <= 4 * total else 0
            if not freed:
                break
            evicted += freed
            offset = self.slots.allocate(int(sizes[len(found)]))
            if offset is not None:
                found.append(offset)
        return np.array(found, np.int64)

    def claim_sparing(
        self, groups: NDArray[np.uint16], budget: int, rows: Rows
    ) -> NDArray[np.int64]:
        """`claim` for blocks of these groups, in order, within `budget` bytes.

        Of `rows` none leaves for them, unless the tier has it.
        """
        sizes = self.slot_table[groups]
        ends = sizes.cumsum()
        if len(ends) and ends[-1] > budget:
            sizes = sizes[: int(np.searchsorted(ends, budget, side="right"))]
            ends = ends[: len(sizes)]
        start = self.slots.allocate(int(ends[-1])) if len(ends) else None
        if start is not None:  # one hole takes them all, so nobody need leave
            return start + ends - sizes
        index = self._index
        mine = rows[index.tier[rows] != _STORED]
        index.leases[mine] += 1
        offsets = self.claim(sizes)
        index.leases[mine] -= 1
        return offsets

    def can_give(self) -> int:
        """Bytes that are free or that eviction could free; one look at whole columns."""
        index = self._index
        idle = np.flatnonzero((index.pinned == _RESIDENT) & (index.leases == 0))
        return self.slots.free_bytes + self.slot_bytes(idle)

    def evict(self, rows: Rows) -> None:
        """Take pinned rows that nobody leases out of the arena."""
        index = self._index
        for group in index.group[rows].tolist():
            self.evicted_by_group[group] += 1
        self.evicted_bytes += self.slot_bytes(rows)
        self.empty(rows)
        index.reap_all(rows)

    def give_back(self, rows: Rows, offsets: Iterable[int]) -> None:
        """Free slots that were claimed for the first of `rows` but not used."""
        for row, offset in zip(rows.tolist(), offsets, strict=False):
            self.slots.free(int(offset), self._nbytes(row))

    def empty(self, rows: Rows) -> None:
        """Take the slots of rows away and free them. Nothing may still touch them."""
        index = self._index
        held = rows[index.offset[rows] != NO_SLOT]
        was = held[index.pinned[held] == _RESIDENT]
        index.tell(was[index.known(was)], in_tier=False, gone=True)
        self.slots.free_all(index.offset[held], self.sizes(held))
        index.offset[held] = NO_SLOT
        index.pinned[rows] = _ABSENT

    def drop_free(self, rows: Rows) -> None:
        """Give back rows that nothing refers to; one without a key loses its slot first."""
        index = self._index
        known = index.known(rows)
        if known.all():
            if (index.pinned[rows] | index.tier[rows]).all():
                return  # all are somewhere, as after most moves
        else:
            useless = (index.leases[rows] == 0) & (index.pinned[rows] != _ABSENT)
            self.empty(distinct(rows[useless & ~known]))
        index.reap_all(rows)

    def _nbytes(self, row: int) -> int:
        return self._block_bytes[int(self._index.group[row])]

    def _evict_one(self) -> int:
        """Evict the next victim; its slot's bytes, or 0 where nothing may leave."""
        index = self._index
        refilled = False
        while True:
            if not self._victims:
                if refilled:
                    return 0
                refilled = True
                self._choose()
                if not self._victims:
                    return 0
            row, tick = self._victims.popleft()
            usable = index.pinned[row] == _RESIDENT and not index.leases[row]
            if usable and index.tick[row] == tick:
                size = int(self.slot_table[index.group[row]])
                self.evict(np.array([row], np.int64))
                return size

    def _choose(self) -> None:
        # A sixteenth of the arena a pass: one choice costs a look at whole columns.
        need = max(self.slots.capacity_bytes // 16, 1)
        rows = policy.victims(self._index, self.slot_table, need)
        self._victims.extend(zip(rows.tolist(), self._index.tick[rows].tolist(), strict=True))
