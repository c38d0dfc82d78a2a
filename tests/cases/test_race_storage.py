"""Cases of kind RACE that the storage half answers: buffers and batches that overlap in time."""

from __future__ import annotations

import asyncio

import pytest

from tests.storage.desk import SLOT, Desk
from tierkv.backend import BlockBatch, Outcomes
from tierkv.blocks import Move, MoveDone, MoveKind, MoveReleased, Outcome
from tierkv.registry import make_backend
from tierkv.testing import SlowBackend
from tierkv_backends.memory import MemoryBackend

pytestmark = pytest.mark.every_loop

SAVE, LOAD = MoveKind.SAVE, MoveKind.LOAD
DONE, DECLINED, TIMED_OUT = Outcome.DONE, Outcome.DECLINED, Outcome.TIMED_OUT


class SlowGroup(MemoryBackend):
    """Reads of group 1 wait for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def read(self, batch: BlockBatch) -> Outcomes:
        if (batch.keys.groups == 1).any():
            await self.gate.wait()
        return await super().read(batch)


async def test_case_096_a_block_of_a_slow_group_is_never_done_before_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierkv.mover.BATCH_BYTES", 1)  # a batch a block, so groups go apart
    backend = SlowGroup()
    async with Desk.opened(backend, read_timeout_s=0.3) as desk:
        await desk.run(SAVE, [0, 1, 2])
        # One move, one answer: nothing is reported of group 0 while group 1 is on its way.
        assert await desk.run(LOAD, [0, 1, 2], slot=8) == [DONE, TIMED_OUT, DONE]
        await desk.event(MoveReleased)
        backend.gate.set()
        assert await desk.run(LOAD, [0, 1, 2], slot=8) == [DONE] * 3
        assert all(desk.holds(8 + n, n) for n in range(3))


async def test_case_097_two_batches_share_a_block_and_the_end_of_one_leaves_the_other(
    tmp_path: object,
) -> None:
    backend = SlowBackend(make_backend(f"file://{tmp_path}/kv"))
    async with Desk.opened(backend) as desk:
        await desk.run(SAVE, [0, 1, 2])
        backend.hold("read")
        first = desk.submit(LOAD, [0, 1], slot=8)
        second = desk.submit(LOAD, [1, 2], slot=12)
        await backend.held("read", 2)
        backend.release("read")
        assert await desk.done(first) == [DONE, DONE]
        assert await desk.done(second) == [DONE, DONE]
        assert desk.holds(9, 1)
        assert desk.holds(12, 1)
        # The other way round: one is cut short in its call, the other is served all the same.
        backend.hold("read")
        cut = desk.submit(LOAD, [1], slot=8)
        await backend.held("read")
        (run,) = desk.mover._runs
        for task in run.tasks:
            task.cancel()
        assert await desk.done(cut) == [Outcome.FAILED]
        backend.release("read")
        assert await desk.run(LOAD, [1], slot=12) == [DONE]


async def test_case_098_a_slot_is_not_given_back_while_a_thread_may_write_to_it() -> None:
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    async with Desk.opened(backend, read_timeout_s=0.3) as desk:
        await desk.run(SAVE, [0])
        backend.hold("read")
        late = desk.submit(LOAD, [0], slot=8)
        done = await desk.event(MoveDone, lambda e: e.move_id == late)
        assert done.outcomes.tolist() == [TIMED_OUT]
        assert not done.released, "block 0 may yet arrive in slot 8"
        backend.release("read")
        await desk.event(MoveReleased, lambda e: e.move_id == late)
        before = bytes(desk.arena.view[8 * SLOT : 9 * SLOT])
        assert desk.holds(8, 0), "it did arrive, before the release"
        desk.fill(8, 2)
        assert await desk.run(SAVE, [2], slot=8) == [DONE]
        assert bytes(desk.arena.view[8 * SLOT : 9 * SLOT]) != before
        assert await desk.run(LOAD, [2], slot=9) == [DONE]
        assert desk.holds(9, 2)


async def test_case_011_a_save_begun_before_a_rotation_never_appears_after_it() -> None:
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    async with Desk.opened(backend) as desk:
        backend.hold("write")
        saving = desk.submit(SAVE, [0])
        await backend.held("write")
        desk.mover.rotate(1)
        assert await desk.done(saving) == [DECLINED]
        backend.release("write")
        await desk.event(MoveReleased)
        await desk.event(object)  # Recovered
        assert await desk.run(LOAD, [0], slot=8, epoch=1) == [Outcome.MISSING]
        assert isinstance(desk.move(LOAD, [0]), Move)
