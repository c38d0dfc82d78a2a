"""View of the index + what a request wants → what should move. Pure: reads, never writes.

Both sides of the cache are planned here from one model (`tierkv.reach`): what a save keeps and what
a hit needs can therefore not disagree. `tierkv.ledger` acts on the plans.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierkv import reach
from tierkv.index import Index, Pinned, Rows, Tier
from tierkv.layout import GroupKind, Layout
from tierkv.stock import NO_BLOCKS, NOTHING, Blocks, Stock
from tierkv.stock import Chosen as Chosen

_T = TypeVar("_T", bound=np.generic)

# Python 3.11 takes 2 us to find a member of an enum.
_ABSENT, _FILLING = int(Pinned.ABSENT), int(Pinned.FILLING)
_WRITING, _RESIDENT = int(Tier.WRITING), int(Tier.RESIDENT)

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


_NO_PAGES: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SaveProgress:
    """How far the saves of one request have come; made new by every plan.

    planned_tokens: boundaries whose look-ahead ends here or below have been planned.
    next_block: per group, blocks below were offered, or are kept already, or wait. Empty: nothing
        was planned yet.
    end_tokens: how long the text was at the first plan: a prompt's end, however its answer grows.
    junctions: where the prompt was found to leave what is known.
    last_state: the last boundary so far at which the engine took a recurrent state.
    waiting: look-aheads that are planned but not computed yet.
    declined: blocks that found no place, to be offered again.
    """

    planned_tokens: int = 0
    next_block: tuple[int, ...] = ()
    end_tokens: int = 0
    junctions: tuple[int, ...] = ()
    last_state: int = 0
    waiting: Chosen = NOTHING
    declined: Chosen = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Blocks worth saving now, beginnings of prompts first.

    wanted: blocks not kept anywhere yet, whose pages exist.
    page_ids, names, rows: for each of them the engine's id, its hash, and its row in the index
        or -1.
    kept_rows: rows the policy keeps that are there already: used now.
    skipped_blocks: per group, reusable blocks newly completed that no hit can reach, so nobody
        stores them; empty where no boundary was passed.
    """

    wanted: Chosen
    page_ids: NDArray[np.int32]
    names: list[bytes]
    rows: Rows
    kept_rows: Rows
    progress: SaveProgress
    skipped_blocks: tuple[int, ...]


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
    rows = np.concatenate([NO_BLOCKS, *(stock.rows(*run) for run in wanted)])
    state = index.pinned[rows]
    return HitPlan(
        tokens,
        np.repeat(np.array([g for g, _, _ in wanted], np.uint16), sizes),
        np.concatenate([NO_BLOCKS, *(np.arange(*run[1:]) for run in wanted)]),
        rows,
        state == _ABSENT,
        bool((state == _FILLING).any()),
    )


def min_known_tokens(layout: Layout) -> int:
    """Tokens below which a prompt can have no hit: the alignment and what must follow a hit."""
    return layout.alignment_tokens + max(1, reach.lookahead_tokens(layout))


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
    seen: Container[bytes] = (),
) -> SavePlan:
    """What the policy keeps of [0, computed_tokens) and nobody has offered yet.

    block_ids: tables may be shorter than the prompt; an entry that is None or `null_block_id` has
        no page. Without a `null_block_id`, id 0 is a page like any other.
    retry: offer declined blocks again (their pages may still be there).
    seen: hashes at boundaries of earlier prompts, for a layout whose index does not tell where
        prompts branch (`reach.tells_junctions`).
    """
    upto = min(computed_tokens, len(hashes) * layout.hash_block_tokens)
    # A boundary is planned when it is computed if its look-ahead is known to come: by the time
    # that is computed too, the engine may have let the boundary's windows and states go.
    ready = max(upto, min(upto + reach.lookahead_tokens(layout), known_tokens))
    passes = reach.next_boundary(layout, progress.planned_tokens) <= ready
    if progress.next_block and not (passes or retry or len(progress.waiting)):
        return _nothing(progress)  # most decode steps
    tables = _Tables(index, layout, Stock(index, layout, hashes), block_ids, null_block_id)
    if not progress.next_block:
        progress = tables.first_progress(policy, known_tokens, seen)
    candidates = progress.waiting + (progress.declined if retry else NOTHING)
    skipped: tuple[int, ...] = ()
    if passes:
        progress, fresh, skipped = tables.advance(policy, progress, upto, ready, known_tokens)
        candidates += fresh
    later = NOTHING
    if len(candidates):
        computed = ends(layout, candidates) <= upto
        if not computed.all():
            candidates, later = candidates.take(computed), candidates.take(~computed)
    if len(later) or len(progress.waiting) or retry:
        declined = NOTHING if retry else progress.declined
        progress = replace(progress, waiting=later, declined=declined)
    return tables.plan(candidates, progress, skipped)


def _nothing(progress: SaveProgress, skipped: tuple[int, ...] = ()) -> SavePlan:
    return SavePlan(NOTHING, _NO_PAGES, [], NO_BLOCKS, NO_BLOCKS, progress, skipped)


@functools.lru_cache(maxsize=64)
def _block_tokens(layout: Layout) -> Blocks:
    return np.array([g.block_tokens for g in layout.groups], np.int64)


@functools.lru_cache(maxsize=64)
def _tails(layout: Layout) -> tuple[tuple[int, int], ...]:
    """(group, block tokens) of the groups that are reused and not full."""
    tails = (GroupKind.FULL, GroupKind.SCRATCH)
    return tuple((g, x.block_tokens) for g, x in enumerate(layout.groups) if x.kind not in tails)


def ends(layout: Layout, chosen: Chosen | HitPlan) -> NDArray[np.int64]:
    """int64[n]: where these blocks end in their prompt, in tokens."""
    sizes = _block_tokens(layout)
    found: NDArray[np.int64] = chosen.blocks + 1
    found *= int(sizes[0]) if len(sizes) == 1 else sizes[chosen.groups]
    return found


def quiet_until(layout: Layout, policy: reach.Policy, progress: SaveProgress) -> int:
    """Computed tokens below which `plan_save` without `retry` has nothing to say.

    Asked after every plan, so that most steps of most requests need not be planned at all.
    """
    after = progress.planned_tokens
    if reach.has_states(layout):  # whether a state was taken is looked at wherever one can be
        due = reach.next_boundary(layout, after)
    else:
        due = reach.next_kept_boundary(
            layout,
            policy,
            after,
            junctions=progress.junctions,
            end_tokens=progress.end_tokens,
        )
    due -= reach.lookahead_tokens(layout)
    waiting = progress.waiting
    if len(waiting):
        due = min(due, int(ends(layout, waiting).min()))
    return due


def page_ids(chosen: Chosen | HitPlan, block_ids: BlockTables) -> NDArray[np.int32]:
    """int32[n]: the engine's ids of these blocks."""
    ids = np.empty(len(chosen.blocks), np.int32)
    for group in np.unique(chosen.groups).tolist():
        mine = chosen.groups == group
        ids[mine] = np.array(_entries(block_ids[group], chosen.blocks[mine]), np.int32)
    return ids


def _entries(table: Sequence[int | None], blocks: Blocks) -> Sequence[int | None]:
    """What a table says of these blocks; a run is read as a slice, four times as fast."""
    if _is_run(blocks):
        return table[int(blocks[0]) : int(blocks[-1]) + 1]
    return list(map(table.__getitem__, blocks.tolist()))


def _is_run(blocks: Blocks) -> bool:
    """Whether these blocks are consecutive, and some."""
    if not len(blocks) or int(blocks[-1]) - int(blocks[0]) + 1 != len(blocks):
        return False
    return len(blocks) == 1 or bool((blocks[1:] - blocks[:-1] == 1).all())


def _from(ranges: reach.Ranges, start: int) -> Blocks:
    """The blocks of `ranges` that are not below `start`."""
    if not len(ranges):
        return NO_BLOCKS
    if len(ranges) == 1:
        first, end = ranges[0].tolist()
        return np.arange(max(first, start), end)
    return _spread(np.maximum(ranges[:, 0], start), ranges[:, 1])


def _spread(first: Blocks, end: Blocks) -> Blocks:
    """All blocks of the half-open ranges, one range after the other."""
    sizes = np.maximum(end - first, 0)
    before = sizes.cumsum() - sizes
    blocks: Blocks = np.arange(int(sizes.sum())) + np.repeat(first - before, sizes)
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """A request's block tables beside what is kept of its prompt already."""

    index: Index
    layout: Layout
    stock: Stock
    block_ids: BlockTables
    null_block_id: int | None

    def first_progress(
        self, policy: reach.Policy, known_tokens: int, seen: Container[bytes]
    ) -> SaveProgress:
        """Where a prompt begins whose blocks were not offered yet."""
        junction = 0
        if policy.kind is reach.PolicyKind.DENSE:
            pass
        elif reach.tells_junctions(self.layout):
            junction = reach.known_prefix(self.layout, known_tokens, self.stock)
        else:
            junction = self.stock.last_seen(seen)
        return SaveProgress(
            next_block=(0,) * len(self.layout.groups),
            end_tokens=known_tokens,
            junctions=(junction,) if junction else (),
        )

    def advance(
        self,
        policy: reach.Policy,
        progress: SaveProgress,
        upto: int,
        ready: int,
        known_tokens: int,
    ) -> tuple[SaveProgress, Chosen, tuple[int, ...]]:
        """Plan the boundaries that are there at `ready` tokens and were not before.

        Returns the progress, the blocks they need and no earlier one did, and how many of each
        group were passed over.
        """
        after, next_block = progress.planned_tokens, progress.next_block
        produced = self.produced(after, ready)
        at = reach.boundaries(
            self.layout,
            policy,
            known_tokens,
            self.producible(progress.last_state, produced, ready, known_tokens),
            junctions=progress.junctions,
            end_tokens=progress.end_tokens,
            after_tokens=after,
            upto_tokens=ready,
        )
        if len(at) and _tails(self.layout):
            at = at[self.whole(at, upto, progress.declined)]
        kept = reach.needs(self.layout, at)
        fresh = [_from(ranges, start) for ranges, start in zip(kept, next_block, strict=True)]
        ends = [int(n[-1]) + 1 if len(n) else b for n, b in zip(fresh, next_block, strict=True)]
        skipped = (e - b - len(n) for n, e, b in zip(fresh, ends, next_block, strict=True))
        states = [] if produced is None else produced.tolist()
        planned = SaveProgress(
            planned_tokens=ready,
            next_block=tuple(ends),
            end_tokens=progress.end_tokens,
            junctions=progress.junctions,
            last_state=states[-1] if states else progress.last_state,
            waiting=progress.waiting,
            declined=progress.declined,
        )
        return planned, Chosen.of(fresh), tuple(skipped)

    def kept(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of these rows (-1: none) are kept or being kept."""
        index = self.index
        tier = index.tier[rows]
        there: NDArray[np.bool_] = index.pinned[rows] != _ABSENT
        there |= (tier == _WRITING) | (tier == _RESIDENT)
        return there & (rows >= 0)

    def has_page(self, group: int, blocks: Blocks) -> NDArray[np.bool_]:
        """Whether the engine has a page for each block now."""
        return self.pages(group, blocks, run=_is_run(blocks))[0]

    def pages(
        self, group: int, blocks: Blocks, *, run: bool
    ) -> tuple[NDArray[np.bool_], Sequence[int | None]]:
        """Whether the engine has a page for each block now, and the ids of those that have.

        run: whether the blocks are consecutive.
        """
        table, null = self.block_ids[group], self.null_block_id
        if run:
            first = int(blocks[0])
            ids = table[first : first + len(blocks)]
            there = np.arange(len(blocks)) < len(ids)
        else:
            there = blocks < len(table)
            ids = list(map(table.__getitem__, blocks[there].tolist()))
        if null in ids or None in ids:
            some = [i is not None and i != null for i in ids]
            there[there] = some
            ids = list(itertools.compress(ids, some))
        return there, ids

    def whole(self, at: Blocks, upto: int, declined: Chosen) -> NDArray[np.bool_]:
        """At which of these boundaries nothing is lost of the groups that are not full.

        Where a prompt goes on from a prefix that the engine held or loaded, pages of the windows
        below are gone. Half of a tail would be written for nobody.
        """
        whole = np.ones(len(at), np.bool_)
        for g, block_tokens in _tails(self.layout):
            first, end = reach.need_each(self.layout, g, at)
            unsure = first < end
            # Pages go from the front: where the first is there, so are the others.
            unsure[unsure] = ~self.has_page(g, first[unsure])
            if not unsure.any():
                continue
            blocks = np.unique(_spread(first[unsure], end[unsure]))
            blocks = blocks[(blocks + 1) * block_tokens <= upto]
            there = self.kept(self.stock.rows_of(g, self.stock.names(g, blocks)))
            there |= self.has_page(g, blocks)
            there |= np.isin(blocks, declined.blocks[declined.groups == g])
            lost = blocks[~there]
            whole &= ~unsure | (np.searchsorted(lost, first) == np.searchsorted(lost, end))
        return whole

    def producible(
        self, last_state: int, produced: Blocks | None, ready: int, known_tokens: int
    ) -> list[int] | None:
        """The last state of earlier steps, those of this one, and every later boundary.

        What comes later is hoped for: the end of a prompt is not looked for before it is there.
        """
        if produced is None:
            return None
        step, ahead = self.layout.alignment_tokens, reach.lookahead_tokens(self.layout)
        later = range((max(0, ready - ahead) // step + 1) * step, known_tokens + 1, step)
        return [last_state, *produced.tolist(), *later]

    def produced(self, after: int, ready: int) -> Blocks | None:
        """Boundaries with a state in every recurrent group, look-ahead ending in `(after, ready]`.

        None where the layout has no such group. Engines leave no page where they took no state;
        window blocks that lead up to there would be written for nobody.
        """
        if not reach.has_states(self.layout):
            return None
        step, ahead = self.layout.alignment_tokens, reach.lookahead_tokens(self.layout)
        first = max(0, after - ahead) // step + 1
        at = np.arange(first, max(0, ready - ahead) // step + 1, dtype=np.int64) * step
        for g, group in enumerate(self.layout.groups):
            if group.kind is GroupKind.RECURRENT:
                blocks = at // group.block_tokens - 1
                rows = self.stock.rows_of(g, self.stock.names(g, blocks))
                at = at[self.kept(rows) | self.has_page(g, blocks)]
        return at

    def plan(
        self, candidates: Chosen, progress: SaveProgress, skipped: tuple[int, ...]
    ) -> SavePlan:
        """Which candidates need a copy, beginnings first, and which are kept already."""
        groups, blocks_of, rows_of, kept = [], [], [], [NO_BLOCKS]
        ids: list[int | None] = []
        names: list[bytes] = []
        for g, blocks in candidates.by_group():
            run = _is_run(blocks)
            named = self.stock.names(g, blocks, run=run)
            rows = self.stock.rows_of(g, named)
            if rows.max() >= 0:
                there = self.kept(rows)
                kept.append(rows[there])
                blocks, rows, named = _pick(~there, blocks, rows, named)
                run = _is_run(blocks)
            has_page, entries = self.pages(g, blocks, run=run)
            if not has_page.all():
                blocks, rows, named = _pick(has_page, blocks, rows, named)
            groups.append(np.full(len(blocks), g, np.uint16))
            blocks_of.append(blocks)
            rows_of.append(rows)
            ids += entries
            names += named
        if not groups:
            return _nothing(progress, skipped)
        pages, rows = np.array(ids, np.int32), _joined(rows_of)
        wanted = Chosen(_joined(groups), _joined(blocks_of))
        if len(groups) > 1 or not run:  # a run, and part of it, is in order as it is
            order = ends(self.layout, wanted).argsort(kind="stable")
            wanted, pages, rows = wanted.take(order), pages[order], rows[order]
            names = [names[i] for i in order.tolist()]
        return SavePlan(wanted, pages, names, rows, _joined(kept), progress, skipped)


def _pick(
    which: NDArray[np.bool_], blocks: Blocks, rows: Rows, names: list[bytes]
) -> tuple[Blocks, Rows, list[bytes]]:
    return blocks[which], rows[which], list(itertools.compress(names, which.tolist()))


def _joined(parts: list[NDArray[_T]]) -> NDArray[_T]:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
