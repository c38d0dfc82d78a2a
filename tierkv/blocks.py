"""Batches of blocks as columns: keys, moves, outcomes. No object per block anywhere.

Everything that travels between the side that decides and the side that moves is here. The types
are plain data: numpy columns and packed bytes, cheap to build, to slice and to put on a wire.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.ma  # `np.unique` imports it when it is first called: 30 ms on the loop
from numpy.typing import NDArray

HASH_BYTES: Final = 32
"""Width of a block hash in bytes. Shorter hashes are padded on the right with zeros at the edge."""

ARENA_ALIGN: Final = 4096
"""Every slot of the arena starts at and is as long as a multiple of this many bytes: the page
size, and no smaller than any direct-I/O alignment met so far (512)."""


_NO_ALGORITHMS: Final = np.empty(0, np.uint8)
_NO_CHECKSUMS: Final = np.empty(0, np.uint64)


def slot_bytes(nbytes: int) -> int:
    """Bytes a block of `nbytes` takes in the arena: rounded up to `ARENA_ALIGN`."""
    return -(-nbytes // ARENA_ALIGN) * ARENA_ALIGN


class Outcome(enum.IntEnum):
    """What became of one block of a move. A miss is an answer, not an error."""

    DONE = 0
    """Saved: published and readable. Loaded: the bytes are in the buffer and verified."""
    MISSING = 1
    """Load: the tier does not have it (any more)."""
    CORRUPT = 2
    """Load: proven wrong (checksum or key); the tier has forgotten it."""
    DECLINED = 3
    """Save: no room, throttled, or not worth it. Try again when something changes."""
    FAILED = 4
    """A transient error; nothing is forgotten."""
    TIMED_OUT = 5
    """The deadline passed. The buffer stays busy until the move is released."""


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """A batch of block keys within one namespace.

    groups: uint16[n], index of the group in the layout.
    hashes: n * HASH_BYTES packed bytes, one block hash after the other.
    """

    groups: NDArray[np.uint16]
    hashes: bytes

    def __post_init__(self) -> None:
        if len(self.hashes) != len(self.groups) * HASH_BYTES:
            raise ValueError(f"{len(self.groups)} groups but {len(self.hashes)} hash bytes")

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        hashes = self.hashes
        for i, g in enumerate(self.groups.tolist()):
            yield g, hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]

    def hash_at(self, i: int) -> bytes:
        """The HASH_BYTES of the i-th key."""
        return self.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]

    def take(self, rows: NDArray[Any] | list[int]) -> Keys:
        """The keys at integer positions `rows`, or where the boolean mask `rows` is true."""
        table = np.frombuffer(self.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        picked = np.asarray(rows)
        if picked.dtype != np.bool_:
            picked = picked.astype(np.intp, copy=False)
        return Keys(self.groups[picked], table[picked].tobytes())

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, bytes]]) -> Keys:
        """Build from (group, hash) pairs; hashes shorter than HASH_BYTES are zero-padded."""
        items = list(pairs)
        groups = np.fromiter((g for g, _ in items), dtype=np.uint16, count=len(items))
        return cls(groups, b"".join(h.ljust(HASH_BYTES, b"\0") for _, h in items))

    @classmethod
    def concat(cls, parts: Iterable[Keys]) -> Keys:
        """All keys of `parts`, in order."""
        items = list(parts)
        if not items:
            return NO_KEYS
        return cls(np.concatenate([p.groups for p in items]), b"".join(p.hashes for p in items))


NO_KEYS: Final = Keys(np.empty(0, np.uint16), b"")


class MoveKind(enum.IntEnum):
    """Direction of a move."""

    SAVE = 1
    """device pages → arena slots → storage tier."""
    LOAD = 2
    """storage tier → arena slots (rows with `from_tier`) → device pages."""
    DELETE = 3
    """Forget these keys in the storage tier; no buffers."""


_PLANNED: Final = object()


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """One decided transfer: these blocks, from here to there. Only the planner's side makes one.

    A move holds *only* blocks that a hit can read: aligned full-attention blocks, boundary window
    blocks, boundary states. To keep that promise, the constructor wants a seal that
    `tierkv.ledger` (which acts on plans) and the wire decoder hold; `tierkv.testing` has a maker
    for tests.

    id: unique while the cache is open. 0 never occurs.
    keys: n keys.
    offsets: int64[n], byte offsets of the arena slots. Empty for DELETE.
    block_ids: int32[n], the engine's block ids (pages) for the device side; empty where the
        caller has none. Id 0 is an ordinary id.
    from_tier: bool[n], LOAD only: the row must first be read from the storage tier. Rows without
        it lie in the arena already. Empty for other kinds.
    epoch: the rotation the move belongs to; a mover refuses moves of an older one.
    algorithms: uint8[n] of `tierkv.record.Algorithm`, 0 for none, SAVE only: checksums that were
        made where the pages are; empty where the storage half makes them all.
    checksums: uint64[n] beside them.
    """

    id: int
    kind: MoveKind
    keys: Keys
    offsets: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    from_tier: NDArray[np.bool_]
    epoch: int
    seal: object = None
    algorithms: NDArray[np.uint8] = field(default_factory=lambda: _NO_ALGORITHMS)
    checksums: NDArray[np.uint64] = field(default_factory=lambda: _NO_CHECKSUMS)

    def __post_init__(self) -> None:
        if self.seal is not _PLANNED:
            raise TypeError("a Move is made by the planner's side; tests use tierkv.testing")

    def __len__(self) -> int:
        return len(self.keys)

    def summed(self, algorithm: int, checksums: NDArray[np.uint64]) -> Move:
        """The same save with a checksum for each of its blocks."""
        algorithms = np.full(len(self), algorithm, np.uint8)
        return replace(self, algorithms=algorithms, checksums=checksums)

    def pack(self) -> tuple[Any, ...]:
        """A tuple of ints and bytes for any wire; `unpack` reads it."""
        return (
            self.id,
            int(self.kind),
            self.keys.groups.tobytes(),
            self.keys.hashes,
            self.offsets.tobytes(),
            self.block_ids.tobytes(),
            self.from_tier.tobytes(),
            self.epoch,
            self.algorithms.tobytes(),
            self.checksums.tobytes(),
        )

    @classmethod
    def unpack(cls, data: tuple[Any, ...]) -> Move:
        """Rebuild a move that `pack` wrote."""
        move_id, kind, groups, hashes, offsets, block_ids, from_tier, epoch, *sums = data
        algorithms, checksums = sums
        return cls(
            move_id,
            MoveKind(kind),
            Keys(np.frombuffer(groups, np.uint16), hashes),
            np.frombuffer(offsets, np.int64),
            np.frombuffer(block_ids, np.int32),
            np.frombuffer(from_tier, np.bool_),
            epoch,
            _PLANNED,
            np.frombuffer(algorithms, np.uint8),
            np.frombuffer(checksums, np.uint64),
        )


def planned_move(
    move_id: int,
    kind: MoveKind,
    keys: Keys,
    *,
    offsets: NDArray[np.int64] | None = None,
    block_ids: NDArray[np.int32] | None = None,
    from_tier: NDArray[np.bool_] | None = None,
    epoch: int = 0,
) -> Move:
    """Make a sealed move. For `tierkv.ledger` and `tierkv.testing` only (import-linter checks)."""
    return Move(
        move_id,
        kind,
        keys,
        np.empty(0, np.int64) if offsets is None else offsets,
        np.empty(0, np.int32) if block_ids is None else block_ids,
        np.empty(0, np.bool_) if from_tier is None else from_tier,
        epoch,
        _PLANNED,
    )


# What the storage half tells the side that decides. -------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class MoveDone:
    """A move ended in the storage half, with one outcome per row.

    outcomes: uint8[n] of `Outcome`. LOAD rows without `from_tier` are DONE.
    released: whether nothing touches the move's slots any more. Where false, a `MoveReleased`
        follows, or the keeper's end says the same.
    """

    move_id: int
    outcomes: NDArray[np.uint8]
    released: bool = True


@dataclass(frozen=True, slots=True)
class MoveReleased:
    """Nothing touches the slots of this earlier unreleased move any more."""

    move_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Retire:
    """The tier wants to give up these blocks. They stay readable until the answer `agree(id)`.

    The side that decides stops promising them at once and agrees when no lease holds one.
    """

    retire_id: int
    keys: Keys


@dataclass(frozen=True, slots=True, eq=False)
class Appraise:
    """The tier asks which of these blocks are worth writing again before it gives their space up.

    It withdraws nothing. The answer is `appraised(id, bool[n])`; without one none is.
    """

    question_id: int
    keys: Keys


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """The tier is open and holds these blocks; everything known of it before is void.

    Sent at open, and again whenever a keeper was started anew. `epoch` is the rotation it serves.
    """

    keys: Keys
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class TierDown:
    """The tier is gone for now: nothing it held may be promised. Moves in flight were ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Copied:
    """The device side has copied a SAVE's pages into their arena slots (on one rank)."""

    move_id: int


Event = MoveDone | MoveReleased | Retire | Appraise | Recovered | TierDown | Copied


def pack_event(event: Event) -> tuple[Any, ...]:
    """A tuple of ints, strings and bytes for any wire; `unpack_event` reads it."""
    match event:
        case MoveDone(move_id, outcomes, released):
            return ("done", move_id, outcomes.tobytes(), released)
        case MoveReleased(move_id):
            return ("released", move_id)
        case Retire(retire_id, keys):
            return ("retire", retire_id, keys.groups.tobytes(), keys.hashes)
        case Appraise(question_id, keys):
            return ("appraise", question_id, keys.groups.tobytes(), keys.hashes)
        case Recovered(keys, epoch):
            return ("recovered", keys.groups.tobytes(), keys.hashes, epoch)
        case TierDown(reason):
            return ("down", reason)
        case Copied(move_id):
            return ("copied", move_id)


def unpack_event(data: Sequence[Any]) -> Event:
    """Rebuild an event that `pack_event` wrote; `ValueError` for anything else."""
    match data:
        case ("done", int(move_id), bytes(outcomes), bool(released)):
            return MoveDone(move_id, np.frombuffer(outcomes, np.uint8), released)
        case ("released", int(move_id)):
            return MoveReleased(move_id)
        case ("retire", int(retire_id), bytes(groups), bytes(hashes)):
            return Retire(retire_id, Keys(np.frombuffer(groups, np.uint16), hashes))
        case ("appraise", int(question_id), bytes(groups), bytes(hashes)):
            return Appraise(question_id, Keys(np.frombuffer(groups, np.uint16), hashes))
        case ("recovered", bytes(groups), bytes(hashes), int(epoch)):
            return Recovered(Keys(np.frombuffer(groups, np.uint16), hashes), epoch)
        case ("down", str(reason)):
            return TierDown(reason)
        case ("copied", int(move_id)):
            return Copied(move_id)
    raise ValueError(f"not an event: {str(data)[:80]}")
