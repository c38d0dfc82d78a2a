"""Reachability: which blocks a hit needs, which of a prompt's blocks are worth keeping.

Both sides, storing and looking up, ask the same function, `need`, so what is written is what is
read. Pure: tokens and block indices in, block indices out; no I/O, no hashes, no tensors.

A hit at boundary ``b`` (a multiple of the layout's alignment) needs in a group of blocks of ``B``
tokens the blocks that cover these tokens:

============== ============================================================================
kind           tokens
============== ============================================================================
full           ``[0, b)``
sliding_window ``[b - (window - 1) - extra, b)``
chunked_local  ``[floor(b / chunk) * chunk, b)``
recurrent      the one block that ends at ``b`` (its state was taken exactly there)
compressor     ``[b - (window - ratio), b)`` where the alignment is a multiple of ``ratio``;
               otherwise its window, ``[b - (window - 1), b)``
scratch        none
============== ============================================================================

A draft group needs the block that starts at ``b`` too, and that block must lie wholly in the known
tokens: the engine looks it up, drops it and computes it again. All ranges are half-open and count
blocks of the group from 0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.boundary import AUTO as AUTO
from tierkv.boundary import DENSE as DENSE
from tierkv.boundary import Policy as Policy
from tierkv.boundary import PolicyKind as PolicyKind
from tierkv.errors import ConfigError
from tierkv.layout import Group, GroupKind, Layout

Ranges = NDArray[np.int64]
"""int64[k, 2]: sorted, disjoint, non-touching, non-empty half-open ranges of block indices."""

_NO_RANGES: Ranges = np.empty((0, 2), np.int64)

Present = Callable[[int, int], bool]
"""``present(group index, block index)``: whether the block could be loaded now."""


class _Row(NamedTuple):
    """One group's row of the table, with everything constant worked out."""

    block_tokens: int
    back_tokens: int
    """A hit reads `[b - back_tokens, b)`; EVERYTHING where the row is not of that form."""
    chunk_tokens: int
    """0, or the hit reads `[floor(b / chunk) * chunk, b)`."""
    ahead_blocks: int


_EVERYTHING = -1

_FEW: Final = 64
"""Up to this many boundaries a set is faster than `np.unique`."""

NEVER: Final = sys.maxsize
"""More tokens than any prompt has."""


def falls_back_to_window(layout: Layout, group: int) -> bool:
    """Whether a compressor group is treated as its window: a hit could end inside an entry.

    True only where the alignment is not a multiple of the ratio. `doctor` reports it, because the
    group then costs many times more per boundary.
    """
    g = layout.groups[group]
    return g.kind is GroupKind.COMPRESSOR and layout.alignment_tokens % g.ratio != 0


def _back_tokens(layout: Layout, index: int, group: Group) -> int:
    match group.kind:
        case GroupKind.FULL:
            return _EVERYTHING
        case GroupKind.SLIDING_WINDOW:
            return group.window_tokens - 1 + group.extra_tokens
        case GroupKind.RECURRENT:
            return group.block_tokens
        case GroupKind.COMPRESSOR:
            kept = 1 if falls_back_to_window(layout, index) else group.ratio
            return group.window_tokens - kept
        case GroupKind.CHUNKED_LOCAL | GroupKind.SCRATCH:
            return 0


@functools.lru_cache(maxsize=64)
def _rows(layout: Layout) -> tuple[_Row, ...]:
    return tuple(
        _Row(g.block_tokens, _back_tokens(layout, i, g), g.chunk_tokens, ahead)
        for i, (g, ahead) in enumerate(zip(layout.groups, layout.lookahead_blocks, strict=True))
    )


def _need(row: _Row, boundary: int) -> tuple[int, int]:
    if row.chunk_tokens:
        low = boundary // row.chunk_tokens * row.chunk_tokens
    elif row.back_tokens == _EVERYTHING:
        low = 0
    else:
        low = max(0, boundary - row.back_tokens)
    # Where nothing is read, low is the boundary: the range is empty or the look-ahead alone.
    return low // row.block_tokens, boundary // row.block_tokens + row.ahead_blocks


def need(layout: Layout, group: int, boundary: int) -> tuple[int, int]:
    """Blocks `[first, end)` of `group` that must be present for a hit at `boundary`.

    `boundary` is in tokens, above 0 and a multiple of the alignment, `ValueError` otherwise. The
    look-ahead block of a draft group is included; whether it is known is for the caller to ask
    (`boundary + lookahead_tokens(layout) <= known_tokens`), as `boundaries` and `longest_hit` do.
    """
    _check_boundary(layout, boundary)
    return _need(_rows(layout)[group], boundary)


def load_range(
    layout: Layout, group: int, boundary: int, *, local_tokens: int = 0
) -> tuple[int, int]:
    """Blocks `[first, end)` of `group` that must be moved for a hit at `boundary`.

    What `need` names, less the look-ahead block (the engine computes it again) and less the blocks
    that lie wholly in `[0, local_tokens)`, which the engine holds. `first == end`: nothing.
    """
    _check_boundary(layout, boundary)
    row = _rows(layout)[group]
    first, end = _need(row, boundary)
    end -= row.ahead_blocks
    return min(max(first, local_tokens // row.block_tokens), end), end


def _check_boundary(layout: Layout, boundary: int) -> None:
    if boundary < 1 or boundary % layout.alignment_tokens:
        raise ValueError(
            f"boundary {boundary} is not a positive multiple of alignment_tokens "
            f"{layout.alignment_tokens}"
        )


@functools.lru_cache(maxsize=64)
def lookahead_tokens(layout: Layout) -> int:
    """Tokens beyond a hit that must be known for it: the largest block of a draft group, or 0."""
    return max(r.block_tokens * r.ahead_blocks for r in _rows(layout))


def block_hash_index(layout: Layout, group: int, block: int) -> int:
    """Position in the chain of unit hashes of the hash that names block `block` of `group`.

    A block is named by the hash of the last unit in it: `(block + 1) * block_tokens // unit - 1`.
    `ValueError` for a group that is never reused: its blocks have no names.
    """
    g = layout.groups[group]
    if not g.reusable:
        raise ValueError(f"group {g.name!r} is {str(g.kind)!r}: its blocks have no hash")
    return (block + 1) * g.block_tokens // layout.hash_block_tokens - 1


def alignment_block_count(layout: Layout, group: int) -> int:
    """Blocks of `group` in one segment of the alignment; 0 for a group that is never reused."""
    g = layout.groups[group]
    return layout.alignment_tokens // g.block_tokens if g.reusable else 0


# Which boundaries are kept. --------------------------------------------------------------------


def lost_tokens_at_most(layout: Layout, policy: Policy) -> int | None:
    """By how many tokens a hit may be shorter than under `dense`; None: there is no bound.

    It holds up to the last boundary kept of the prompt that was stored, where nothing was evicted
    and every state was produced.
    """
    step = layout.alignment_tokens
    if policy.kind is PolicyKind.DENSE:
        return 0
    if policy.kind in (PolicyKind.END, PolicyKind.ENGINE):
        return None
    # Rungs are at most this far apart, and the boundary before the next rung loses the most.
    return -(-policy.interval_tokens // step) * step - step


def boundaries(
    layout: Layout,
    policy: Policy,
    known_tokens: int,
    produced: Collection[int] | None = None,
    *,
    junctions: Iterable[int] = (),
    end_tokens: int | None = None,
    after_tokens: int = 0,
    upto_tokens: int = NEVER,
) -> NDArray[np.int64]:
    """Boundaries (tokens, int64, ascending) that `policy` keeps of `known_tokens` known tokens.

    Only boundaries that a hit can end at: positive multiples of the alignment whose look-ahead
    blocks lie in the known tokens.

    produced: token positions at which the engine took the states of every recurrent group; only
        boundaries there are kept. In the place of one that was not produced steps the last
        produced one below it, and for a rung the next one above it, so that where an engine takes
        few states a ladder has rungs all the same. None: it takes one at every boundary. Ignored
        where the layout has no recurrent group.
    junctions: token positions at which prompts were seen to branch; the boundary at or below each
        is kept under every policy.
    end_tokens: where the text ends whose end is kept; `known_tokens` by default. While an answer
        grows, it is the length of the prompt: the end of an unfinished answer is kept by nobody.
    after_tokens, upto_tokens: only those that `became_available` between them. The cost grows with
        what was computed, not with the prompt.
    """
    if policy.kind is PolicyKind.ENGINE:
        raise ConfigError("policy 'engine' is for engines, which say what it means; write another")
    step, ahead = layout.alignment_tokens, lookahead_tokens(layout)
    last = max(0, known_tokens - ahead) // step
    first, final = max(0, after_tokens - ahead) // step + 1, max(0, upto_tokens - ahead) // step
    states = produced is not None and has_states(layout)
    if policy.kind is PolicyKind.DENSE and not states:
        return np.arange(first, min(final, last) + 1, dtype=np.int64) * step
    end = known_tokens if end_tokens is None else end_tokens
    marks = _marks(policy, junctions, end, step, ahead)
    if produced is not None and states:
        at = np.unique(np.fromiter(produced, dtype=np.int64, count=len(produced)))
        possible = at[(at > 0) & (at % step == 0) & (at <= last * step)] // step
        kept = _kept_states(policy, [m for m in marks if m <= last], possible, step)
        return kept[(kept >= first) & (kept <= final)] * step
    final = min(final, last)
    marks = [m for m in marks if first <= m <= final]
    if policy.kind is not PolicyKind.END:
        interval = policy.interval_tokens
        low, high = -(-first * step // interval), ((final + 1) * step - 1) // interval
        rungs = np.arange(low, high + 1, dtype=np.int64) * interval // step
        if len(rungs) > _FEW:
            return np.unique(np.concatenate([np.array(marks, np.int64), rungs])) * step
        marks += rungs.tolist()
    return np.array(sorted(set(marks)), np.int64) * step


def _marks(policy: Policy, junctions: Iterable[int], end: int, step: int, ahead: int) -> list[int]:
    """Junctions and the prompt's end, in multiples of the alignment."""
    marks = [j // step for j in junctions]
    if policy.kind is not PolicyKind.INTERVAL:
        reachable = max(0, end - ahead) // step
        marks += [min(reachable, max(0, end - 1) // step), reachable]
    return marks


def _kept_states(
    policy: Policy, marks: list[int], possible: NDArray[np.int64], step: int
) -> NDArray[np.int64]:
    """What is kept where states were taken at `possible` only; in multiples of the alignment."""
    if policy.kind is PolicyKind.DENSE:
        return possible
    kept = np.concatenate([[0], possible])[np.searchsorted(possible, marks, side="right")]
    if policy.kind is not PolicyKind.END:
        # The rungs passed by then: one more than at the boundary before, and it stands for it.
        passed = (possible * step + step - 1) // policy.interval_tokens
        kept = np.concatenate([kept, possible[np.diff(passed, prepend=0) > 0]])
    return np.unique(kept)


@functools.lru_cache(maxsize=64)
def has_states(layout: Layout) -> bool:
    """Whether some group is recurrent, so that hits end only where its states were taken."""
    return any(g.kind is GroupKind.RECURRENT for g in layout.groups)


def keep(
    layout: Layout,
    policy: Policy,
    known_tokens: int,
    produced: Collection[int] | None = None,
    *,
    junctions: Iterable[int] = (),
    end_tokens: int | None = None,
) -> list[Ranges]:
    """The blocks worth keeping of a prompt: one `Ranges` per group.

    The union of `need` over `boundaries(...)` of the same arguments. The cost grows with the
    boundaries kept, not with the blocks that exist.
    """
    at = boundaries(
        layout, policy, known_tokens, produced, junctions=junctions, end_tokens=end_tokens
    )
    return needs(layout, at)


def needs(layout: Layout, at: NDArray[np.int64]) -> list[Ranges]:
    """The union of `need` over ascending boundaries (tokens): one `Ranges` per group."""
    return [_union(row, at) for row in _rows(layout)]


def need_each(
    layout: Layout, group: int, at: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`need` of every boundary of `at` by itself: the firsts and the ends."""
    return _each(_rows(layout)[group], at)


def became_available(
    layout: Layout, at: NDArray[np.int64], after_tokens: int, upto_tokens: int
) -> NDArray[np.int64]:
    """Those boundaries of `at` that a step which computed `[after_tokens, upto_tokens)` completed.

    A boundary is there when its tokens and its look-ahead blocks are. So whatever the cut into
    steps `0 = t0 <= t1 <= …`, each boundary becomes available once. Count as computed only tokens
    that are final: not the drafted ones that may be taken back.
    """
    ready = at + lookahead_tokens(layout)
    return at[(ready > after_tokens) & (ready <= upto_tokens)]


def next_boundary(layout: Layout, after_tokens: int) -> int:
    """Tokens to compute, look-ahead included, until a boundary beyond `after_tokens` is there."""
    step, ahead = layout.alignment_tokens, lookahead_tokens(layout)
    return (max(0, after_tokens - ahead) // step + 1) * step + ahead


def next_kept_boundary(
    layout: Layout,
    policy: Policy,
    after_tokens: int,
    *,
    junctions: Iterable[int] = (),
    end_tokens: int,
) -> int:
    """As `next_boundary`, until one is there that `boundaries` of the same arguments keeps.

    For layouts without recurrent states. `NEVER` where none follows.
    """
    step, ahead = layout.alignment_tokens, lookahead_tokens(layout)
    first = max(0, after_tokens - ahead) // step + 1
    if policy.kind is PolicyKind.DENSE:
        return first * step + ahead
    marks = _marks(policy, junctions, end_tokens, step, ahead)
    if policy.kind is not PolicyKind.END:
        interval = policy.interval_tokens
        marks.append(-(-first * step // interval) * interval // step)
    later = [m for m in marks if m >= first]
    return min(later) * step + ahead if later else NEVER


def _each(row: _Row, at: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if row.chunk_tokens:
        low = at // row.chunk_tokens * row.chunk_tokens
    elif row.back_tokens == _EVERYTHING:
        low = np.zeros_like(at)
    else:
        low = np.maximum(0, at - row.back_tokens)
    return low // row.block_tokens, at // row.block_tokens + row.ahead_blocks


def _union(row: _Row, at: NDArray[np.int64]) -> Ranges:
    """The union of one group's needs at the ascending boundaries `at`."""
    if not len(at):
        return _NO_RANGES
    if len(at) == 1 or row.back_tokens == _EVERYTHING:
        first, end = _need(row, int(at[-1]))
        return np.array([[first, end]], np.int64) if first < end else _NO_RANGES
    firsts, ends = _each(row, at)
    some = firsts < ends
    if not some.all():
        firsts, ends = firsts[some], ends[some]
        if not len(firsts):
            return _NO_RANGES
    # Both ascend, so a range opens wherever it does not touch the one before it.
    opens = np.append(True, firsts[1:] > ends[:-1])
    return np.stack([firsts[opens], ends[np.append(opens[1:], True)]], axis=1)


# The longest hit. ------------------------------------------------------------------------------


class View(Protocol):
    """What could be loaded now, asked in runs; a million tokens are too many to ask one by one."""

    def first_missing(self, group: int, first: int, end: int) -> int:
        """The first block of `[first, end)` of `group` that is not there; `end`: all are."""
        ...

    def last_ends(self, groups: Sequence[int], low: int, high: int) -> int:
        """The largest multiple of the alignment in `(low, high]` where `groups` have an end.

        That is, where the block of each group that ends there is there. 0: there is none.
        """
        ...


def longest_hit(
    layout: Layout,
    known_tokens: int,
    present: Present | View,
    *,
    local_tokens: int = 0,
    max_boundary: int | None = None,
) -> int:
    """The largest boundary at which every group has what it needs; 0 where there is none.

    The last known token is always computed, so the boundary is at most `known_tokens - 1`, and its
    look-ahead blocks lie in the known tokens.

    present: a function, asked at most once per block and only for blocks that decide something;
        or a view.
    local_tokens: the engine holds the prefix `[0, local_tokens)` itself. Blocks wholly in it count
        as present, and only a boundary above it is an answer.
    max_boundary: no boundary above this is an answer.
    """
    top = known_tokens - 1 if max_boundary is None else min(known_tokens - 1, max_boundary)
    view = _Asking(layout, present) if callable(present) else present
    top = known_prefix(layout, known_tokens, view, local_tokens=local_tokens, max_boundary=top)
    return _highest_with_tails(layout, top, local_tokens, view)


def known_prefix(
    layout: Layout,
    known_tokens: int,
    view: View,
    *,
    local_tokens: int = 0,
    max_boundary: int | None = None,
) -> int:
    """The largest boundary that the full groups alone allow: what `dense` would make of a hit.

    A prompt that leaves what is known leaves it there, so this is a junction, too. Without a full
    group it says nothing: the largest boundary of the known tokens.
    """
    step = layout.alignment_tokens
    top = known_tokens - lookahead_tokens(layout)
    if max_boundary is not None:
        top = min(top, max_boundary)
    top = max(0, top // step * step)
    for g, row in enumerate(_rows(layout)):
        if top > local_tokens and row.back_tokens == _EVERYTHING:
            end = top // row.block_tokens + row.ahead_blocks
            run = view.first_missing(g, local_tokens // row.block_tokens, end)
            top = max(0, run - row.ahead_blocks) * row.block_tokens // step * step
    return top


@functools.lru_cache(maxsize=64)
def tells_junctions(layout: Layout) -> bool:
    """Whether what is kept tells how far prompts share a beginning: by full-attention blocks.

    They are kept up to the last boundary whatever the policy. Without a full group nothing tells.
    """
    return any(row.back_tokens == _EVERYTHING for row in _rows(layout))


def _highest_with_tails(layout: Layout, top: int, local_tokens: int, view: View) -> int:
    """The largest boundary in `(local_tokens, top]` at which the groups that are not full agree."""
    step = layout.alignment_tokens
    tails = [(g, r) for g, r in enumerate(_rows(layout)) if r.back_tokens != _EVERYTHING]
    # A row that looks back always reads the block that ends at the boundary. So few boundaries
    # are worth a closer look where few tails were kept, however many blocks there are.
    ends = [g for g, r in tails if r.back_tokens]
    boundary = top
    while boundary > local_tokens:
        if ends:
            boundary = view.last_ends(ends, local_tokens, boundary)
        limit = boundary
        for g, row in tails:
            first, end = _need(row, boundary)
            first = max(first, local_tokens // row.block_tokens)
            missing = view.first_missing(g, first, end) if first < end else end
            if missing < end:
                # Every boundary whose need still includes that block is out as well.
                limit = min(boundary - step, (missing - row.ahead_blocks) * row.block_tokens)
                break
        if limit == boundary:
            return boundary
        boundary = limit // step * step
    return 0


class _Asking:
    """A view that asks a function, once per block."""

    def __init__(self, layout: Layout, present: Present) -> None:
        self._ask = functools.cache(present)
        self._step = layout.alignment_tokens
        self._block_tokens = [r.block_tokens for r in _rows(layout)]

    def first_missing(self, group: int, first: int, end: int) -> int:
        return next((b for b in range(first, end) if not self._ask(group, b)), end)

    def last_ends(self, groups: Sequence[int], low: int, high: int) -> int:
        for boundary in range(high, low, -self._step):
            if all(self._ask(g, boundary // self._block_tokens[g] - 1) for g in groups):
                return boundary
        return 0
