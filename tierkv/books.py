"""State that the deciding half shares: index, room, epoch, counters, commands to the ranks.

`tierkv.ledger` is the door; `tierkv.flights` and `tierkv.holdings` are its two departments. Nobody
else writes here.
"""

from __future__ import annotations

import enum
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import Keys, Move, MoveKind, planned_move
from tierkv.index import Index, Pinned, Rows, Tier
from tierkv.layout import GroupKind, Layout
from tierkv.past import Past
from tierkv.room import Room

BLOCKS_PER_MEMORY: Final = 1
"""So many blocks that the index knows give the past one entry, of 5 bytes."""

_LONGEST: Final = np.iinfo(np.int32).max


class Miss(enum.StrEnum):
    """Why a lookup found nothing."""

    SHORT = "below minimum unit"
    """No hit can end in so few tokens: see `tierkv.planner.min_known_tokens`."""
    ABSENT = "nothing stored"
    """Nothing that goes beyond what the engine holds itself."""
    NO_ROOM = "no room"
    """The arena is too full to take in what the storage tier has."""
    WAITED = "waited too long"
    """For somebody else's load."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer to a lookup.

    tokens: the boundary at which the hit ends; 0, or no more than the local tokens, for a miss.
    pending: the blocks are on their way for somebody else; ask again later.
    tier_tokens: tokens from the first block that must be read from the storage tier to the end.
    miss: why it is none; None for a hit, and while pending.
    """

    tokens: int
    pending: bool = False
    tier_tokens: int = 0
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Agree:
    """Tell this rank that its retirement is agreed."""

    rank: int
    retire_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Appraised:
    """Tell this rank which blocks of its question are worth writing again: bool[n]."""

    rank: int
    question_id: int
    worth: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rotate:
    """Tell every rank that everything older than this epoch is void."""

    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Give this move to one rank (None: to all). It has no device side."""

    rank: int | None
    move: Move


Command = Agree | Appraised | Rotate | Submit

COUNTERS: Final = (
    "lookups",
    "short_lookups",
    "hits",
    "hit_tokens",
    "hit_blocks",
    "hit_bytes",
    "saved_blocks",
    "saved_bytes",
    "stored_blocks",
    "stored_tokens",
    "stored_bytes",
    "failed_save_blocks",
    "declined_blocks",
    "skipped_blocks",
    "skipped_tokens",
    "skipped_bytes",
    "loaded_blocks",
    "loaded_bytes",
    "load_missing_blocks",
    "load_corrupt_blocks",
    "load_failed_blocks",
    "load_timed_out_blocks",
    "lost_blocks",
    "evicted_tier_blocks",
    "evicted_tier_tokens",
    "evicted_tier_bytes",
    "recovered_blocks",
    "promises_expired",
    "pending_given_up",
    "tier_down",
    "rotations",
)
"""Names of the monotonic counters; units are in the names. Tokens of hits are a prompt's; elsewhere
they are what the blocks cover, each group counted for itself."""


class Census:
    """Counts what the tier holds, a slice of the index at a time.

    So no scheduler step pays for a million blocks. `found` is as of the last whole pass.
    """

    SLICE: Final = 1 << 13
    """Rows of one slice: 0.02 ms."""

    def __init__(self, index: Index, payload: NDArray[np.int64]) -> None:
        self._index, self._payload = index, payload
        self._at = 0
        self._sums: Counter[str] = Counter()
        self.found = dict.fromkeys(_count(index, payload, slice(0, 0)), 0)

    def advance(self) -> bool:
        """Count the next slice. True where that ended a pass."""
        end = self._at + self.SLICE
        self._sums.update(_count(self._index, self._payload, slice(self._at, end)))
        self._at = end
        if end < len(self._index.tier):
            return False
        self.found = {name: self._sums[name] for name in self.found}
        self._at, self._sums = 0, Counter()
        return True


def _count(index: Index, payload: NDArray[np.int64], rows: slice) -> dict[str, int]:
    """Of these rows: blocks in the tier, and what of them was never read."""
    stored = index.tier[rows] == Tier.RESIDENT
    stored &= index.are_known(rows)
    unread = np.flatnonzero(stored & (index.read[rows] == 0))
    return {
        "tier_blocks": int(stored.sum()),
        "never_read_blocks": len(unread),
        "never_read_bytes": int(payload[index.group[rows][unread]].sum()),
    }


class Books:
    """See the module. `epoch` counts rotations; `capacity_version` changes when room was made."""

    def __init__(
        self, layout: Layout, *, arena_bytes: int, ranks: int, clock: Callable[[], float]
    ) -> None:
        self.layout = layout
        self.ranks = ranks
        self.clock = clock
        self.epoch = 0
        self.capacity_version = 0
        self.index = Index(len(layout.groups))
        self.room = Room(self.index, layout.block_bytes, arena_bytes)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.commands: list[Command] = []
        self._block_bytes = layout.block_bytes
        self._block_tokens = tuple(g.block_tokens for g in layout.groups)
        self._payload: NDArray[np.int64] = np.array(layout.block_bytes, np.int64)
        self.census = Census(self.index, self._payload)
        self.past = Past()
        self._tick = 0
        self._last_id = 0

    def new_id(self) -> int:
        """The id of the next move; never 0."""
        self._last_id += 1
        return self._last_id

    def touch(self, rows: Rows) -> None:
        """These rows are used now, together."""
        self._tick += 1
        self.index.tick[rows] = self._tick

    @property
    def next_tick(self) -> int:
        """The clock's value at the next use."""
        return self._tick + 1

    def use(self, rows: Rows, since: int) -> None:
        """`touch`, by a prompt that came when the clock was at `since`, and count it.

        What was touched since then is not counted again: by this prompt, that looks a block up,
        loads it and meets it once more when it saves, or by one beside it.
        """
        if not len(rows):
            return
        self._tick += 1
        index, now = self.index, self._tick
        before = index.tick[rows]
        if before.max() >= since:
            fresh = before < since
            rows, again, before = rows[fresh], rows[~fresh], before[fresh]
            index.tick[again] = now
        uses = index.uses[rows]
        index.uses[rows] = uses + (uses < 255)
        index.gap[rows] = np.where(before > 0, np.minimum(now - before, _LONGEST), 0)
        index.tick[rows] = now

    def remember(self, rows: Rows) -> None:
        """These blocks leave the tier: keep in mind how often they were used."""
        index = self.index
        self.past.reserve(len(index) // BLOCKS_PER_MEMORY)
        self.past.remember(index.keys_of(rows), index.uses[rows])

    def recall(self, groups: NDArray[np.uint16], names: Sequence[bytes]) -> NDArray[np.uint8]:
        """uint8[n]: how often blocks of one prompt were used before they left; see `tierkv.past`.

        In the order of the prompt. In a full group what precedes a block was used whenever it was.
        """
        uses = np.zeros(len(names), np.uint8)
        if not self.past.entries:
            return uses
        keys = Keys(groups, b"".join(names))
        for group in np.unique(groups).tolist():
            mine = groups == group
            chained = self.layout.groups[group].kind is GroupKind.FULL
            uses[mine] = self.past.recall(keys.take(mine), chained=chained)
        return uses

    def count(self, what: str, rows: Rows, *, tokens: bool = False) -> None:
        """Add rows to the counters `<what>_blocks`, `<what>_bytes` and, if asked, `<what>_tokens`.

        Tokens are what the blocks cover.
        """
        by_group = np.bincount(self.index.group[rows]).tolist()
        counters, nbytes = self.counters, self._block_bytes
        counters[f"{what}_blocks"] += len(rows)
        counters[f"{what}_bytes"] += sum(map(operator.mul, by_group, nbytes))
        if tokens:
            counters[f"{what}_tokens"] += self.tokens_of(by_group)

    def tokens_of(self, blocks_by_group: Sequence[int]) -> int:
        """Tokens that so many blocks of each group cover, each group counted for itself."""
        return sum(map(operator.mul, blocks_by_group, self._block_tokens))

    def count_skipped(self, blocks_by_group: Sequence[int]) -> None:
        """Add blocks that no hit can reach, one number a group, to the counters."""
        nbytes = self._block_bytes
        self.counters["skipped_blocks"] += sum(blocks_by_group)
        self.counters["skipped_tokens"] += self.tokens_of(blocks_by_group)
        self.counters["skipped_bytes"] += sum(map(operator.mul, blocks_by_group, nbytes))

    def gauges(self) -> dict[str, int]:
        """What is where now; costs one pass over the columns."""
        index = self.index
        live = index.live()
        return (
            self.quick_gauges()
            | _count(index, self._payload, slice(None))
            | {
                "pinned_blocks": int((index.pinned[live] == Pinned.RESIDENT).sum()),
                "leased_blocks": int((index.leases[live] > 0).sum()),
            }
        )

    def glance(self) -> dict[str, int]:
        """Counters and gauges, those of the columns as of the last census."""
        return self.counters | self.quick_gauges() | self.census.found

    def quick_gauges(self) -> dict[str, int]:
        """Those that are known without a look at the columns."""
        room = self.room
        return {
            "pinned_bytes": room.slots.capacity_bytes - room.slots.free_bytes,
            "pinned_capacity_bytes": room.slots.capacity_bytes,
            "evicted_pinned_blocks": sum(room.evicted_by_group),
            "evicted_pinned_tokens": self.tokens_of(room.evicted_by_group),
            "evicted_pinned_bytes": room.evicted_bytes,
            "epoch": self.epoch,
        }

    def freed(self, rows: Rows) -> None:
        """Leases ended or residency went: give back rows that nothing refers to."""
        self.capacity_version += 1
        self.room.drop_free(rows)

    def order_delete(self, keys: Keys, rank: int | None = None) -> None:
        """Have ranks forget keys in their tiers; nobody waits for the answer."""
        if len(keys):
            move = planned_move(self.new_id(), MoveKind.DELETE, keys, epoch=self.epoch)
            self.commands.append(Submit(rank, move))
