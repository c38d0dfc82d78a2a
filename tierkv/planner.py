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
from tierkv.layout import GroupKind, Layout
from tierkv.stock import Stock

Blocks = NDArray[np.int64]
"""int64[n] of block indices: block i of a group covers tokens [i * block_tokens, …)."""

_NO_BLOCKS: Blocks = np.empty(0, np.int64)

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

    planned_tokens: boundaries whose look-ahead ends here or below have been planned.
    next_block: per group, blocks below were offered, or are kept already, or wait.
    waiting: (group, block) of look-aheads that are planned but not computed yet.
    declined: (group, block) that found no place, to be offered again.
    """

    planned_tokens: int = 0
    next_block: tuple[int, ...] = ()
    waiting: tuple[tuple[int, int], ...] = ()
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
    stock = Stock(index, layout, hashes)
    tokens = reach.longest_hit(
        layout, known_tokens, stock, local_tokens=local_tokens, max_boundary=max_boundary
    )
    wanted = load_ranges(layout, tokens, local_tokens) if tokens > local_tokens else []
    sizes = [end - first for _, first, end in wanted]
    rows = np.concatenate([_NO_BLOCKS, *(stock.rows(*run) for run in wanted)])
    state = index.pinned[rows]
    return HitPlan(
        tokens,
        np.repeat(np.array([g for g, _, _ in wanted], np.uint16), sizes),
        np.concatenate([_NO_BLOCKS, *(np.arange(*run[1:]) for run in wanted)]),
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
    # A boundary is planned when it is computed if its look-ahead is known to come: by the time
    # that is computed too, the engine may have let the boundary's windows and states go.
    ready = max(upto, min(upto + reach.lookahead_tokens(layout), known_tokens))
    tables = _Tables(index, layout, hashes, block_ids, (None, null_block_id))
    next_block = list(progress.next_block or [0] * len(layout.groups))
    candidates = list(progress.waiting)
    if retry:
        candidates.extend(progress.declined)
    skipped = [0] * len(layout.groups)
    if ready > progress.planned_tokens:
        kept = reach.keep_between(
            layout,
            policy,
            progress.planned_tokens,
            ready,
            known_tokens,
            tables.produced(progress.planned_tokens, ready),
        )
        for g, ranges in enumerate(kept):
            for first, end in ranges.tolist():
                fresh = max(first, next_block[g])
                if fresh >= end:
                    continue
                skipped[g] += fresh - next_block[g]
                candidates.extend((g, i) for i in range(fresh, end))
                next_block[g] = end
    tokens = [g.block_tokens for g in layout.groups]
    waiting = tuple((g, i) for g, i in candidates if (i + 1) * tokens[g] > upto)
    wanted, present = tables.split([c for c in candidates if (c[1] + 1) * tokens[c[0]] <= upto])
    return SavePlan(
        tuple(wanted),
        tuple(present),
        SaveProgress(
            max(ready, progress.planned_tokens),
            tuple(next_block),
            waiting,
            () if retry else progress.declined,
        ),
        tuple(skipped),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """A request's block tables beside what is kept of its prompt already."""

    index: Index
    layout: Layout
    hashes: Sequence[bytes]
    block_ids: BlockTables
    absent: tuple[int | None, int | None]

    def kept(self, group: int, block: int) -> int:
        """The row of a block that is kept or being kept, or -1."""
        index, at = self.index, reach.block_hash_index(self.layout, group, block)
        row = index.find(group, self.hashes[at]) if at < len(self.hashes) else -1
        there = row >= 0 and (index.pinned[row] or index.tier[row] in (Tier.WRITING, Tier.RESIDENT))
        return row if there else -1

    def has_page(self, group: int, block: int) -> bool:
        """Whether the engine has a page for the block now."""
        table = self.block_ids[group]
        return block < len(table) and table[block] not in self.absent

    def produced(self, after: int, ready: int) -> list[int] | None:
        """Boundaries with a state in every recurrent group, look-ahead ending in `(after, ready]`.

        None where the layout has no such group. Engines leave no page where they took no state;
        window blocks that lead up to there would be written for nobody.
        """
        sizes = {
            g: group.block_tokens
            for g, group in enumerate(self.layout.groups)
            if group.kind is GroupKind.RECURRENT
        }
        if not sizes:
            return None
        step, ahead = self.layout.alignment_tokens, reach.lookahead_tokens(self.layout)
        first = max(0, after - ahead) // step + 1
        return [
            b
            for b in range(first * step, max(0, ready - ahead) + 1, step)
            if all(
                self.has_page(g, b // n - 1) or self.kept(g, b // n - 1) >= 0
                for g, n in sizes.items()
            )
        ]

    def split(self, blocks: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
        """Blocks that need a copy, beginnings first, and the rows of those that do not."""
        wanted: list[tuple[int, int]] = []
        present: list[int] = []
        for g, i in blocks:
            row = self.kept(g, i)
            if row >= 0:
                present.append(row)
            elif self.has_page(g, i):
                wanted.append((g, i))
        tokens = [g.block_tokens for g in self.layout.groups]
        wanted.sort(key=lambda gi: (gi[1] + 1) * tokens[gi[0]])
        return wanted, present
