"""A recorded life of a store, in three opens, that meets one fault; and what it must be like."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path

from tests.backends.nvme.torture.homes import Home
from tests.backends.nvme.torture.journal import Journal
from tierkv.blocks import Outcome
from tierkv.errors import TierKVError
from tierkv.testing.faults import SystemFaults

SEGMENT = 64 << 10


def url_of(root: Path, capacity: int) -> str:
    return f"nvme://{root}?capacity={capacity}&segment={SEGMENT}&threads=2"


LARGE, SMALL, TINY = 0, 1, 2


def numbers(kind: int, first: int, n: int) -> list[int]:
    """Numbers of n blocks of a size."""
    return [3 * (first + i) + kind for i in range(n)]


class Life:
    """Takes the steps in one open after another, and collects what must not be."""

    def __init__(
        self,
        make_home: Callable[[], Home],
        journal: Journal,
        root: Path,
        calls: SystemFaults,
        *,
        capacity: int,
        flips: bool,
    ) -> None:
        self.violations: list[str] = []
        self._make_home = make_home
        self._journal = journal
        self._root = root
        self._capacity = capacity
        self._flips = flips
        self._offered: set[int] = set()
        self._home: Home | None = None
        self._calls = calls
        self._is_open = False

    async def live(self) -> None:
        await self._once(self._first)
        self._forget_snapshot()
        await self._once(self._second)
        await self._once(self._third)

    async def _once(self, steps: Callable[[], Awaitable[None]]) -> None:
        home = self._home = self._make_home()
        try:
            try:
                await home.open()
            except TierKVError as exc:
                if "\n" in str(exc):
                    self.violations.append(f"an error of more than one line: {exc}")
                return
            self._is_open = True
            try:
                await steps()
                await self._goes_on()
            finally:
                self._is_open = False
                await home.close()
        finally:
            self.violations += home.leaks()
            self._check_quota()

    async def others_go_on(self) -> None:
        """While a call hangs: others may be asked, and end within their deadline if they have one.

        Then the call goes on. (The backend has no deadlines: there the others only begin.)
        """
        home = self._home
        if not self._is_open or home is None:
            await asyncio.sleep(0.02)
            self._calls.release()
            return
        other = asyncio.ensure_future(home.load(numbers(LARGE, 300, 4)))
        if home.has_deadlines:
            await asyncio.wait([other])
        for _ in range(20):
            await asyncio.sleep(0)
        self._calls.release()
        await asyncio.gather(other, return_exceptions=self._home is not home)

    def _forget_snapshot(self) -> None:
        """As after a kill: footers and chains are read."""
        with self._calls.aside():
            for path in self._root.glob("*/snapshot"):
                path.unlink()

    # The steps. -------------------------------------------------------------------------------

    async def _first(self) -> None:
        await self._save([*numbers(LARGE, 0, 4), *numbers(SMALL, 0, 4), *numbers(TINY, 0, 4)])
        await self._save(numbers(TINY, 100, 70))  # a header of two pages
        await self._save(numbers(LARGE, 0, 2), variant=1)
        await self._load_all()
        await self._delete(numbers(LARGE, 1, 1))
        for i in range(1, 4):
            await self._save(numbers(LARGE, 20 * i, 12))
        await self._load(numbers(LARGE, 60, 32))
        await self._clear()
        await self._save([*numbers(LARGE, 300, 5), *numbers(SMALL, 300, 9)])
        await self._save(numbers(LARGE, 0, 3))
        await self._load_all()

    async def _second(self) -> None:
        await self._load_all()
        await asyncio.gather(
            self._save(numbers(LARGE, 400, 12)),
            self._save(numbers(SMALL, 400, 20)),
            self._load(numbers(LARGE, 300, 5)),
        )
        await self._delete(numbers(SMALL, 400, 3))
        await self._save(numbers(LARGE, 420, 10), variant=1)
        await self._load(numbers(SMALL, 400, 20))

    async def _third(self) -> None:
        await self._load_all()
        for i in range(self._capacity // SEGMENT - 1):  # more than the quota holds
            await self._save(numbers(LARGE, 500 + 20 * i, 12))
        await self._load(numbers(LARGE, 500, 60))

    async def _goes_on(self) -> None:
        """Whatever happened, the store works: a block is saved and loaded, within some tries."""
        assert self._home is not None
        for attempt in range(400):
            late = numbers(LARGE, 2000 + 3 * len(self._offered) + attempt, 2)
            saved = await self._save(late)
            if set(saved.values()) == {Outcome.DONE}:
                found = await self._load(late)
                if all(isinstance(data, bytes) for data in found.values()):
                    return
                if not self._flips and attempt > 3:
                    break
            await asyncio.sleep(0.01 * min(attempt, 5))
        self.violations.append(f"it does not go on: {saved}")

    # One step. --------------------------------------------------------------------------------

    async def _save(self, chosen: Sequence[int], variant: int = 0) -> dict[int, Outcome]:
        assert self._home is not None
        self._journal.offer(chosen, variant)
        self._offered |= set(chosen)
        outcomes = await self._home.save(chosen, variant)
        done = [n for n, outcome in outcomes.items() if outcome is Outcome.DONE]
        self._journal.note("a", done, variant)
        odd = set(outcomes.values()) - {
            Outcome.DONE, Outcome.DECLINED, Outcome.FAILED, Outcome.TIMED_OUT
        }  # fmt: skip
        if odd:
            self.violations.append(f"a save answered {odd}")
        self._check_quota()
        return outcomes

    async def _load_all(self) -> None:
        await self._load(sorted(self._offered))

    async def _load(self, chosen: Iterable[int]) -> dict[int, bytes | Outcome]:
        assert self._home is not None
        found = await self._home.load(list(chosen))
        history = self._journal.read()
        for number, data in found.items():
            if isinstance(data, bytes):
                wrong = history.wrong(number, data)
                if wrong:
                    self.violations.append(wrong)
            elif data is Outcome.CORRUPT and not self._flips:
                self.violations.append(f"block {number} does not verify")
        return found

    async def _delete(self, chosen: Sequence[int]) -> None:
        assert self._home is not None
        self._journal.note("d", chosen)
        await self._home.delete(chosen)

    async def _clear(self) -> None:
        assert self._home is not None
        self._journal.note("c")
        try:
            await self._home.clear()
        except TierKVError:
            return
        self._journal.note("C")

    def _check_quota(self) -> None:
        with self._calls.aside():
            used = physical_bytes(self._root)
        if used > self._capacity + SEGMENT:
            self.violations.append(f"{used} bytes on disk, the quota is {self._capacity}")


def physical_bytes(root: Path) -> int:
    """What the segments below `root` take on disk, as seen from outside."""
    total = 0
    for path in root.glob("*/seg-*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        total += max(stat.st_size, stat.st_blocks * 512)
    return total


def descriptors() -> dict[str, str]:
    """What is open: number to what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def threads_left(others: Collection[threading.Thread] = ()) -> list[str]:
    """Threads of a store that do not end. others: were there before, by another test."""
    ours = [t for t in threading.enumerate() if t.name.startswith("tierkv") and t not in others]
    for thread in ours:
        thread.join(10)
    return [t.name for t in ours if t.is_alive()]
