"""A mover with a memory tier on a small arena, and words for what tests say to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tierkv.backend import Backend
from tierkv.blocks import Event, Move, MoveDone, MoveKind, Outcome, Recovered, slot_bytes
from tierkv.mover import Mover
from tierkv.pinned import Arena
from tierkv.storage import StorageConfig
from tierkv.testing import Op, SlowBackend, make_key, make_move, make_payload

BLOCK_BYTES = (5000, 12288)
SLOT = slot_bytes(max(BLOCK_BYTES))
SLOTS = 64

E = TypeVar("E")


class Desk:
    """One mover under test: submit moves of numbered blocks, wait for events by type."""

    def __init__(
        self, backend: Backend | None, *, arena: Arena | None = None, **options: Any
    ) -> None:
        config = StorageConfig(
            url="memory://",
            namespace=b"\x01" * 32,
            namespace_text="test",
            arena_bytes=SLOT * SLOTS,
            block_bytes=BLOCK_BYTES,
            **options,
        )
        self._backend = backend
        self.arena = arena or Arena.create(config.arena_bytes)
        self.events: list[Event] = []
        self._changed = asyncio.Event()
        self.mover = Mover(backend, self.arena, config, self._emit)
        self._ids = iter(range(1, 1 << 30))

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def open(self) -> Recovered:
        return await self.mover.open()

    @classmethod
    @asynccontextmanager
    async def opened(cls, backend: Backend | None, **options: Any) -> AsyncIterator[Desk]:
        desk = cls(backend, **options)
        await desk.open()
        try:
            yield desk
        finally:
            await desk.close()

    async def close(self) -> None:
        if isinstance(self._backend, SlowBackend):  # else a test that fails hangs its loop's end
            for op in Op:
                self._backend.release(op)
        await self.mover.close(deadline_s=0.05)
        self.arena.close()

    async def event(self, kind: type[E], where: Callable[[E], bool] = lambda _: True) -> E:
        """Wait for the first event of a type, and take it out."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and where(event):
                    self.events.remove(event)
                    return event
            self._changed.clear()
            await self._changed.wait()

    def fill(self, slot: int, number: int) -> None:
        group = number % len(BLOCK_BYTES)
        payload = make_payload(make_key(number, group), BLOCK_BYTES[group])
        self.arena.view[slot * SLOT : slot * SLOT + len(payload)] = payload

    def holds(self, slot: int, number: int) -> bool:
        group = number % len(BLOCK_BYTES)
        payload = make_payload(make_key(number, group), BLOCK_BYTES[group])
        return self.arena.view[slot * SLOT : slot * SLOT + len(payload)] == payload

    def move(
        self, kind: MoveKind, numbers: Sequence[int], *, slot: int = 0, epoch: int = 0, **more: Any
    ) -> Move:
        keys = [make_key(n, n % len(BLOCK_BYTES)) for n in numbers]
        offsets = [] if kind is MoveKind.DELETE else [(slot + i) * SLOT for i in range(len(keys))]
        return make_move(kind, keys, move_id=next(self._ids), offsets=offsets, epoch=epoch, **more)

    def submit(self, kind: MoveKind, numbers: Sequence[int], **more: Any) -> int:
        move = self.move(kind, numbers, **more)
        if kind is MoveKind.SAVE:
            for i, number in enumerate(numbers):
                self.fill(more.get("slot", 0) + i, number)
        self.mover.submit(move)
        return move.id

    def submit_unfilled(self, kind: MoveKind, numbers: Sequence[int], **more: Any) -> int:
        move = self.move(kind, numbers, **more)
        self.mover.submit(move)
        return move.id

    async def done(self, move_id: int) -> list[Outcome]:
        event = await self.event(MoveDone, lambda e: e.move_id == move_id)
        return [Outcome(o) for o in event.outcomes.tolist()]

    async def run(self, kind: MoveKind, numbers: Sequence[int], **more: Any) -> list[Outcome]:
        return await self.done(self.submit(kind, numbers, **more))
