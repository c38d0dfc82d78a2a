"""Operations by the hundred, cancelled at random points: nothing is touched, leaked or stuck."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.nvme.torture.homes import AtBackend
from tests.backends.nvme.torture.journal import Journal
from tests.backends.nvme.torture.life import (
    SEGMENT,
    descriptors,
    physical_bytes,
    threads_left,
    url_of,
)
from tierkv.blocks import Outcome

CANCELLATIONS = 500
CAPACITY = 8 * SEGMENT
TURNS = 40
"""A save of some blocks takes about so many turns of the loop."""


class Storm:
    """Three callers at once. Each cancels most of what it begins, some turns later.

    The slots of an operation are painted when it ends, however it ends (`homes.Slots`), and given
    to others; at the end the paint must be whole.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.journal = Journal()
        self.cancelled = 0
        self._url = url_of(root, CAPACITY)
        self._rng = random.Random(seed)

    async def rage(self) -> None:
        lives = 0
        while self.cancelled < CANCELLATIONS:
            home = AtBackend(self._url, self.journal)
            if not await self._tried(home.open()):
                await home.close()
                home.leaks()
                continue
            await asyncio.gather(*(self._calls(home) for _ in range(3)))
            await self._works(home)
            await self._tried(home.close())
            await home.close()  # whatever became of the first
            assert home.leaks() == []
            lives += 1
        assert lives > 1

    async def _calls(self, home: AtBackend) -> None:
        rng = self._rng
        for _ in range(120):
            first = 3 * rng.randrange(60)
            chosen = list(range(first, first + rng.choice((1, 6, 24))))
            match rng.random():
                case dice if dice < 0.45:
                    self.journal.offer(chosen, variant := rng.randrange(2))
                    await self._tried(home.save(chosen, variant))
                case dice if dice < 0.9:
                    await self._tried(self._load(home, chosen))
                case dice if dice < 0.98:
                    await self._tried(home.delete(chosen[:2]))
                case _:
                    await self._tried(home.clear())

    async def _tried(self, work: Awaitable[Any]) -> bool:
        """Run it, or cancel it on the way. Whether it came to its end."""
        task = asyncio.ensure_future(work)
        if self._rng.random() < 0.75:
            for _ in range(self._rng.randrange(TURNS)):
                await asyncio.sleep(0)
                if task.done():
                    break
            for _ in range(self._rng.choice((1, 1, 3))):
                task.cancel()
                await asyncio.sleep(0)
        await asyncio.wait([task])
        self.cancelled += task.cancelled()
        if not task.cancelled():
            task.result()
        return not task.cancelled()

    async def _load(self, home: AtBackend, chosen: list[int]) -> None:
        found = await home.load(chosen)
        history = self.journal.read()
        for number, data in found.items():
            if isinstance(data, bytes):
                assert history.wrong(number, data) == ""
            else:
                assert data is Outcome.MISSING

    async def _works(self, home: AtBackend) -> None:
        """More than the quota holds is saved and served: no lane, segment or reader is stuck."""
        for i in range(CAPACITY // SEGMENT + 2):
            late = [3 * n for n in range(1000 + 20 * i, 1011 + 20 * i)]
            self.journal.offer(late, 0)
            for _ in range(500):  # who makes room may be slow, and then declines at once
                outcomes = set((await home.save(late, 0)).values())
                if Outcome.DECLINED not in outcomes:
                    break
                await asyncio.sleep(0.01)
            assert outcomes == {Outcome.DONE}
        assert all(isinstance(data, bytes) for data in (await home.load(late)).values())


@pytest.mark.every_loop
async def test_operations_cancelled_anywhere_leave_nothing_behind(tmp_path: Path) -> None:
    before, others = descriptors(), threading.enumerate()
    storm = Storm(tmp_path, seed=8)
    await storm.rage()
    gc.collect()  # cancelled tasks and their frames are rings that refer to the arena
    left = descriptors()
    assert [left[n] for n in left.keys() - before.keys()] == []
    assert threads_left(others) == []
    assert physical_bytes(tmp_path) <= CAPACITY
    home = AtBackend(url_of(tmp_path, CAPACITY), storm.journal)
    await home.open()
    history = storm.journal.read()
    found = await home.load(sorted(history.may))
    for number, data in found.items():
        assert not isinstance(data, bytes) or history.wrong(number, data) == ""
    await home.close()
    assert home.leaks() == []
