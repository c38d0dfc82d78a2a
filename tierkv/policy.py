"""Pure choices: what leaves the arena when something else needs its place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import slot_bytes
from tierkv.index import Index, Pinned, Rows, Tier


def slot_table(block_bytes: tuple[int, ...]) -> NDArray[np.int64]:
    """int64[groups]: bytes of the arena that one block of each group takes."""
    return np.array([slot_bytes(n) for n in block_bytes], np.int64)


def victims(index: Index, slots: NDArray[np.int64], need_bytes: int) -> Rows:
    """Rows to evict, in order, whose slots add up to `need_bytes` or are all there are.

    Least recently used first; of blocks used at the same time (one prompt) the deepest first, so
    that what stays of a prompt is its beginning, which other prompts share, and never a tail
    without its head. Blocks that nothing can read any more go before all others.
    """
    free = np.flatnonzero((index.pinned == Pinned.RESIDENT) & (index.leases == 0))
    if not free.size:
        return free.astype(np.int64)
    order = np.lexsort((-index.depth[free], index.tick[free]))
    ranked = free[order]
    held = np.cumsum(slots[index.group[ranked]])
    return ranked[: int(np.searchsorted(held, need_bytes)) + 1].astype(np.int64)


def unstored(index: Index) -> Rows:
    """Rows that are pinned but not in the tier and not on their way there: a write is due."""
    due = (index.pinned == Pinned.RESIDENT) & (index.tier == Tier.ABSENT)
    return np.flatnonzero(due).astype(np.int64)


def worth_keeping(index: Index, rows: Rows) -> NDArray[np.bool_]:
    """Which blocks of a segment that the tier gives up are worth writing again; bool[n].

    index: read only. rows: those of the segment. Whoever writes bounds how many bytes that may be.
    """
    return np.zeros(len(rows), np.bool_)
