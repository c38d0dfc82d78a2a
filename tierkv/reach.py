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

import difflib
import enum
import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class PolicyKind(enum.StrEnum):
    """How a boundary policy chooses."""

    DENSE = "dense"
    END = "end"
    INTERVAL = "interval"


@dataclass(frozen=True, slots=True)
class Policy:
    """Which boundaries of a prompt are kept; make one with `Policy.parse`.

    dense: every multiple of the alignment. end: the last boundary that a longer prompt can reach,
    the last one that the same prompt can reach, and the junctions. interval: for every multiple of
    `interval_tokens`, the last multiple of the alignment at or below it, and the junctions.
    """

    kind: PolicyKind
    interval_tokens: int = 0

    def __str__(self) -> str:
        if self.kind is PolicyKind.INTERVAL:
            return f"interval:{self.interval_tokens}"
        return str(self.kind)

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        """A policy from ``dense``, ``end`` or ``interval:4096``; `ConfigError` for another."""
        if isinstance(text, Policy):
            return text
        name, colon, argument = text.partition(":")
        if not colon and name in (PolicyKind.DENSE, PolicyKind.END):
            return cls(PolicyKind(name))
        if name == PolicyKind.INTERVAL:
            tokens = int(argument) if argument.isascii() and argument.isdigit() else 0
            if tokens < 1:
                raise ConfigError(
                    f"policy {text!r}: write the tokens between two kept boundaries, "
                    "like interval:4096"
                )
            return cls(PolicyKind.INTERVAL, tokens)
        if text == "auto":
            raise ConfigError("policy 'auto' is not there yet; write dense, end or interval:TOKENS")
        near = difflib.get_close_matches(name, [str(k) for k in PolicyKind], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"unknown policy {text!r}{hint}; write dense, end or interval:TOKENS")


DENSE = Policy(PolicyKind.DENSE)


def _chosen(
    layout: Layout, policy: Policy, known_tokens: int, junctions: Iterable[int]
) -> NDArray[np.int64]:
    """Multiples of the alignment that the policy keeps, sorted; the last may be out of reach."""
    step = layout.alignment_tokens
    last = max(0, known_tokens - lookahead_tokens(layout)) // step
    if policy.kind is PolicyKind.DENSE:
        return np.arange(1, last + 1, dtype=np.int64) * step
    if policy.kind is PolicyKind.END:
        own = np.array([min(last, max(0, known_tokens - 1) // step), last], dtype=np.int64)
    else:
        marks = np.arange(1, known_tokens // policy.interval_tokens + 1, dtype=np.int64)
        own = marks * policy.interval_tokens // step
    also = np.array([j // step for j in junctions], dtype=np.int64)
    picked = np.unique(np.concatenate([own, also]))
    kept: NDArray[np.int64] = picked[(picked > 0) & (picked <= last)] * step
    return kept


def boundaries(
    layout: Layout,
    policy: Policy,
    known_tokens: int,
    produced: Collection[int] | None = None,
    *,
    junctions: Iterable[int] = (),
) -> NDArray[np.int64]:
    """Boundaries (tokens, int64, ascending) that `policy` keeps of `known_tokens` known tokens.

    Only boundaries that a hit can end at: positive multiples of the alignment whose look-ahead
    blocks lie in the known tokens.

    produced: token positions at which the engine took the states of every recurrent group; no
        boundary elsewhere is kept. None: it takes one at every boundary. Ignored where the layout
        has no recurrent group.
    junctions: token positions at which prompts were seen to branch; the boundary at or below each
        is kept under every policy.
    """
    kept = _chosen(layout, policy, known_tokens, junctions)
    if produced is not None and any(g.kind is GroupKind.RECURRENT for g in layout.groups):
        at = np.fromiter(produced, dtype=np.int64, count=len(produced))
        kept = kept[np.isin(kept, at)]
    return kept


def keep(
    layout: Layout,
    policy: Policy,
    known_tokens: int,
    produced: Collection[int] | None = None,
    *,
    junctions: Iterable[int] = (),
) -> list[Ranges]:
    """The blocks worth keeping of a prompt: one `Ranges` per group.

    The union of `need` over `boundaries(...)` of the same arguments. The cost grows with the
    boundaries kept, not with the blocks that exist.
    """
    at = boundaries(layout, policy, known_tokens, produced, junctions=junctions)
    return [_union(row, at) for row in _rows(layout)]


def keep_between(
    layout: Layout,
    policy: Policy,
    after_tokens: int,
    upto_tokens: int,
    known_tokens: int,
    produced: Collection[int] | None = None,
    *,
    junctions: Iterable[int] = (),
) -> list[Ranges]:
    """What a step that computed tokens `[after_tokens, upto_tokens)` adds to `keep`.

    A boundary becomes available when its tokens and its look-ahead blocks are computed. The answer
    is the blocks needed by the boundaries that became available in this step, less those that an
    earlier boundary of the same arguments needed already. So for one `known_tokens`, the answers
    of any cut into steps `0 = t0 <= t1 <= ... = known_tokens` are disjoint, and their union is
    `keep(layout, policy, known_tokens, ...)`. Where `known_tokens` grew between two calls (decode),
    blocks may come again but none is missed.

    Count as computed only tokens that are final: not the drafted ones that may be taken back.
    """
    ahead, step = lookahead_tokens(layout), layout.alignment_tokens
    if max(0, upto_tokens - ahead) // step <= max(0, after_tokens - ahead) // step:
        return [_NO_RANGES] * len(layout.groups)  # most decode steps pass no boundary at all
    at = boundaries(layout, policy, known_tokens, produced, junctions=junctions)
    ready = at + ahead
    new = at[(ready > after_tokens) & (ready <= upto_tokens)]
    old = at[ready <= after_tokens]
    # `need` moves only forward with the boundary, so the last old one bounds them all.
    previous = int(old[-1]) if len(old) else 0
    return [_without_before(_union(row, new), row, previous) for row in _rows(layout)]


def _without_before(ranges: Ranges, row: _Row, previous: int) -> Ranges:
    """`ranges` less what boundaries up to `previous` needed."""
    if not previous or not len(ranges):
        return ranges
    end = _need(row, previous)[1]
    clipped = ranges[ranges[:, 1] > end].copy()
    if len(clipped):
        clipped[0, 0] = max(int(clipped[0, 0]), end)
    return clipped


def _union(row: _Row, at: NDArray[np.int64]) -> Ranges:
    """The union of one group's needs at the ascending boundaries `at`."""
    if not len(at):
        return _NO_RANGES
    if row.back_tokens == _EVERYTHING:
        return np.array([_need(row, int(at[-1]))], dtype=np.int64)
    if row.chunk_tokens:
        low = at // row.chunk_tokens * row.chunk_tokens
    else:
        low = np.maximum(0, at - row.back_tokens)
    first = low // row.block_tokens
    end = at // row.block_tokens + row.ahead_blocks
    some = first < end
    first, end = first[some], end[some]
    if not len(first):
        return _NO_RANGES
    # first and end both ascend, so a range opens wherever it does not touch the one before it.
    opens = np.concatenate([[True], first[1:] > end[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.stack([first[opens], end[closes]], axis=1)


# The longest hit. ------------------------------------------------------------------------------


def longest_hit(
    layout: Layout,
    known_tokens: int,
    present: Present,
    *,
    local_tokens: int = 0,
    max_boundary: int | None = None,
) -> int:
    """The largest boundary at which every group has what it needs; 0 where there is none.

    The last known token is always computed, so the boundary is at most `known_tokens - 1`, and its
    look-ahead blocks lie in the known tokens.

    present: asked at most once per block, and only for blocks that decide something.
    local_tokens: the engine holds the prefix `[0, local_tokens)` itself. Blocks wholly in it count
        as present, and only a boundary above it is an answer.
    max_boundary: no boundary above this is an answer.
    """
    step = layout.alignment_tokens
    top = min(known_tokens - 1, known_tokens - lookahead_tokens(layout))
    if max_boundary is not None:
        top = min(top, max_boundary)
    top = top // step * step
    rows = _rows(layout)
    # Full groups first: each needs a prefix, so they bound the answer with one walk each.
    for g, row in enumerate(rows):
        if top > local_tokens and row.back_tokens == _EVERYTHING:
            top = _prefix_bound(g, row, top, step, local_tokens, present)
    tails = [(g, r) for g, r in enumerate(rows) if r.back_tokens != _EVERYTHING]
    return _highest_with_tails(tails, top, step, local_tokens, present)


def _prefix_bound(
    group: int, row: _Row, top: int, step: int, local_tokens: int, present: Present
) -> int:
    """The largest boundary up to `top` whose whole prefix is present in a full group."""
    block = local_tokens // row.block_tokens
    end = top // row.block_tokens + row.ahead_blocks
    while block < end and present(group, block):
        block += 1
    return max(0, block - row.ahead_blocks) * row.block_tokens // step * step


def _highest_with_tails(
    tails: list[tuple[int, _Row]], top: int, step: int, local_tokens: int, present: Present
) -> int:
    """The largest boundary in `(local_tokens, top]` at which all groups of `tails` agree."""
    known: list[dict[int, bool]] = [{} for _ in tails]
    boundary = top
    while boundary > local_tokens:
        limit = boundary
        for (g, row), answers in zip(tails, known, strict=True):
            missing = _first_missing(g, row, boundary, local_tokens, present, answers)
            if missing is not None:
                # Every boundary whose need still includes that block is out as well.
                limit = min(boundary - step, (missing - row.ahead_blocks) * row.block_tokens)
                break
        if limit == boundary:
            return boundary
        boundary = limit // step * step
    return 0


def _first_missing(
    group: int,
    row: _Row,
    boundary: int,
    local_tokens: int,
    present: Present,
    answers: dict[int, bool],
) -> int | None:
    first, end = _need(row, boundary)
    for block in range(max(first, local_tokens // row.block_tokens), end):
        found = answers.get(block)
        if found is None:
            found = answers[block] = present(group, block)
        if not found:
            return block
    return None
