"""Moves by the hundred that deadlines, rotations and closes cut short at random points, on a disk
tier: their slots are painted once they are released, and the paint must stay whole."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.backends.nvme.torture.homes import SLOT, Slots
from tests.backends.nvme.torture.journal import BLOCK_BYTES, Journal, key_of
from tests.backends.nvme.torture.life import SEGMENT, descriptors, threads_left, url_of
from tierkv.backend import Usage
from tierkv.blocks import Appraise, MoveDone, MoveKind, MoveReleased, Outcome, Recovered, Retire
from tierkv.local import LocalStorage
from tierkv.storage import StorageConfig
from tierkv.testing import every_other, make_move
from tierkv.urls import TierURL
from tierkv_backends.nvme import NvmeBackend

CUTS = 500
CAPACITY = 8 * SEGMENT
CALLERS = 8


class Desk:
    """Many moves at once over one storage, and a journal of what they were told."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.rng = rng
        self.journal = Journal(64 << 20)
        self.slots = Slots()
        self.cut = 0
        self.epoch = 0
        self.storage: LocalStorage | None = None
        self.config = StorageConfig(
            url=url_of(root, CAPACITY),
            namespace=b"\x01" * 32,
            namespace_text="test",
            arena_bytes=len(self.slots.arena),
            block_bytes=BLOCK_BYTES,
            io_threads=2,
        )
        self._ids = itertools.count(1)
        self._old: set[int] = set()
        self._new: set[int] = set()
        self._done: dict[int, asyncio.Future[MoveDone]] = {}
        self._held: dict[int, list[int]] = {}
        self._recovered = asyncio.Event()
        self.closing = False
        self._changed = asyncio.Event()

    async def open(self, **timeouts: float) -> bool:
        """Open, or be cancelled on the way; whether it came to its end."""
        config = dataclasses.replace(self.config, **timeouts)
        storage = await self.tried(LocalStorage.open(config, self.slots.arena, epoch=self.epoch))
        if storage is None:
            return False
        self.storage, self.closing = storage, False
        storage.on_event(self._take)
        return True

    async def tried(self, work: Any) -> Any:
        """What it returns, or None where it was cancelled some turns later."""
        task = asyncio.ensure_future(work)
        if self.rng.random() < 0.7:
            for _ in range(self.rng.randrange(60)):
                await asyncio.sleep(0)
                if task.done():
                    break
            task.cancel()
        await asyncio.wait([task])
        self.cut += task.cancelled()
        return None if task.cancelled() else task.result()

    def _take(self) -> None:
        assert self.storage is not None
        for event in self.storage.poll():
            match event:
                case MoveDone(move_id):
                    self._done.pop(move_id).set_result(event)
                case MoveReleased(move_id):
                    self.slots.give_back(self._held.pop(move_id))
                case Retire(retire_id, keys):
                    self.journal.retired(keys)
                    self.storage.agree(retire_id)
                case Appraise(question_id, keys):
                    self.storage.appraised(question_id, every_other(keys))
                case Recovered(_, epoch):
                    if epoch == self.epoch > 0:
                        # A close may stop a rotation; what was saved since may be there.
                        self.journal.note("C", self._old - self._new)
                        self._recovered.set()
                case _:
                    pass
            self._changed.set()

    async def run(self, kind: MoveKind, chosen: list[int]) -> list[Outcome]:
        assert self.storage is not None
        while len(self.slots.free) < len(chosen):
            self._changed.clear()
            await self._changed.wait()
        slots = self.slots.take(len(chosen))
        variant = self.rng.randrange(2)
        if kind is MoveKind.SAVE:
            self.journal.offer(chosen, variant)
            self._new |= set(chosen)
            self.slots.fill(slots, chosen, variant)
        move_id = next(self._ids)
        self._held[move_id] = slots
        done = self._done[move_id] = asyncio.get_running_loop().create_future()
        offsets = [] if kind is MoveKind.DELETE else [slot * SLOT for slot in slots]
        keys = [key_of(n) for n in chosen]
        epoch = self.epoch
        self.storage.submit(make_move(kind, keys, move_id=move_id, offsets=offsets, epoch=epoch))
        event = await done
        outcomes = [Outcome(o) for o in event.outcomes.tolist()]
        history = self.journal.read()
        for slot, number, outcome in zip(slots, chosen, outcomes, strict=True):
            if kind is MoveKind.LOAD and outcome is Outcome.DONE and epoch == self.epoch:
                assert history.wrong(number, self.slots.payload(slot, number)) == ""
        if event.released:
            self.slots.give_back(self._held.pop(move_id))
        self.cut += epoch != self.epoch or Outcome.TIMED_OUT in outcomes or not event.released
        return outcomes

    async def rotate(self) -> None:
        assert self.storage is not None
        if self.closing:  # from then on it would change nothing
            return
        self.epoch += 1
        self._recovered.clear()
        self.journal.note("c")
        self._old, self._new = set(self.journal.read().may), set()
        self.storage.rotate(self.epoch)
        while not self._recovered.is_set() and not self.closing:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Closed at once, with moves in flight; or cancelled, and then again."""
        assert self.storage is not None
        self.closing = True
        await self.tried(self.storage.aclose(deadline_s=self.rng.choice((0.0, 1.0))))
        assert await self.storage.aclose(deadline_s=30)
        self._take()
        stats = self.storage.stats()
        for name in (
            "moves_in_flight", "quarantined_moves", "retires_waiting", "load_bytes_in_flight",
            "load_bytes_waiting", "save_bytes_in_flight", "save_bytes_waiting",
        ):  # fmt: skip
            assert stats[name] == 0, name
        assert stats["unforeseen_errors"] == 0
        self._changed.set()

    def leaks(self) -> list[str]:
        return [f"move {m} never ended" for m in (*self._done, *self._held)]


async def callers(desk: Desk, moves: int) -> None:
    """Moves of all kinds, three at a time, and a rotation now and then while they are under way."""

    async def one_after_another(caller: int) -> None:
        rng = desk.rng
        for _ in range(moves):
            if desk.closing:
                return
            first = 600 * caller + 3 * rng.randrange(60)  # the ledger puts moves on a key in order
            chosen = list(range(first, first + rng.choice((1, 6, 20))))
            kind = rng.choice((MoveKind.SAVE, MoveKind.LOAD, MoveKind.LOAD, MoveKind.DELETE))
            await desk.run(kind, chosen)
            if caller == 0 and rng.random() < 0.4:
                await desk.rotate()

    await asyncio.gather(*(one_after_another(caller) for caller in range(CALLERS)))


async def works(desk: Desk) -> None:
    """With time enough, blocks are saved and loaded."""
    assert desk.storage is not None
    for i in range(12):
        late = [3 * n for n in range(3000 + 20 * i, 3011 + 20 * i)]
        outcomes = await desk.run(MoveKind.SAVE, late)
        assert set(outcomes) == {Outcome.DONE}
    assert set(await desk.run(MoveKind.LOAD, late)) == {Outcome.DONE}


@pytest.mark.every_loop
async def test_moves_that_are_cut_short_leave_nothing_behind(tmp_path: Path) -> None:
    before, others = descriptors(), threading.enumerate()
    desk = Desk(tmp_path, random.Random(4))
    while desk.cut < CUTS:
        timeout_s = desk.rng.choice((0.001, 30.0, 30.0))
        if await desk.open(read_timeout_s=timeout_s, write_timeout_s=timeout_s):
            running = asyncio.ensure_future(callers(desk, 60))
            for _ in range(desk.rng.choice((300, 2_000))):
                await asyncio.sleep(0)
                if running.done():
                    break
            await desk.close()
            await running
            assert desk.leaks() == []
    while not await desk.open():
        pass
    await works(desk)
    await desk.close()
    assert desk.slots.close() == []
    gc.collect()  # cancelled tasks and their frames are rings that refer to the arena
    left = descriptors()
    assert [left[n] for n in left.keys() - before.keys()] == []
    assert threads_left(others) == []


async def test_an_open_cancelled_at_its_last_question_leaves_the_tier_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = asyncio.Event()

    class Asked(NvmeBackend):
        async def usage(self) -> Usage:
            asking.set()
            return await asyncio.Future()

    desk = Desk(tmp_path, random.Random(1))
    monkeypatch.setattr("tierkv.local.make_backend", lambda url: Asked.from_url(TierURL.parse(url)))
    opening = asyncio.ensure_future(LocalStorage.open(desk.config, desk.slots.arena))
    await asking.wait()
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    monkeypatch.undo()
    async with await LocalStorage.open(desk.config, desk.slots.arena):  # not "in use by"
        pass
    assert desk.slots.close() == []
