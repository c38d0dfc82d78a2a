"""FaultyBackend misbehaves exactly as told, SlowBackend hangs exactly as long as told."""

from __future__ import annotations

import asyncio
import errno
import pathlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tierkv.backend import Backend
from tierkv.blocks import Keys, MoveKind, Outcome
from tierkv.errors import ConfigError
from tierkv.record import verify_sync
from tierkv.testing import (
    BackendContract,
    FaultyBackend,
    Lie,
    SlowBackend,
    assert_same,
    empty_batch,
    load,
    make_batch,
    make_blocks,
    make_context,
    make_key,
    make_move,
    save,
    sizes,
)
from tierkv.urls import TierURL
from tierkv_backends.memory import MemoryBackend

BLOCKS = make_blocks(4, [100, 5000])
FIRST = next(iter(BLOCKS))


@pytest_asyncio.fixture
async def faulty() -> AsyncIterator[FaultyBackend]:
    backend = FaultyBackend(MemoryBackend())
    await backend.open(make_context([100, 5000]))
    yield backend
    await backend.close()


class TestFaultyBackendWithoutFaults(BackendContract):
    survives_reopen = False
    exclusive = False

    def make_backend(self, directory: pathlib.Path) -> Backend:
        return FaultyBackend(SlowBackend(MemoryBackend()))


async def test_only_the_nth_call_raises(faulty: FaultyBackend) -> None:
    fault = faulty.fail("write", OSError(errno.EIO, "disk"), nth=2)
    await save(faulty, BLOCKS)
    with pytest.raises(OSError, match="disk"):
        await faulty.write(make_batch(BLOCKS))
    await save(faulty, BLOCKS)
    assert (fault.calls, fault.hits, faulty.calls["write"]) == (3, 1, 3)  # type: ignore[index] # StrEnum keys


async def test_an_outcome_hits_the_keys_it_names_and_only_those(faulty: FaultyBackend) -> None:
    faulty.fail("write", Outcome.DECLINED, where=lambda key: key == FIRST)
    assert list((await save(faulty, BLOCKS)).values()) == [Outcome.DECLINED] + 3 * [Outcome.DONE]
    faulty.heal()
    assert (await load(faulty, sizes(BLOCKS)))[FIRST] is Outcome.MISSING
    await save(faulty, BLOCKS)
    faulty.fail("read", Outcome.FAILED, where=lambda key: key == FIRST, times=1)
    assert_same(await load(faulty, sizes(BLOCKS)), {**BLOCKS, FIRST: Outcome.FAILED})
    assert_same(await load(faulty, sizes(BLOCKS)), BLOCKS)


@pytest.mark.parametrize("lie", list(Lie))
@pytest.mark.parametrize("op", ["read", "write"])
async def test_a_lie_says_done_and_does_not_verify(
    faulty: FaultyBackend, op: str, lie: Lie
) -> None:
    fault = faulty.fail(op, lie, where=lambda key: key == FIRST)
    written = make_batch(BLOCKS)
    before = bytes(written.arena)
    assert (await faulty.write(written)).tolist() == [Outcome.DONE] * 4
    assert bytes(written.arena) == before
    read = empty_batch(sizes(BLOCKS))
    outcomes = (await faulty.read(read)).tolist()
    good = verify_sync(read.keys, read.records, read.payloads()).tolist()
    assert fault.hits == 1
    assert good == [False, True, True, True]
    dropped = op == "write" and lie is Lie.DROP
    assert outcomes[0] == (Outcome.MISSING if dropped else Outcome.DONE)


async def test_every_other_call_can_raise_too(faulty: FaultyBackend) -> None:
    for op in ("contains", "delete", "clear", "close", "open"):
        faulty.fail(op, OSError(op), times=1)
    for call in (
        faulty.contains(Keys.of([FIRST])),
        faulty.delete(Keys.of([FIRST])),
        faulty.clear(),
        faulty.close(),
        faulty.open(make_context([1])),
    ):
        with pytest.raises(OSError):
            await call
    await faulty.clear()


def test_a_fault_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="delete has no rows"):
        FaultyBackend(MemoryBackend()).fail("delete", Outcome.FAILED)
    with pytest.raises(ConfigError, match="wraps a backend"):
        SlowBackend.from_url(TierURL.parse("slow://"))


@pytest.mark.parametrize("op", ["write", "read", "contains", "delete", "clear", "open", "close"])
async def test_a_held_call_ends_when_released_and_not_before(op: str) -> None:
    slow = SlowBackend(MemoryBackend())
    await slow.open(make_context([100, 5000]))
    slow.hold(op)
    call = {
        "write": lambda: save(slow, BLOCKS),
        "read": lambda: load(slow, sizes(BLOCKS)),
        "contains": lambda: slow.contains(Keys.of(BLOCKS)),
        "delete": lambda: slow.delete(Keys.of(BLOCKS)),
        "clear": slow.clear,
        "open": lambda: slow.open(make_context([1])),
        "close": slow.close,
    }[op]
    task = asyncio.ensure_future(call())
    await slow.held(op)
    assert not task.done()
    slow.release(op)
    await task
    await call()  # held no more


async def test_a_held_call_can_be_cancelled() -> None:
    slow = SlowBackend(MemoryBackend())
    await slow.open(make_context([100, 5000]))
    slow.hold("write")
    task = asyncio.create_task(slow.write(make_batch(BLOCKS)))
    await slow.held("write")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await slow.usage()).blocks == 0


async def test_a_stubborn_call_works_in_its_buffers_after_it_was_cancelled() -> None:
    slow = SlowBackend(MemoryBackend(), stubborn=True)
    await slow.open(make_context([100, 5000]))
    await save(slow, BLOCKS)
    slow.hold("read")
    batch = empty_batch(sizes(BLOCKS))
    task = asyncio.create_task(slow.read(batch))
    await slow.held("read")
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    slow.release("read")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [bytes(payload) for payload in batch.payloads()] == list(BLOCKS.values())


def test_a_made_move_is_sealed_and_lies_as_told() -> None:
    keys = [make_key(1), make_key(2, group=1)]
    move = make_move(MoveKind.LOAD, keys, move_id=7, offsets=[0, 4096], block_ids=[3, 0])
    assert (list(move.keys), move.from_tier.tolist()) == (keys, [True, True])
    assert make_move(MoveKind.SAVE, keys).from_tier.size == 0
