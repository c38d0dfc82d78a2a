"""Blocks for tests: small dicts of bytes that become sealed moves and batches over an arena."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import Backend, BackendContext, BlockBatch
from tierkv.blocks import (
    ARENA_ALIGN,
    HASH_BYTES,
    Keys,
    Move,
    MoveKind,
    Outcome,
    planned_move,
    slot_bytes,
)
from tierkv.record import blank, seal_sync, verify_sync

Key = tuple[int, bytes]
"""(group, block hash of HASH_BYTES)."""

FILL: Final = 0xEE
"""What every byte of a fresh arena is, so that a touched byte shows."""


def make_key(number: int, group: int = 0) -> Key:
    """A key that looks like a real one; the same number gives the same hash in every group."""
    return group, hashlib.sha256(b"block %d" % number).digest()


def make_payload(key: Key, nbytes: int, variant: int = 0) -> bytes:
    """`nbytes` that depend on key and variant only; no two 16-byte stretches repeat."""
    group, block_hash = key
    seed = hashlib.sha256(block_hash + b"/%d/%d" % (group, variant)).digest()
    return hashlib.shake_128(seed).digest(nbytes)


def make_blocks(
    n: int,
    block_bytes: Sequence[int],
    *,
    first: int = 0,
    groups: Sequence[int] | None = None,
    variant: int = 0,
) -> dict[Key, bytes]:
    """N blocks with numbers from `first`, going round `groups` (all of them by default)."""
    picked = range(len(block_bytes)) if groups is None else groups
    out = {}
    for i in range(n):
        group = picked[i % len(picked)]
        key = make_key(first + i, group)
        out[key] = make_payload(key, block_bytes[group], variant)
    return out


def sizes(blocks: Mapping[Key, bytes]) -> dict[Key, int]:
    """Payload bytes per key: what `empty_batch` and `load` want."""
    return {key: len(data) for key, data in blocks.items()}


def _lay_out(nbytes: Sequence[int]) -> tuple[memoryview, list[int]]:
    """A fresh page-aligned arena of FILL, one slot a block, an untouched page around each."""
    offsets = []
    end = ARENA_ALIGN
    for n in nbytes:
        offsets.append(end)
        end += slot_bytes(n) + ARENA_ALIGN
    arena = memoryview(mmap.mmap(-1, end))
    arena[:] = bytes([FILL]) * end
    return arena, offsets


def make_batch(blocks: Mapping[Key, bytes]) -> BlockBatch:
    """A batch to write: payloads in page-aligned slots, records sealed."""
    batch = empty_batch(sizes(blocks))
    for i, data in enumerate(blocks.values()):
        batch.payload(i)[:] = data
    batch.records[:] = seal_sync(batch.keys, batch.payloads())
    return batch


def empty_batch(wanted: Mapping[Key, int]) -> BlockBatch:
    """A batch to read into: buffers of FILL, blank records."""
    nbytes = list(wanted.values())
    arena, offsets = _lay_out(nbytes)
    return BlockBatch(
        Keys.of(wanted),
        blank(len(nbytes)),
        arena,
        np.array(offsets, np.int64),
        np.array(nbytes, np.int64),
    )


def make_move(
    kind: MoveKind,
    keys: Iterable[Key],
    *,
    move_id: int = 1,
    offsets: Sequence[int] = (),
    block_ids: Sequence[int] = (),
    from_tier: Sequence[bool] | None = None,
    epoch: int = 0,
) -> Move:
    """A sealed move. For LOAD every row comes from the tier unless `from_tier` says otherwise."""
    packed = Keys.of(keys)
    if from_tier is None:
        from_tier = [True] * len(packed) if kind is MoveKind.LOAD else []
    return planned_move(
        move_id,
        kind,
        packed,
        offsets=np.array(offsets, np.int64),
        block_ids=np.array(block_ids, np.int32),
        from_tier=np.array(from_tier, np.bool_),
        epoch=epoch,
    )


async def agree_at_once(keys: Keys) -> None:
    """A `retire` for contexts where nobody holds anything."""


def every_other(keys: Keys) -> NDArray[np.bool_]:
    """An answer to what is worth keeping: about half of any keys, always the same ones."""
    worth: NDArray[np.bool_] = np.frombuffer(keys.hashes, np.uint8)[::HASH_BYTES] % 2 == 0
    return worth


def make_context(
    block_bytes: Sequence[int],
    *,
    namespace: bytes = b"\x01" * 32,
    rank: int = 0,
    data_parallel_rank: int = 0,
    retire: Callable[[Keys], Awaitable[None]] = agree_at_once,
    worth: Callable[[Keys], Awaitable[NDArray[np.bool_]]] | None = None,
) -> BackendContext:
    """What a mover would tell a backend at open."""
    return BackendContext(
        namespace=namespace,
        namespace_text=f"test {namespace.hex()[:8]}",
        rank=rank,
        data_parallel_rank=data_parallel_rank,
        block_bytes=tuple(block_bytes),
        retire=retire,
        worth=worth,
    )


async def save(backend: Backend, blocks: Mapping[Key, bytes]) -> dict[Key, Outcome]:
    """Write blocks; the outcome per key. Asserts that the caller's memory stays as it was."""
    batch = make_batch(blocks)
    before = bytes(batch.arena), batch.records.tobytes()
    outcomes = await backend.write(batch)
    assert (bytes(batch.arena), batch.records.tobytes()) == before, "write changed the batch"
    return dict(zip(blocks, map(Outcome, outcomes.tolist()), strict=True))


async def load(backend: Backend, wanted: Mapping[Key, int]) -> dict[Key, bytes | Outcome]:
    """Read blocks; per key its bytes where DONE, the outcome otherwise.

    Asserts what holds for every read: DONE rows verify against their record (so this is what the
    mover would pass on), and no byte outside the slots was touched.
    """
    batch = empty_batch(wanted)
    outcomes = await backend.read(batch)
    assert outcomes.shape == (len(wanted),), f"{len(wanted)} keys but outcomes {outcomes.shape}"
    good = verify_sync(batch.keys, batch.records, batch.payloads())
    found: dict[Key, bytes | Outcome] = {}
    for i, key in enumerate(wanted):
        outcome = Outcome(int(outcomes[i]))
        if outcome is Outcome.DONE:
            assert good[i], f"read says DONE for a block that does not verify: {name(key)}"
        found[key] = bytes(batch.payload(i)) if outcome is Outcome.DONE else outcome
    assert_guards_untouched(batch)
    return found


def assert_same(
    found: Mapping[Key, bytes | Outcome], expected: Mapping[Key, bytes | Outcome]
) -> None:
    """What `load` found is what was expected; says in short which keys differ and how.

    A plain ``==`` would make pytest print and compare megabytes.
    """
    different = [
        f"{name(key)}: {_short(found.get(key))}, expected {_short(expected.get(key))}"
        for key in {**expected, **found}
        if found.get(key) != expected.get(key)
    ]
    assert not different, "; ".join(different[:8])


def _short(data: bytes | Outcome | None) -> str:
    if isinstance(data, bytes):
        return f"{len(data)} bytes {data[:4].hex()}.. {hashlib.sha256(data).hexdigest()[:8]}"
    return "not asked" if data is None else data.name


def assert_guards_untouched(batch: BlockBatch) -> None:
    """The pages around the slots hold what they held: no I/O left its slot."""
    outside = np.ones(len(batch.arena), np.bool_)
    for start, n in zip(batch.offsets.tolist(), batch.nbytes.tolist(), strict=True):
        outside[start : start + slot_bytes(n)] = False
    table = np.frombuffer(batch.arena, np.uint8)
    assert (table[outside] == FILL).all(), "bytes outside the slots were touched"


def name(key: Key) -> str:
    """A key for messages."""
    group, block_hash = key
    return f"{group}:{block_hash[: HASH_BYTES // 4].hex()}"
