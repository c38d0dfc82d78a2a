"""`BackendContract`: everything a backend promises, as tests to inherit."""

# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import asyncio
import functools
import pathlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import pytest

from tierkv import registry
from tierkv.backend import Backend, BlockBatch
from tierkv.blocks import Keys, Outcome
from tierkv.testing.batches import (
    Key,
    assert_same,
    empty_batch,
    load,
    make_batch,
    make_blocks,
    make_context,
    save,
    sizes,
)
from tierkv.testing.kills import kill_campaign
from tierkv.testing.loops import never_blocked
from tierkv.testing.machine import BackendMachine
from tierkv.testing.promises import (
    BLOCK_BYTES,
    AnswerPromises,
    ContractBase,
    LifetimePromises,
    contained,
    scanned,
)

FOREIGN: Final = 0x5A
"""What the next owner of a buffer puts into it."""

STEPS: Final = (0, 1, 2, 4, 9, 22)
"""After how many turns of the loop a call is cancelled."""

JOBS: Final = (1, 2, 4, 11)
"""At which job for a thread, counted from the call's first, a call is cancelled."""

_T = TypeVar("_T")


async def cancelled_after(turns: int, work: Awaitable[_T]) -> _T | None:
    """Cancel `work` after some turns of the loop, twice; its result if it was faster, else None."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


class ThreadJobs:
    """Every job handed to a thread pool while this is entered; from the n-th on they are held.

    A thread that is slow to start is what makes a careless cancellation visible: held jobs begin
    when `release` is called.
    """

    def __init__(self, hold_from: int | None = None) -> None:
        self.jobs: list[Future[Any]] = []
        self.holding = asyncio.Event()
        self._hold_from = hold_from
        self._gate = threading.Event()
        self._patch = pytest.MonkeyPatch()

    def release(self) -> None:
        """Let every held job begin, and hold no more."""
        self._hold_from = None
        self._gate.set()

    def _held(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # From inside the thread: a job that has not begun can still be cancelled.
        loop.call_soon_threadsafe(self.holding.set)
        self._gate.wait()
        return work(*args, **kwargs)

    def __enter__(self) -> ThreadJobs:
        submit = ThreadPoolExecutor.submit
        loop = asyncio.get_running_loop()

        def noting(
            pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Future[Any]:
            if self._hold_from is not None and len(self.jobs) + 1 >= self._hold_from:
                work = functools.partial(self._held, loop, work)
            job: Future[Any] = submit(pool, work, *args, **kwargs)
            self.jobs.append(job)
            return job

        self._patch.setattr(ThreadPoolExecutor, "submit", noting)
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
        self._patch.undo()

    async def take_back_and_watch(self, batch: BlockBatch) -> None:
        """Reuse a batch's arena, let every thread come to its end, and see that nobody wrote."""
        batch.arena[:] = bytes([FOREIGN]) * len(batch.arena)
        self.release()
        for job in list(self.jobs):
            if not job.cancelled():
                await asyncio.wait([asyncio.wrap_future(job)])
        touched = len(batch.arena) - bytes(batch.arena).count(FOREIGN)
        assert touched == 0, f"{touched} bytes were touched after the call had ended"


async def cancelled_at_job(jobs: ThreadJobs, work: Awaitable[object]) -> None:
    """Cancel `work` while its thread is held.

    It may end at once, if nothing is touched any more, or wait for its thread, which goes on once
    it is clear that it waits.
    """
    task = asyncio.ensure_future(work)
    holding = asyncio.ensure_future(jobs.holding.wait())
    await asyncio.wait([task, holding], return_when=asyncio.FIRST_COMPLETED)
    holding.cancel()
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    if not task.done():
        jobs.release()
    await asyncio.wait([task])


class CancellationPromises(ContractBase):
    """A call that ended touches nothing any more."""

    @pytest.mark.parametrize("turns", STEPS)
    async def test_a_cancelled_read_leaves_its_buffers_alone(
        self, tmp_path: pathlib.Path, turns: int
    ) -> None:
        blocks = make_blocks(18, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            await save(backend, blocks)
            with ThreadJobs() as jobs:
                batch = empty_batch(sizes(blocks))
                await cancelled_after(turns, backend.read(batch))
                await jobs.take_back_and_watch(batch)
            assert_same(await load(backend, sizes(blocks)), blocks)

    @pytest.mark.parametrize("job", JOBS)
    async def test_a_read_cancelled_while_a_thread_is_slow_leaves_its_buffers_alone(
        self, tmp_path: pathlib.Path, job: int
    ) -> None:
        blocks = make_blocks(18, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            await save(backend, blocks)
            with ThreadJobs(hold_from=job) as jobs:
                batch = empty_batch(sizes(blocks))
                await cancelled_at_job(jobs, backend.read(batch))
                await jobs.take_back_and_watch(batch)
            assert_same(await load(backend, sizes(blocks)), blocks)

    @pytest.mark.parametrize("job", JOBS)
    async def test_a_cancelled_open_holds_nothing_once_closed(
        self, tmp_path: pathlib.Path, job: int
    ) -> None:
        blocks = make_blocks(6, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            await save(backend, blocks)
        with ThreadJobs(hold_from=job) as jobs:
            backend = self.make_backend(tmp_path)
            await cancelled_at_job(jobs, backend.open(make_context(BLOCK_BYTES)))
            jobs.release()
            await backend.close()
        async with self.opened(tmp_path) as backend:
            assert await scanned(backend) == (sorted(blocks) if self.survives_reopen else [])

    @pytest.mark.parametrize("turns", STEPS)
    async def test_a_cancelled_write_is_whole_or_a_miss(
        self, tmp_path: pathlib.Path, turns: int
    ) -> None:
        blocks = make_blocks(18, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            with ThreadJobs() as jobs:
                batch = make_batch(blocks)
                await cancelled_after(turns, backend.write(batch))
                await jobs.take_back_and_watch(batch)
            await self._whole_or_missing(backend, blocks)

    @pytest.mark.parametrize("job", JOBS)
    async def test_a_write_cancelled_while_a_thread_is_slow_is_whole_or_a_miss(
        self, tmp_path: pathlib.Path, job: int
    ) -> None:
        blocks = make_blocks(18, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            with ThreadJobs(hold_from=job) as jobs:
                batch = make_batch(blocks)
                await cancelled_at_job(jobs, backend.write(batch))
                await jobs.take_back_and_watch(batch)
            await self._whole_or_missing(backend, blocks)

    @staticmethod
    async def _whole_or_missing(backend: Backend, blocks: dict[Key, bytes]) -> None:
        there = await contained(backend, list(blocks))
        found = await load(backend, sizes(blocks))
        for (key, got), listed in zip(found.items(), there, strict=True):
            assert got == (blocks[key] if listed else Outcome.MISSING)
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
        assert_same(await load(backend, sizes(blocks)), blocks)

    async def test_a_read_beside_a_delete_gives_all_bytes_or_a_miss(
        self, tmp_path: pathlib.Path
    ) -> None:
        blocks = make_blocks(2, [4096])
        (key, kept) = blocks

        async def come_and_go(backend: Backend) -> None:
            for _ in range(100):
                await save(backend, {key: blocks[key]})
                await backend.delete(Keys.of([key]))

        async with self.opened(tmp_path, block_bytes=[4096]) as backend:
            await save(backend, blocks)
            writer = asyncio.create_task(come_and_go(backend))
            reads = 0
            while reads < 1000 or not writer.done():
                found = await load(backend, sizes(blocks))
                assert found[key] in (blocks[key], Outcome.MISSING)
                assert found[kept] == blocks[kept]
                reads += 1
            await writer


class SpacePromises(ContractBase):
    """Room is made by asking first."""

    def _small(self, directory: pathlib.Path) -> str:
        url = self.small_url(directory)
        if url is None:
            pytest.skip("no small_url: this backend has no quota")
        return url

    async def test_only_retired_blocks_make_room_and_the_quota_holds(
        self, tmp_path: pathlib.Path
    ) -> None:
        retired: set[Key] = set()

        async def retire(keys: Keys) -> None:
            assert (await backend.contains(keys)).all(), "gone before the answer"
            retired.update(keys)

        stored: set[Key] = set()
        backend = registry.make_backend(self._small(tmp_path))
        await backend.open(make_context([1 << 20], retire=retire))
        try:
            for first in range(0, 96, 4):
                outcomes = await save(backend, make_blocks(4, [1 << 20], first=first))
                assert set(outcomes.values()) <= {Outcome.DONE, Outcome.DECLINED}
                stored.update(k for k, outcome in outcomes.items() if outcome is Outcome.DONE)
                usage = await backend.usage()
                assert usage.physical_bytes <= usage.capacity_bytes
            there = set(await scanned(backend))
            assert there and there <= stored
            assert stored - there and stored - there <= retired
            assert set(await load(backend, dict.fromkeys(there, 1 << 20))) == there
        finally:
            await backend.close()

    async def test_blocks_stay_readable_until_their_retirement_is_agreed(
        self, tmp_path: pathlib.Path
    ) -> None:
        asked: asyncio.Queue[Keys] = asyncio.Queue()
        agreed = asyncio.Event()

        async def retire(keys: Keys) -> None:
            asked.put_nowait(keys)
            await agreed.wait()

        async def fill(backend: Backend) -> None:
            for first in range(0, 96, 4):
                await save(backend, make_blocks(4, [1 << 20], first=first))

        async with self.opened(
            tmp_path, url=self._small(tmp_path), block_bytes=[1 << 20], retire=retire
        ) as backend:
            filling = asyncio.create_task(fill(backend))
            wanted = dict.fromkeys(await asked.get(), 1 << 20)
            found = await load(backend, wanted)
            agreed.set()
            await filling
        assert all(isinstance(data, bytes) for data in found.values())


class BackendContract(AnswerPromises, LifetimePromises, CancellationPromises, SpacePromises):
    """Subclass it as ``class TestMine(BackendContract)`` and say `url(directory)`.

    Class variables and methods to set where the default is not right:

    survives_reopen: blocks are there after `close` and a new `open` (default True). Where True,
        killing a process at any system call must lose nothing that was acknowledged.
    exclusive: a second owner of the same namespace and rank gets `StoreBusyError` (default True).
    small_url(directory): a URL with a small quota, to see room being made (default: none).
    make_backend(directory): for a backend that has no URL.

    Tests are async: pytest-asyncio runs them, also in its strict mode. With
    `tierkv.testing.loop_factories` in conftest.py they run on asyncio and on uvloop.
    """

    pytestmark = pytest.mark.asyncio

    async def test_the_loop_is_never_blocked(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(12, BLOCK_BYTES)
        for _ in range(2):  # new, and recovering
            backend = self.make_backend(tmp_path)
            with never_blocked():
                await backend.open(make_context(BLOCK_BYTES))
                await save(backend, blocks)
                await load(backend, sizes(blocks))
                await contained(backend, list(blocks))
                await scanned(backend)
                await backend.usage()
                await backend.delete(Keys.of(list(blocks)[:6]))
                await backend.close()
        backend = self.make_backend(tmp_path)
        with never_blocked():
            await backend.open(make_context(BLOCK_BYTES))
            await backend.clear()
            await backend.close()

    async def test_random_histories_agree_with_a_dict(self) -> None:
        contract = self

        class Machine(BackendMachine):
            survives_reopen = contract.survives_reopen
            loop_factory = type(asyncio.get_running_loop())

            def make_backend(self, directory: pathlib.Path) -> Backend:
                return contract.make_backend(directory)

        await asyncio.to_thread(Machine.check)  # it has a loop of its own, of this loop's kind

    async def test_killed_at_any_system_call_it_serves_what_it_acknowledged(
        self, tmp_path: pathlib.Path
    ) -> None:
        if not self.survives_reopen:
            pytest.skip("nothing survives a close, let alone a kill")
        if not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            pytest.skip("the child has a loop of its own: once is enough")
        report = await kill_campaign(self.url, tmp_path)
        assert report.kills >= 5, report
