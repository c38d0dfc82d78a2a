"""A thousand moves are cut short, and no slot is touched once it was given back."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.storage.desk import SLOT, Desk
from tierkv.backend import BlockBatch, Outcomes, finish
from tierkv.blocks import Event, MoveDone, MoveKind, MoveReleased, Recovered
from tierkv.health import TierHealth
from tierkv_backends.memory import MemoryBackend

MOVES = 1000
AT_ONCE = 16


class Scribbler(MemoryBackend):
    """Its calls take their time and write into their buffers until the very end, cancelled or not.

    touching: offsets of the slots that it may write to right now.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.touching: set[int] = set()
        self._rng = rng

    async def _scribble(self, batch: BlockBatch) -> None:
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(self._rng.choice([0, 0, 0.001, 0.002]))
            for payload in batch.payloads():
                payload[:8] = self._rng.randbytes(8)

    async def _busy(self, batch: BlockBatch) -> None:
        slots = set(batch.offsets.tolist())
        assert not slots & self.touching, "two calls in one slot"
        self.touching |= slots
        try:
            await finish(self._scribble(batch))
        finally:
            self.touching -= slots

    async def read(self, batch: BlockBatch) -> Outcomes:
        await self._busy(batch)
        return await super().read(batch)

    async def write(self, batch: BlockBatch) -> Outcomes:
        await self._busy(batch)
        return await super().write(batch)


class Slots:
    """Follows who owns which slot, and notes a slot that is given back while it is written to."""

    def __init__(self, desk: Desk, backend: Scribbler) -> None:
        self.free = list(range(AT_ONCE))
        self.wrong: list[Event] = []
        self.unreleased = 0
        self.answers: dict[int, int] = {}
        self.freed = asyncio.Event()
        self._taken: dict[int, int] = {}
        self._backend = backend
        self._emit = desk._emit
        desk.mover._emit = self.emit

    def take(self, move_id: int) -> int:
        slot = self._taken[move_id] = self.free.pop()
        return slot

    def emit(self, event: Event) -> None:
        match event:
            case MoveDone(move_id, _, released):
                self.answers[move_id] = self.answers.get(move_id, 0) + 1
                self.unreleased += not released
                if released:
                    self._give_back(event, move_id)
            case MoveReleased(move_id):
                self._give_back(event, move_id)
            case _:
                self._emit(event)

    def _give_back(self, event: Event, move_id: int) -> None:
        slot = self._taken.pop(move_id)
        if slot * SLOT in self._backend.touching:
            self.wrong.append(event)
        self.free.append(slot)
        self.freed.set()


@pytest.mark.every_loop
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_slot_is_given_back_only_when_nothing_touches_it_any_more(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("tierkv.mover.MAX_QUARANTINED", MOVES)
    monkeypatch.setattr(
        "tierkv.mover.TierHealth", lambda clock: TierHealth(clock, tolerance=2 * MOVES)
    )
    rng = random.Random(seed)
    backend = Scribbler(rng)
    desk: Desk = await open_desk(
        backend, read_timeout_s=0.003, write_timeout_s=0.003, read_bytes_in_flight=30000
    )
    slots = Slots(desk, backend)
    epoch = 0
    for number in range(MOVES):
        while not slots.free:
            slots.freed.clear()
            await slots.freed.wait()
        kind = rng.choice([MoveKind.SAVE, MoveKind.LOAD])
        move = desk.move(kind, [number % 40], slot=slots.free[-1], epoch=epoch)
        slots.take(move.id)
        desk.mover.submit(move)
        if number % 100 == 50:
            epoch += 1
            desk.mover.rotate(epoch)
            await desk.event(Recovered)
    while len(slots.free) < AT_ONCE:
        slots.freed.clear()
        await slots.freed.wait()
    assert slots.wrong == []
    assert list(slots.answers.values()) == [1] * MOVES, "one answer each"
    assert slots.unreleased > MOVES // 20, "the point of this test: moves cut short in their calls"
    stats = desk.mover.stats()
    assert stats["moves_in_flight"] == stats["quarantined_moves"] == 0
    assert stats["load_bytes_in_flight"] == stats["save_bytes_in_flight"] == 0
