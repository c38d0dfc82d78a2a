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
    depth: NDArray[np.int32]
    uses: NDArray[np.uint8]
    gap: NDArray[np.int32]


SAMPLE: Final = 1 << 14
"""Rows of the index that `worth_keeping` looks at, spread evenly: it costs the same at any size."""

BONUS_USES: Final = 4
"""Reuses that count; a block that was used more often is kept for no longer."""

STAYS: Final = 0.6
"""Share of a segment above which it stays as it is."""

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
    """Which blocks of a segment that the tier may give up are worth writing again; bool[n].

    rows: those of the segment. A block's score is when it was last used, and later by one typical
    reuse (the median `gap`, so that the scale is the workload's) for each of its first `BONUS_USES`
    reuses. Worth keeping is what scores above the quantile `LEAVING` of the whole tier, estimated
    from `SAMPLE` rows; of one prompt a beginning is never worth less than what follows it.

    At most half, the best of them, is kept where the segment should go. Where more than `STAYS` of
    it is worth keeping, all that is: a segment with more than half should stay as it is, and
    another one be offered.
    """
    scores, bar = _scores(index, rows)
    keep: NDArray[np.bool_] = scores > bar
    kept, most = int(keep.sum()), len(rows) // 2
    if most < kept <= STAYS * len(rows):
        best = np.lexsort((index.depth[rows], -scores))[:most]
        keep = np.zeros(len(rows), np.bool_)
        keep[best] = True
    return keep


def _scores(index: History, rows: Rows) -> tuple[NDArray[np.int64], int]:
    """int64[n], in ticks, the larger, the sooner a reuse is expected; what scores more is kept."""
    sample = np.arange(0, len(index.tick), max(1, len(index.tick) // SAMPLE))
    sample = sample[index.tier[sample] == Tier.RESIDENT]
    gaps = index.gap[sample]
    gaps = gaps[gaps > 0]
    typical = int(np.partition(gaps, len(gaps) // 2)[len(gaps) // 2]) if len(gaps) else 0

    def score(rows: Rows) -> NDArray[np.int64]:
        uses = np.minimum(index.uses[rows], BONUS_USES).astype(np.int64)
        return index.tick[rows] + typical * uses

    if not len(sample):
        return score(rows), np.iinfo(np.int64).max
    at = int(len(sample) * LEAVING)
    return score(rows), int(np.partition(score(sample), at)[at])
