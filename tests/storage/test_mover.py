"""The mover: every move ends once, within a bound, and no wrong byte passes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tierkv_backends.memory import MemoryBackend

from tierkv.blocks import MoveDone, MoveKind, MoveReleased, Outcome, Recovered, Retire
from tierkv.testing import FaultyBackend, SlowBackend

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
