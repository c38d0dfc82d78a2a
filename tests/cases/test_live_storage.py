"""Cases of kind LIVE that the storage half answers: nothing hangs, leaks or dies of a bad tier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.storage.desk import Desk
from tierkv.blocks import Keys, MoveDone, MoveKind, MoveReleased, Outcome
from tierkv.registry import make_backend
from tierkv.testing import FaultyBackend, SlowBackend, make_key
from tierkv_backends.memory import MemoryBackend

pytestmark = pytest.mark.every_loop

SAVE, LOAD = MoveKind.SAVE, MoveKind.LOAD
DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
FAILED, TIMED_OUT = Outcome.FAILED, Outcome.TIMED_OUT


async def test_case_072_a_read_that_never_ends_is_a_miss_and_other_keys_are_still_served() -> None:
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    async with Desk.opened(backend, read_timeout_s=0.3) as desk:
        await desk.run(SAVE, [0, 1, 2])
        backend.hold("read")
        hung = desk.submit(LOAD, [0], slot=8)
        await backend.held("read")
        backend.release("read")  # only this one call stays in the dead mount ...
        backend.hold("read")
        others = desk.submit(LOAD, [1], slot=9)
        await backend.held("read")
        assert await desk.done(hung) == [DONE]
        assert await desk.done(others) == [TIMED_OUT]
        assert await desk.run(SAVE, [3], slot=10) == [DONE]
        backend.release("read")
        await desk.event(MoveReleased)
        assert await desk.run(LOAD, [2, 3], slot=11) == [DONE, DONE]


async def test_case_102_one_bad_file_is_read_once_and_forgotten(tmp_path: Path) -> None:
    backend = FaultyBackend(make_backend(f"file://{tmp_path}/kv"))
    async with Desk.opened(backend) as desk:
        await desk.run(SAVE, [0])
        (blocks,) = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 5000]
        with blocks.open("r+b") as file:
            file.truncate(2000)
        key = Keys.of([make_key(0)])
        (outcome,) = await desk.run(LOAD, [0], slot=8)
        assert outcome in (MISSING, CORRUPT)
        assert not (await backend.contains(key)).any()
        assert await desk.run(LOAD, [0], slot=8) == [MISSING]
        assert backend.calls["read"] == 2


async def test_case_110_an_io_error_is_an_answer_for_its_blocks_and_the_rest_goes_on() -> None:
    backend = FaultyBackend(MemoryBackend())
    async with Desk.opened(backend) as desk:
        await desk.run(SAVE, [0, 1])
        backend.fail("read", OSError(5, "Input/output error"), times=1)
        done = desk.submit(LOAD, [0, 1], slot=8)
        event = await desk.event(MoveDone, lambda e: e.move_id == done)
        assert event.outcomes.tolist() == [FAILED, FAILED]
        assert event.released
        assert await desk.run(LOAD, [0, 1], slot=8) == [DONE, DONE]


async def test_case_112_a_load_that_nobody_asks_about_any_more_gives_its_slots_back_by_itself() -> (
    None
):
    backend = SlowBackend(MemoryBackend())
    async with Desk.opened(backend, read_timeout_s=0.05) as desk:
        backend.hold("read")
        move_id = desk.submit(LOAD, [0], slot=8)
        await desk.event(MoveReleased, lambda e: e.move_id == move_id)
        # No other call was made meanwhile.
        await asyncio.sleep(0)
        stats = desk.mover.stats()
        assert stats["moves_in_flight"] == stats["load_bytes_in_flight"] == 0


async def test_case_115_no_move_outlives_its_deadline_whatever_hangs() -> None:
    backend = SlowBackend(MemoryBackend(), stubborn=True)
    limits = {"read_timeout_s": 0.05, "write_timeout_s": 0.05}
    async with Desk.opened(backend, **limits, read_bytes_in_flight=1) as desk:
        for op in ("read", "write", "delete"):
            backend.hold(op)
        ids = [desk.submit(LOAD, [n], slot=n) for n in range(4)]
        ids.append(desk.submit(SAVE, [9], slot=9))
        ids.append(desk.submit(MoveKind.DELETE, [9]))
        async with asyncio.timeout(20):
            *loads, save, delete = [await desk.done(move_id) for move_id in ids]
        assert {row for rows in loads for row in rows} == {FAILED, TIMED_OUT}
        assert save in ([Outcome.DECLINED], [TIMED_OUT])
        assert delete == [TIMED_OUT]
        for op in ("read", "write", "delete"):
            backend.release(op)
