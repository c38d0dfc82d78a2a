"""What the async API answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixHit:
    """Answer to a lookup: leased to you until `Cache.load` ends, `release`, or 30 s pass.

    tokens: how many leading tokens need not be computed; 0 for a miss.
    tier_tokens: how many of them, from the first block that is not in RAM, come from storage.
    blocks: group name to the half-open range of block indices that `load` fills; your table must
        have an entry for each.
    """

    tokens: int
    tier_tokens: int
    blocks: dict[str, range]
    local_tokens: int = 0
    owner: str = field(default="", repr=False)
    _let_go: Callable[[str], None] | None = field(default=None, repr=False)

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
