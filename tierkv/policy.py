"""Pure choices: what leaves the arena when something else needs its place."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import slot_bytes
from tierkv.index import Index, Pinned, Rows, Tier


class History(Protocol):
    """The columns of an index that say how its rows were used; `tierkv.index` describes them.

    uses: uint8, how often a block was hit, at most 255, before it left and came back included where
    that is remembered (`tierkv.past`). gap: int32, ticks between its last two uses; 0 before the
    second.
    """

    tier: NDArray[np.uint8]
    tick: NDArray[np.int64]
    uses: NDArray[np.uint8]
    gap: NDArray[np.int32]


SAMPLE: Final = 1 << 14
"""Rows of the index that `worth_keeping` looks at, spread evenly: it costs the same at any size."""

BONUS_USES: Final = 4
"""Reuses that count; a block that was used more often is kept for no longer."""

LEAVING: Final = 0.4
"""Share of the tier's blocks that are not worth writing again (chosen by `bench.eviction`)."""


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


def worth_keeping(index: History, rows: Rows) -> NDArray[np.bool_]:
    """Which blocks of a segment that the tier gives up are worth writing again; bool[n].

    rows: those of the segment. A block's score is when
    it was last used, and later by one typical reuse (the median `gap`, so the scale is that of the
    workload) for each of its first `BONUS_USES` reuses. Worth keeping is what scores above the
    quantile `LEAVING` of the whole tier, estimated from `SAMPLE` rows. Of one prompt a beginning
    is never worth less than what follows it. Whoever writes bounds how many bytes that may be.
    """
    sample = np.arange(0, len(index.tick), max(1, len(index.tick) // SAMPLE))
    sample = sample[index.tier[sample] == Tier.RESIDENT]
    if not len(sample):
        return np.zeros(len(rows), np.bool_)
    gaps = index.gap[sample]
    gaps = gaps[gaps > 0]
    typical = int(np.partition(gaps, len(gaps) // 2)[len(gaps) // 2]) if len(gaps) else 0
    scores = _scores(index, sample, typical)
    at = int(len(scores) * LEAVING)
    keep: NDArray[np.bool_] = _scores(index, rows, typical) > np.partition(scores, at)[at]
    return keep


def _scores(index: History, rows: Rows, typical: int) -> NDArray[np.int64]:
    """int64[n], in ticks: the larger, the sooner a block is expected to be used again."""
    bonus: NDArray[np.int64] = typical * np.minimum(index.uses[rows], BONUS_USES).astype(np.int64)
    return index.tick[rows] + bonus
