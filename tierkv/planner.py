"""View of the index + what a request wants → what should move. Pure: reads, never writes.

Both sides of the cache are planned here from one model (`tierkv.reach`): what a save keeps and what
a hit needs can therefore not disagree. `tierkv.ledger` acts on the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierkv import reach
from tierkv.index import Index, Pinned, Rows, Tier
from tierkv.layout import Layout

Blocks = NDArray[np.int64]
"""int64[n] of block indices: block i of a group covers tokens [i * block_tokens, …)."""

BlockTables = Sequence[Sequence[int | None]]
"""One table a group: `tables[group][block index]` is the engine's block id, or None: no page."""


@dataclass(frozen=True, slots=True, eq=False)
class HitPlan:
    """The longest hit and what it needs.

    tokens: the boundary; 0 or at most the request's local tokens where nothing is gained.
    groups, blocks, rows: one entry per block to load, in order of groups and blocks.
    from_tier: which of them are not in the arena.
    pending: some of them are on their way into the arena for somebody else.
    """

    tokens: int
    groups: NDArray[np.uint16]
    blocks: Blocks
    rows: Rows
    from_tier: NDArray[np.bool_]
    pending: bool


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """How far the saves of one request have come; made new by every plan.

    planned_tokens: boundaries up to here have been planned.
    next_block: per group, blocks below were offered, or are kept already.
    declined: (group, block) that found no place, to be offered again.
    """

    planned_tokens: int = 0
    next_block: tuple[int, ...] = ()
    declined: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Blocks worth saving now, beginnings of prompts first.

    wanted: (group, block) not kept anywhere yet, whose pages exist.
    kept_rows: rows the policy keeps that are there already: used now.
    skipped_blocks: reusable blocks newly completed that no hit can reach, so nobody stores them.
    """

    wanted: tuple[tuple[int, int], ...]
    kept_rows: tuple[int, ...]
    progress: SaveProgress
    skipped_blocks: tuple[int, ...] = field(default=())


def plan_hit(
    index: Index,
    layout: Layout,
    hashes: Sequence[bytes],
    *,
    known_tokens: int,
    local_tokens: int = 0,
    max_boundary: int | None = None,
) -> HitPlan:
    """The longest boundary at which every group has what it needs, in RAM or in the tier.

    hashes: the chain, one hash per `layout.hash_block_tokens`.
    known_tokens: tokens of the request; the last one is always recomputed.
    local_tokens: the engine holds the prefix [0, local_tokens) itself.
    """
    per_block = [
        g.block_tokens // layout.hash_block_tokens if g.reusable else 0 for g in layout.groups
    ]
    finders = [index.finder(g) for g in range(len(layout.groups))]
    hashed = len(hashes)

    def row_of(group: int, block: int) -> int:
        at = (block + 1) * per_block[group] - 1
        return finders[group](hashes[at], -1) if at < hashed else -1

    def present(group: int, block: int) -> bool:
        row = row_of(group, block)
        return row >= 0 and bool(index.pinned[row] or index.tier[row] == Tier.RESIDENT)

    tokens = reach.longest_hit(
        layout, known_tokens, present, local_tokens=local_tokens, max_boundary=max_boundary
    )
    groups: list[int] = []
    blocks: list[int] = []
    if tokens > local_tokens:
        for g, first, end in load_ranges(layout, tokens, local_tokens):
            groups.extend([g] * (end - first))
            blocks.extend(range(first, end))
    rows = np.fromiter(map(row_of, groups, blocks), np.int64, len(groups))
    state = index.pinned[rows]
    return HitPlan(
        tokens,
        np.array(groups, np.uint16),
        np.array(blocks, np.int64),
        rows,
        state == Pinned.ABSENT,
        bool((state == Pinned.FILLING).any()),
    )


def load_ranges(layout: Layout, tokens: int, local_tokens: int = 0) -> list[tuple[int, int, int]]:
    """(group, first, end) of the blocks that a hit at `tokens` copies into the engine.

    A draft group's look-ahead block must exist but is recomputed, so it is not copied; blocks
    that the engine's own prefix covers are not copied again.
    """
    ranges = (
        (g, *reach.load_range(layout, g, tokens, local_tokens=local_tokens))
        for g in range(len(layout.groups))
    )
    return [r for r in ranges if r[1] < r[2]]


def plan_save(
    index: Index,
    layout: Layout,
    policy: reach.Policy,
    hashes: Sequence[bytes],
    progress: SaveProgress,
    *,
    computed_tokens: int,
    known_tokens: int,
    block_ids: BlockTables,
    null_block_id: int | None = None,
    retry: bool = False,
) -> SavePlan:
    """What the policy keeps of [0, computed_tokens) and nobody has offered yet.

    block_ids: tables may be shorter than the prompt; an entry that is None or `null_block_id` has
        no page. Without a `null_block_id`, id 0 is a page like any other.
    retry: offer declined blocks again (their pages may still be there).
    """
    upto = min(computed_tokens, len(hashes) * layout.hash_block_tokens)
    next_block = list(progress.next_block or [0] * len(layout.groups))
    candidates = list(progress.declined) if retry else []
    skipped = [0] * len(layout.groups)
    if upto > progress.planned_tokens:
        kept = reach.keep_between(layout, policy, progress.planned_tokens, upto, known_tokens)
        for g, ranges in enumerate(kept):
            for first, end in ranges.tolist():
                fresh = max(first, next_block[g])
                if fresh >= end:
                    continue
                skipped[g] += fresh - next_block[g]
                candidates.extend((g, i) for i in range(fresh, end))
                next_block[g] = end
    wanted, present = _split(index, layout, hashes, candidates, block_ids, null_block_id)
    return SavePlan(
        tuple(wanted),
        tuple(present),
        SaveProgress(
            max(upto, progress.planned_tokens),
            tuple(next_block),
            () if retry else progress.declined,
        ),
        tuple(skipped),
    )


def _split(
    index: Index,
    layout: Layout,
    hashes: Sequence[bytes],
    candidates: list[tuple[int, int]],
    block_ids: BlockTables,
    null_block_id: int | None,
) -> tuple[list[tuple[int, int]], list[int]]:
    """Candidates that need a copy, beginnings first, and the rows of those that do not."""
    unit, absent = layout.hash_block_tokens, (None, null_block_id)
    tokens = [g.block_tokens for g in layout.groups]
    wanted: list[tuple[int, int]] = []
    present: list[int] = []
    for g, i in candidates:
        row = index.find(g, hashes[(i + 1) * tokens[g] // unit - 1])
        if row >= 0 and (index.pinned[row] or index.tier[row] in (Tier.WRITING, Tier.RESIDENT)):
            present.append(row)
        elif i < len(block_ids[g]) and block_ids[g][i] not in absent:
            wanted.append((g, i))
    wanted.sort(key=lambda gi: (gi[1] + 1) * tokens[gi[0]])
    return wanted, present
