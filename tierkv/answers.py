"""What the async API answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierkv import reach
from tierkv.blocks import Outcome
from tierkv.books import Miss
from tierkv.layout import Layout


@dataclass(slots=True)
class PrefixHit:
    """Answer to a lookup: leased to you until `Cache.load` ends, `release`, or 30 s pass.

    tokens: how many leading tokens need not be computed; 0 for a miss.
    tier_tokens: how many of them, from the first block that is not in RAM, come from storage.
    blocks: group name to the half-open range of block indices that `load` fills; your table must
        have an entry for each.
    miss: why there is nothing, in words; None for a hit.
    """

    tokens: int
    tier_tokens: int
    blocks: dict[str, range]
    local_tokens: int = 0
    owner: str = field(default="", repr=False)
    _let_go: Callable[[str], None] | None = field(default=None, repr=False)
    miss: Miss | None = None

    def release(self) -> None:
        """Give the lease back without loading. Safe to call twice and after a load."""
        if self._let_go is not None:
            self._let_go(self.owner)
            self._let_go = None

    def __bool__(self) -> bool:
        return self.tokens > self.local_tokens


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load left in your pages.

    tokens: leading tokens that are there now and proven: the hit's, or fewer where blocks failed.
    blocks: how many blocks were copied. nbytes: their payload.
    failed: group name to block indices that could not be had; their pages are as they were.
    """

    tokens: int
    blocks: int
    nbytes: int
    failed: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did.

    blocks: newly in pinned RAM. nbytes: their payload. declined_blocks: found no room.
    skipped_blocks: blocks that no hit can reach, so nobody stores them.
    """

    blocks: int
    nbytes: int
    declined_blocks: int
    skipped_blocks: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush found: `unstored_blocks` are in pinned RAM but the tier did not take them."""

    unstored_blocks: int


def loaded(layout: Layout, hit: PrefixHit, outcomes: NDArray[np.uint8]) -> Loaded:
    """What a load of `hit` came to. outcomes: uint8[n] of `Outcome`, in the order of its blocks."""
    at = [(layout.index_of(name), b) for name, blocks in hit.blocks.items() for b in blocks]
    good = {key for key, o in zip(at, outcomes.tolist(), strict=True) if o == Outcome.DONE}
    failed: dict[str, list[int]] = {}
    for g, b in at:
        if (g, b) not in good:
            failed.setdefault(layout.groups[g].name, []).append(b)
    tokens = hit.tokens
    if failed:
        # What the look-ahead of a draft group would need is not ours to load: count it there.
        tokens = reach.longest_hit(
            layout,
            hit.tokens + 1 + reach.lookahead_tokens(layout),
            lambda g, b: (g, b) in good or b * layout.groups[g].block_tokens >= hit.tokens,
            local_tokens=hit.local_tokens,
            max_boundary=hit.tokens,
        )
    nbytes = sum(layout.groups[g].block_bytes for g, _ in good)
    return Loaded(max(tokens, hit.local_tokens), len(good), nbytes, failed)
