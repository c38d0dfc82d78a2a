"""The mover: every move ends once, within a bound, and no wrong byte passes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.storage.desk import BLOCK_BYTES, SLOT
from tierkv import record
from tierkv.blocks import Keys, MoveDone, MoveKind, MoveReleased, Outcome, Recovered, Retire
from tierkv.health import TierHealth
from tierkv.iosched import Lane
from tierkv.mover import MAX_QUARANTINED
from tierkv.pinned import Arena
from tierkv.testing import FaultyBackend, Lie, SlowBackend, make_key
from tierkv_backends.memory import MemoryBackend

pytestmark = pytest.mark.every_loop

SAVE, LOAD, DELETE = MoveKind.SAVE, MoveKind.LOAD, MoveKind.DELETE
DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
DECLINED, FAILED, TIMED_OUT = Outcome.DECLINED, Outcome.FAILED, Outcome.TIMED_OUT


async def test_saved_blocks_come_back_into_other_slots(open_desk: Any) -> None:
    desk = await open_desk()
    assert await desk.run(SAVE, range(6)) == [DONE] * 6
    assert await desk.run(LOAD, [5, 0, 99, 3], slot=10) == [DONE, DONE, MISSING, DONE]
    assert desk.holds(10, 5)
    assert desk.holds(11, 0)
    assert desk.holds(13, 3)
    assert desk.events == []


async def test_rows_that_lie_in_the_arena_already_are_done_and_not_read(open_desk: Any) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1])
    loaded = await desk.run(LOAD, [7, 1], slot=20, from_tier=[False, True])
    assert loaded == [DONE, DONE]
    assert not desk.holds(20, 7)  # untouched
    assert await desk.run(LOAD, [7], from_tier=[False]) == [DONE]
    assert backend.calls["read"] == 1


async def test_a_big_move_goes_in_batches_and_every_row_gets_its_own_outcome(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.mover.BATCH_BYTES", 20000)
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    assert await desk.run(SAVE, range(30)) == [DONE] * 30
    assert backend.calls["write"] > 5
    assert await desk.run(LOAD, [*range(30), 77], slot=30) == [DONE] * 30 + [MISSING]
    assert all(desk.holds(30 + n, n) for n in range(30))


# What is wrong never passes. ------------------------------------------------------------------


@pytest.mark.parametrize("lie", [Lie.FLIP_BIT, Lie.SHORT, Lie.DROP])
async def test_a_block_that_does_not_verify_is_corrupt_counted_logged_once_and_forgotten(
    open_desk: Any, lie: Lie, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1, 2, 3])
    backend.fail("read", lie, where=lambda key: key == make_key(2))
    assert await desk.run(LOAD, [1, 2, 3], slot=8) == [DONE, CORRUPT, DONE]
    backend.heal()
    assert await desk.run(LOAD, [1, 2, 3], slot=8) == [DONE, MISSING, DONE]
    assert desk.mover.stats()["corrupt_load_blocks"] == 1
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert make_key(2)[1].hex() in lines[0]
    assert "tier faulty" in lines[0]


async def test_what_was_damaged_on_its_way_to_the_tier_does_not_verify_either(
    open_desk: Any,
) -> None:
    backend = FaultyBackend(MemoryBackend())
    backend.fail("write", Lie.FLIP_BIT)
    desk = await open_desk(backend)
    assert await desk.run(SAVE, [4]) == [DONE]
    assert await desk.run(LOAD, [4], slot=8) == [CORRUPT]


async def test_a_transient_error_is_a_miss_and_nothing_is_forgotten(open_desk: Any) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1, 2])
    backend.fail("read", FAILED, where=lambda key: key == make_key(2), times=1)
    assert await desk.run(LOAD, [1, 2], slot=8) == [DONE, FAILED]
    assert await desk.run(LOAD, [1, 2], slot=8) == [DONE, DONE]


@pytest.mark.parametrize("op", ["write", "read", "delete"])
async def test_what_nobody_foresaw_fails_the_move_and_is_counted_and_logged(
    open_desk: Any, op: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1])
    backend.fail(op, ZeroDivisionError("surprise"), times=1)
    kind = {"write": SAVE, "read": LOAD, "delete": DELETE}[op]
    assert await desk.run(kind, [2]) == [FAILED]
    assert desk.mover.stats()["unforeseen_errors"] == 1
    assert [r.exc_info is not None for r in caplog.records] == [True]
    assert await desk.run(LOAD, [1], slot=8) == [DONE]


async def test_a_move_that_would_leave_the_arena_is_not_run(open_desk: Any) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    end = len(desk.arena) // SLOT
    for slot in (end, -1):
        assert await desk.done(desk.submit_unfilled(SAVE, [1], slot=slot)) == [FAILED]
    assert backend.calls["write"] == 0


async def test_declined_blocks_are_declined_and_their_neighbours_done(open_desk: Any) -> None:
    backend = FaultyBackend(MemoryBackend())
    backend.fail("write", DECLINED, where=lambda key: key[0] == 1)
    desk = await open_desk(backend)
    assert await desk.run(SAVE, [0, 1, 2, 3]) == [DONE, DECLINED, DONE, DECLINED]
    assert desk.mover.stats()["declined_save_blocks"] == 2
    assert not desk.mover.stats()["degraded"]


# Deadlines. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SAVE, LOAD])
async def test_a_hung_call_times_out_and_its_slots_are_released_when_it_ends(
    open_desk: Any, kind: MoveKind
) -> None:
    op = "write" if kind is SAVE else "read"
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    desk = await open_desk(backend, read_timeout_s=0.02, write_timeout_s=0.02)
    backend.hold(op)
    move_id = desk.submit(kind, [1, 2])
    done = await desk.event(MoveDone)
    assert done.outcomes.tolist() == [TIMED_OUT, TIMED_OUT]
    assert not done.released
    assert desk.mover.stats()["quarantined_moves"] == 1
    # The next move is served although the first still hangs: its share of the bound was returned.
    assert desk.mover.stats()[f"{kind.name.lower()}_bytes_in_flight"] == 0
    assert desk.events == []
    backend.release(op)
    assert (await desk.event(MoveReleased)).move_id == move_id
    assert desk.mover.stats()["quarantined_moves"] == 0
    assert desk.mover.stats()["timed_out_moves"] == 1


@pytest.mark.parametrize(("kind", "answer"), [(SAVE, DECLINED), (LOAD, FAILED)])
async def test_a_move_that_never_got_its_turn_ends_released_and_never_begins(
    open_desk: Any, kind: MoveKind, answer: Outcome
) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(
        backend,
        read_timeout_s=0.02,
        write_timeout_s=0.02,
        read_bytes_in_flight=1,
        write_bytes_in_flight=1,
    )
    async with desk.mover._sched.grant(Lane.SAVE if kind is SAVE else Lane.LOAD, 1):
        desk.submit(kind, [2], slot=9)
        done = await desk.event(MoveDone)
        assert done.released
        assert done.outcomes.tolist() == [answer]
    await asyncio.sleep(0)
    assert (backend.calls["read"], backend.calls["write"]) == (0, 0)


@pytest.mark.parametrize("step", ["seal_sync", "verify_sync"])
async def test_a_checksum_thread_that_still_reads_keeps_the_slots(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    desk = await open_desk(read_timeout_s=0.3, write_timeout_s=0.3)
    await desk.run(SAVE, [1])
    gate = threading.Event()
    right = getattr(record, step)

    def late(*args: Any, **more: Any) -> Any:
        assert gate.wait(30)
        return right(*args, **more)

    monkeypatch.setattr(record, step, late)
    kind = SAVE if step == "seal_sync" else LOAD
    move_id = desk.submit(kind, [1], slot=8)
    done = await desk.event(MoveDone)
    assert not done.released
    released = asyncio.create_task(desk.event(MoveReleased))
    await asyncio.wait({released}, timeout=0.05)
    assert not released.done()
    gate.set()
    assert (await released).move_id == move_id


async def test_what_was_done_before_the_deadline_stays_done(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.mover.BATCH_BYTES", 1)
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    desk = await open_desk(backend, read_timeout_s=0.3, read_bytes_in_flight=1)
    await desk.run(SAVE, [1, 2])
    gate = asyncio.Event()
    inner = backend.inner.read

    async def second_hangs(batch: Any) -> Any:
        if make_key(2) in list(batch.keys):
            await gate.wait()
        return await inner(batch)

    monkeypatch.setattr(backend.inner, "read", second_hangs)
    done = await desk.done(desk.submit(LOAD, [1, 2], slot=8))
    assert done == [DONE, TIMED_OUT]
    gate.set()


async def test_saves_beyond_the_queue_are_declined_as_throttled(open_desk: Any) -> None:
    backend = SlowBackend(MemoryBackend())
    desk = await open_desk(backend, write_bytes_in_flight=1, write_queue_bytes=1)
    backend.hold("write")
    first = desk.submit(SAVE, [1])
    await backend.held("write")
    assert await desk.run(SAVE, [2], slot=1) == [DECLINED]
    assert desk.mover.stats()["throttled_batches"] == 1
    backend.release("write")
    assert await desk.done(first) == [DONE]


async def test_a_tier_that_keeps_failing_is_degraded_then_probed_and_comes_back(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tierkv.mover.TierHealth", lambda _: TierHealth(lambda: clock[0]))
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1])
    backend.fail("read", OSError("disk"))
    for _ in range(3):
        assert await desk.run(LOAD, [1], slot=8) == [FAILED]
    calls = backend.calls["read"]
    assert await desk.run(LOAD, [1], slot=8) == [FAILED]
    assert await desk.run(SAVE, [2], slot=8) == [DECLINED]
    assert backend.calls["read"] == calls, "a degraded tier is left alone"
    assert desk.mover.stats()["degraded"] == 1
    clock[0] += 1.0
    backend.heal()
    assert await desk.run(LOAD, [1], slot=8) == [DONE]
    assert desk.mover.stats()["degraded"] == 0
    assert desk.mover.stats()["degradations"] == 1
    assert "answers again" in caplog.records[-1].getMessage()


async def test_a_throttled_save_says_nothing_about_the_tiers_health(open_desk: Any) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend, write_bytes_in_flight=1, write_queue_bytes=1)
    backend.fail("read", OSError("disk"))
    for _ in range(2):
        await desk.run(LOAD, [1])
    async with desk.mover._sched.grant(Lane.SAVE, 1):
        assert await desk.run(SAVE, [1]) == [DECLINED]
    await desk.run(LOAD, [1])
    assert desk.mover.stats()["degraded"] == 1


async def test_too_many_hung_calls_close_the_tier_until_one_ends(open_desk: Any) -> None:
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    desk = await open_desk(backend, read_timeout_s=0.02)
    backend.hold("read")
    ids = [desk.submit(LOAD, [n], slot=n) for n in range(MAX_QUARANTINED)]
    for move_id in ids:
        assert await desk.done(move_id) == [TIMED_OUT]
    assert await desk.run(SAVE, [1]) == [DECLINED]
    backend.release("read")
    for _ in ids:
        await desk.event(MoveReleased)


# Retirement and rotation. ---------------------------------------------------------------------


async def test_retired_space_is_used_only_after_the_answer(open_desk: Any) -> None:
    desk = await open_desk(MemoryBackend(capacity_bytes=2 * BLOCK_BYTES[0]))
    assert await desk.run(SAVE, [0, 2]) == [DONE, DONE]
    waiting = desk.submit(SAVE, [4])
    retire = await desk.event(Retire)
    assert list(retire.keys) == [make_key(0, 0)]
    assert await desk.run(LOAD, [0], slot=8) == [DONE], "readable until the answer"
    retire = retire if await desk.run(LOAD, [2], slot=8) == [DONE] else None
    desk.mover.agree(999)  # unknown: changes nothing
    assert desk.mover.stats()["retires_waiting"] == 1
    desk.mover.agree(retire.retire_id)
    assert await desk.done(waiting) == [DONE]
    assert desk.mover.stats()["retired_blocks"] == 1


async def test_rotation_ends_moves_in_flight_and_forgets_everything(open_desk: Any) -> None:
    backend = SlowBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1])
    backend.hold("write")
    backend.hold("read")
    saving, loading = desk.submit(SAVE, [2]), desk.submit(LOAD, [1], slot=8)
    await backend.held("write")
    await backend.held("read")
    desk.mover.rotate(1)
    assert await desk.done(saving) == [DECLINED]
    assert await desk.done(loading) == [MISSING]
    recovered = await desk.event(Recovered)
    assert (len(recovered.keys), recovered.epoch) == (0, 1)
    backend.release("write")
    backend.release("read")
    assert await desk.run(LOAD, [1, 2], slot=8, epoch=1) == [MISSING, MISSING]
    assert await desk.run(SAVE, [3], epoch=0) == [DECLINED]
    assert await desk.run(LOAD, [3], epoch=0) == [MISSING]
    assert await desk.run(SAVE, [3], epoch=1) == [DONE]


async def test_a_late_write_of_old_bytes_never_follows_the_clear(open_desk: Any) -> None:
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    desk = await open_desk(backend)
    backend.hold("write")
    saving = desk.submit(SAVE, [2])
    await backend.held("write")
    desk.mover.rotate(1)
    done = await desk.event(MoveDone, lambda e: e.move_id == saving)
    assert not done.released
    assert await desk.run(SAVE, [4], epoch=1) == [DECLINED], "not open yet"
    assert not any(isinstance(e, Recovered) for e in desk.events)
    backend.release("write")
    await desk.event(MoveReleased)
    await desk.event(Recovered)
    assert await desk.run(LOAD, [2], epoch=1) == [MISSING]


async def test_rotations_in_a_row_end_at_the_last(open_desk: Any) -> None:
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1])
    for epoch in (1, 2, 2, 1, 3):
        desk.mover.rotate(epoch)
    assert (await desk.event(Recovered)).epoch == 3
    assert desk.events == []
    assert await desk.run(LOAD, [1], epoch=3) == [MISSING]


async def test_a_rotation_whose_clear_fails_is_tried_again(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.mover.CLEAR_RETRY_S", 0.0)
    backend = FaultyBackend(MemoryBackend())
    desk = await open_desk(backend)
    fault = backend.fail("clear", OSError("disk"), times=2)
    desk.mover.rotate(1)
    assert (await desk.event(Recovered)).epoch == 1
    assert fault.hits == 2


async def test_rotation_answers_retires_that_wait(open_desk: Any) -> None:
    desk = await open_desk(MemoryBackend(capacity_bytes=2 * BLOCK_BYTES[0]))
    await desk.run(SAVE, [0, 2])
    waiting = desk.submit(SAVE, [4])
    await desk.event(Retire)
    desk.mover.rotate(1)
    assert await desk.done(waiting) == [DECLINED]
    await desk.event(Recovered)
    assert desk.mover.stats()["retires_waiting"] == 0


async def test_rotation_and_close_answer_a_backend_that_makes_room_in_the_background(
    open_desk: Any,
) -> None:
    backend = MemoryBackend()
    desk = await open_desk(backend)
    assert backend._context is not None
    for end in (lambda: desk.mover.rotate(1), lambda: asyncio.ensure_future(desk.mover.close())):
        making_room = asyncio.create_task(backend._context.retire(Keys.of([make_key(1)])))
        await desk.event(Retire)
        end()
        await asyncio.wait_for(making_room, 30)


# Deletes, closing, no tier. -------------------------------------------------------------------


async def test_a_save_never_overtakes_a_delete_that_came_before(open_desk: Any) -> None:
    backend = SlowBackend(MemoryBackend())
    desk = await open_desk(backend)
    await desk.run(SAVE, [1])
    backend.hold("delete")
    deleting = desk.submit(DELETE, [1])
    saving = desk.submit(SAVE, [1])
    await backend.held("delete")
    saved = asyncio.create_task(desk.done(saving))
    await asyncio.wait({saved}, timeout=0.05)
    assert not saved.done()
    backend.release("delete")
    assert await desk.done(deleting) == [DONE]
    assert await saved == [DONE]
    assert await desk.run(LOAD, [1], slot=8) == [DONE]


async def test_close_lets_saves_end_and_refuses_new_moves(open_desk: Any) -> None:
    backend = SlowBackend(MemoryBackend())
    desk = await open_desk(backend)
    backend.hold("write")
    saving = desk.submit(SAVE, [1])
    await backend.held("write")
    closing = asyncio.create_task(desk.mover.close(deadline_s=60))
    await asyncio.sleep(0)
    assert await desk.run(SAVE, [2], slot=1) == [DECLINED]
    assert await desk.run(LOAD, [1], slot=8) == [FAILED]
    backend.release("write")
    assert await closing
    assert await desk.done(saving) == [DONE]


async def test_close_does_not_wait_for_a_hung_backend_and_says_so(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierkv.mover.CLOSE_GRACE_S", 0.02)
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    desk = await open_desk(backend)
    backend.hold("write")
    backend.hold("close")
    saving = desk.submit(SAVE, [1])
    await backend.held("write")
    assert not await desk.mover.close(deadline_s=0.02)
    done = await desk.event(MoveDone, lambda e: e.move_id == saving)
    assert done.outcomes.tolist() == [DECLINED]
    assert not done.released
    assert "hangs" in caplog.records[-1].getMessage()
    backend.release("close")
    backend.release("write")
    await desk.event(MoveReleased)


async def test_without_a_tier_saves_are_declined_and_loads_missing(open_no_tier: Any) -> None:
    desk = await open_no_tier()
    assert await desk.run(SAVE, [1]) == [DECLINED]
    assert await desk.run(LOAD, [1, 2], from_tier=[True, False]) == [MISSING, DONE]
    assert await desk.run(DELETE, [1]) == [DONE]
    desk.mover.rotate(1)
    assert (await desk.event(Recovered)).epoch == 1


async def test_nothing_in_the_mover_blocks_its_loop(
    arena: Arena, open_desk: Any, blockbuster: None
) -> None:
    desk = await open_desk(arena=arena)  # making one reads files, which may block
    assert await desk.run(SAVE, range(8)) == [DONE] * 8
    assert await desk.run(LOAD, range(8), slot=8) == [DONE] * 8
    await desk.mover.refresh_usage()
    assert desk.mover.stats()["tier_blocks"] == 8
