"""The two places where faults are met: the backend itself, and the storage half over it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tests.backends.nvme.torture.journal import BLOCK_BYTES, Journal, key_of, payload_of, size_of
from tierkv.backend import Backend, BlockBatch
from tierkv.blocks import (
    Appraise,
    Keys,
    MoveDone,
    MoveKind,
    MoveReleased,
    Outcome,
    Recovered,
    Retire,
)
from tierkv.local import LocalStorage
from tierkv.pinned import Arena
from tierkv.record import blank, seal_sync, verify_sync
from tierkv.registry import make_backend
from tierkv.storage import StorageConfig
from tierkv.testing.batches import every_other, make_context, make_move

SLOT = 4096
SLOTS = 192
PAINT = 0xA5
BATCH = 96

_PAINTED = bytes([PAINT]) * SLOT

Found = dict[int, bytes | Outcome]


class Home(Protocol):
    has_deadlines: bool

    async def open(self) -> None: ...
    async def save(self, numbers: Sequence[int], variant: int) -> dict[int, Outcome]: ...
    async def load(self, numbers: Sequence[int]) -> Found: ...
    async def delete(self, numbers: Sequence[int]) -> None: ...
    async def clear(self) -> bool: ...
    async def close(self) -> None: ...
    def leaks(self) -> list[str]: ...


class Slots:
    """An arena. Free slots are painted, so it shows if anyone still writes to one."""

    def __init__(self) -> None:
        self.arena = Arena.create(SLOT * SLOTS)
        self.view = self.arena.view
        self.view[:] = _PAINTED * SLOTS
        self.free = list(range(SLOTS))

    def take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n, "no slots are left"
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """They are somebody else's from now on. The ones used last are used again last."""
        for slot in slots:
            self.view[slot * SLOT : (slot + 1) * SLOT] = _PAINTED
        self.free += slots

    def fill(self, slots: Sequence[int], numbers: Sequence[int], variant: int) -> None:
        for slot, number in zip(slots, numbers, strict=True):
            data = payload_of(number, variant)
            self.view[slot * SLOT : slot * SLOT + len(data)] = data

    def payload(self, slot: int, number: int) -> bytes:
        return bytes(self.view[slot * SLOT : slot * SLOT + size_of(number)])

    def close(self) -> list[str]:
        """What is wrong with the free ones."""
        table = np.frombuffer(self.view, np.uint8).reshape(-1, SLOT)
        spoiled = [s for s in np.flatnonzero((table != PAINT).any(1)).tolist() if s in self.free]
        del table
        self.view.release()
        self.arena.close()
        return [f"slots {spoiled} were written to after they were given back"] if spoiled else []


class AtBackend:
    """The backend, asked directly."""

    has_deadlines = False

    def __init__(self, url: str, journal: Journal) -> None:
        self._backend: Backend = make_backend(url)
        self._journal = journal
        self._slots = Slots()

    async def open(self) -> None:
        await self._backend.open(make_context(BLOCK_BYTES, retire=self._retire, worth=self._worth))

    async def _retire(self, keys: Keys) -> None:
        self._journal.retired(keys)

    async def _worth(self, keys: Keys) -> NDArray[np.bool_]:
        return every_other(keys)

    def _batch(self, numbers: Sequence[int], slots: Sequence[int]) -> BlockBatch:
        return BlockBatch(
            Keys.of(map(key_of, numbers)),
            blank(len(numbers)),
            self._slots.view,
            np.array(slots, np.int64) * SLOT,
            np.array([size_of(n) for n in numbers], np.int64),
        )

    async def save(self, numbers: Sequence[int], variant: int) -> dict[int, Outcome]:
        slots = self._slots.take(len(numbers))
        self._slots.fill(slots, numbers, variant)
        batch = self._batch(numbers, slots)
        batch.records[:] = seal_sync(batch.keys, batch.payloads())
        try:
            outcomes = await self._backend.write(batch)
        finally:
            self._slots.give_back(slots)
        return dict(zip(numbers, map(Outcome, outcomes.tolist()), strict=True))

    async def load(self, numbers: Sequence[int]) -> Found:
        found: Found = {}
        for i in range(0, len(numbers), BATCH):
            found |= await self._load(numbers[i : i + BATCH])
        return found

    async def _load(self, numbers: Sequence[int]) -> Found:
        slots = self._slots.take(len(numbers))
        batch = self._batch(numbers, slots)
        try:
            outcomes = await self._backend.read(batch)
            good = verify_sync(batch.keys, batch.records, batch.payloads())
            found: Found = {}
            for i, number in enumerate(numbers):
                outcome = Outcome(int(outcomes[i]))
                if outcome is not Outcome.DONE:
                    found[number] = outcome
                elif good[i]:
                    found[number] = self._slots.payload(slots[i], number)
                else:
                    found[number] = Outcome.CORRUPT
        finally:
            self._slots.give_back(slots)
        return found

    async def delete(self, numbers: Sequence[int]) -> None:
        await self._backend.delete(Keys.of(map(key_of, numbers)))

    async def clear(self) -> bool:
        await self._backend.clear()
        return True

    async def close(self) -> None:
        await self._backend.close()

    def leaks(self) -> list[str]:
        return self._slots.close()


class AtStorage:
    """`LocalStorage`: checksums, deadlines, quarantine. Slots are painted when they are free."""

    has_deadlines = True

    def __init__(self, url: str, journal: Journal, *, timeout_s: float) -> None:
        self._config = StorageConfig(
            url=url,
            namespace=b"\x01" * 32,
            namespace_text="torture",
            arena_bytes=SLOT * SLOTS,
            block_bytes=BLOCK_BYTES,
            read_timeout_s=timeout_s,
            write_timeout_s=timeout_s,
            io_threads=2,
        )
        self._journal = journal
        self._slots = Slots()
        self._ids = itertools.count(1)
        self._epoch = 0
        self._done: dict[int, asyncio.Future[MoveDone]] = {}
        self._held: dict[int, list[int]] = {}
        self._recovered = asyncio.Event()
        self._released = asyncio.Event()
        self._storage: LocalStorage | None = None

    async def open(self) -> None:
        self._storage = await LocalStorage.open(self._config, self._slots.arena)
        self._storage.on_event(self._take)

    def _take(self) -> None:
        assert self._storage is not None
        for event in self._storage.poll():
            match event:
                case MoveDone(move_id):
                    self._done.pop(move_id).set_result(event)
                case MoveReleased(move_id):
                    self._slots.give_back(self._held.pop(move_id))
                    self._released.set()
                case Retire(retire_id, keys):
                    self._journal.retired(keys)
                    self._storage.agree(retire_id)
                case Appraise(question_id, keys):
                    self._storage.appraised(question_id, every_other(keys))
                case Recovered():
                    self._recovered.set()
                case _:
                    pass

    async def _run(
        self, kind: MoveKind, numbers: Sequence[int], variant: int = 0
    ) -> tuple[dict[int, Outcome], Found]:
        assert self._storage is not None
        slots = await self._room(len(numbers))
        if kind is MoveKind.SAVE:
            self._slots.fill(slots, numbers, variant)
        move_id = next(self._ids)
        self._held[move_id] = slots
        done = self._done[move_id] = asyncio.get_running_loop().create_future()
        offsets = [] if kind is MoveKind.DELETE else [slot * SLOT for slot in slots]
        keys = [key_of(n) for n in numbers]
        self._storage.submit(
            make_move(kind, keys, move_id=move_id, offsets=offsets, epoch=self._epoch)
        )
        event = await asyncio.wait_for(done, 30)
        outcomes = dict(zip(numbers, map(Outcome, event.outcomes.tolist()), strict=True))
        found: Found = {
            n: self._slots.payload(slot, n) if outcomes[n] is Outcome.DONE else outcomes[n]
            for slot, n in zip(slots, numbers, strict=True)
        }
        if event.released:
            self._slots.give_back(self._held.pop(move_id))
        return outcomes, found

    async def _room(self, n: int) -> list[int]:
        while len(self._slots.free) < n:
            self._released.clear()
            await asyncio.wait_for(self._released.wait(), 30)
        return self._slots.take(n)

    async def save(self, numbers: Sequence[int], variant: int) -> dict[int, Outcome]:
        return (await self._run(MoveKind.SAVE, numbers, variant))[0]

    async def load(self, numbers: Sequence[int]) -> Found:
        found: Found = {}
        for i in range(0, len(numbers), BATCH):
            found |= (await self._run(MoveKind.LOAD, numbers[i : i + BATCH]))[1]
        return found

    async def delete(self, numbers: Sequence[int]) -> None:
        await self._run(MoveKind.DELETE, numbers)

    async def clear(self) -> bool:
        assert self._storage is not None
        self._epoch += 1
        self._recovered.clear()
        self._storage.rotate(self._epoch)
        await asyncio.wait_for(self._recovered.wait(), 30)
        return True

    async def close(self) -> None:
        if self._storage is not None:
            if not await self._storage.aclose(deadline_s=10):
                raise AssertionError("the storage did not close cleanly")
            self._take()
            self._stats = self._storage.stats()

    def leaks(self) -> list[str]:
        """What is still held after `close`."""
        said = [f"slots of move {m} were never released" for m in self._held]
        said += self._slots.close()
        if self._storage is not None:
            said += [
                f"{name} is {self._stats[name]} after close"
                for name in (
                    "moves_in_flight", "quarantined_moves", "retires_waiting",
                    "load_bytes_in_flight", "load_bytes_waiting",
                    "save_bytes_in_flight", "save_bytes_waiting",
                )
                if self._stats[name]
            ]  # fmt: skip
        return said
