"""How far a hit may go so that all it needs fits in the arena, and the slots for it.

A prompt may be larger than the arena. Its hit then ends where there is room for what it needs: what
is pinned of it already, and what must come from the storage tier. Blocks of the same prompt beyond
that are evicted for it like any others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.books import Books
from tierkv.index import Tier
from tierkv.layout import GroupKind, Layout
from tierkv.planner import HitPlan

_GUESSES: Final = 4
"""So many boundaries are worked out from the last plan; the next ones halve what is left."""

_TRIES: Final = 24
"""Boundaries looked at in one lookup: enough to halve a million tokens down to one step."""


class Search:
    """Which boundary to plan a hit at, going down from the longest until one fits.

    limit: no boundary above this; None at first.
    """

    def __init__(self, unit: int, local_tokens: int) -> None:
        self.limit: int | None = None
        self._unit = unit
        self._floor = local_tokens // unit * unit
        self._ceiling = self._floor
        self._tries = 0

    def too_long(self, tokens: int, guess: int) -> bool:
        """A hit at `tokens` does not fit, one at `guess` might. Whether any is left to try."""
        self._ceiling = tokens
        self._tries += 1
        return self._next(guess if self._tries <= _GUESSES else self._middle())

    def nothing(self) -> bool:
        """No hit ends at the limit or below. Whether any is left to try."""
        if self.limit is None:
            return False
        self._floor = self.limit
        self._tries += 1
        return self._next(self._middle())

    def _middle(self) -> int:
        return (self._floor + self._ceiling) // 2

    def _next(self, limit: int) -> bool:
        lowest, highest = self._floor + self._unit, self._ceiling - self._unit
        self.limit = max(lowest, min(highest, limit // self._unit * self._unit))
        return lowest <= highest and self._tries < _TRIES


def longest(books: Books, layout: Layout, plan: HitPlan, load_bytes: int) -> int:
    """`plan.tokens` where all of the plan fits; else a boundary, not rounded, at which it might.

    That is a guess: what is pinned or leased of windows and states differs from place to place.

    load_bytes: so many bytes of the arena may be filled from the tier.
    """
    index, room = books.index, books.room
    sizes = room.sizes(plan.rows)
    incoming = np.where(plan.from_tier, sizes, 0)
    if incoming.sum() <= min(load_bytes, room.slots.free_bytes):
        return plan.tokens  # without a look at whole columns
    needed = np.where(plan.from_tier | (index.leases[plan.rows] == 0), sizes, 0)
    ends = _needed_from(layout, plan)
    order = np.argsort(ends, kind="stable")
    excess = np.cumsum(needed[order]) > room.can_give()
    excess |= np.cumsum(incoming[order]) > load_bytes
    return int(ends[order[excess.argmax()]]) - 1 if excess.any() else plan.tokens


def _needed_from(layout: Layout, plan: HitPlan) -> NDArray[np.int64]:
    """int64[n]: boundaries (tokens) from which on a hit needs each of these blocks.

    Or, in a group that is not full, as many blocks as that: its window moves with the boundary, and
    is shorter only near the beginning of the prompt.
    """
    tokens = np.array([g.block_tokens for g in layout.groups], np.int64)
    first = np.full(len(layout.groups), np.iinfo(np.int64).max)
    np.minimum.at(first, plan.groups, plan.blocks)
    first[[g.kind is GroupKind.FULL for g in layout.groups]] = 0
    ends: NDArray[np.int64] = (plan.blocks - first[plan.groups] + 1) * tokens[plan.groups]
    return ends


def claim(books: Books, plan: HitPlan, load_bytes: int) -> tuple[HitPlan, NDArray[np.int64]] | None:
    """Lease the plan's rows and claim slots for those that come from the tier; None: no room.

    Where room lies in pieces between the plan's own blocks, those that the tier has are given up
    and read once more: the plan that is returned says which.
    """
    index, room, rows = books.index, books.room, plan.rows
    for _ in range(2):
        incoming = rows[plan.from_tier]
        index.leases[rows] += 1  # first, so that claiming evicts none of them
        offsets = room.claim(room.sizes(incoming))
        if len(offsets) == len(incoming):
            return plan, offsets
        room.give_back(incoming, offsets)
        index.leases[rows] -= 1
        again = ~plan.from_tier & (index.leases[rows] == 0) & (index.tier[rows] == Tier.RESIDENT)
        everything = plan.from_tier | again
        if not again.any() or room.slot_bytes(rows[everything]) > load_bytes:
            return None
        room.evict(rows[again])
        plan = replace(plan, from_tier=everything)
    return None


def tier_tokens(layout: Layout, plan: HitPlan, local_tokens: int) -> int:
    """Tokens from the first block that comes from the tier to the end of the hit."""
    if not plan.from_tier.any():
        return 0
    tokens = np.array([g.block_tokens for g in layout.groups], np.int64)
    first = int((plan.blocks * tokens[plan.groups])[plan.from_tier].min())
    return plan.tokens - max(first, local_tokens)
