"""`BackendContract`: everything a backend promises, as tests to inherit."""

# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import pytest

from tierkv import registry
from tierkv.backend import Backend, BlockBatch
from tierkv.blocks import Keys, Outcome
from tierkv.testing.batches import (
    Key,
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

STEPS: Final = (0, 1, 2, 3, 4, 6, 9, 14, 22)
"""After how many turns of the loop a call is cancelled."""

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


@contextlib.contextmanager
def thread_jobs() -> Iterator[list[Future[Any]]]:
    """Every job that is handed to a thread pool while this lasts."""
    jobs: list[Future[Any]] = []
    submit = ThreadPoolExecutor.submit

    def noting(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Future[Any]:
        job: Future[Any] = submit(self, *args, **kwargs)
        jobs.append(job)
        return job

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", noting)
        yield jobs


async def take_back_and_watch(batch: BlockBatch, jobs: list[Future[Any]]) -> None:
    """Reuse a batch's arena, let every thread come to its end, and see that nobody else wrote."""
    batch.arena[:] = bytes([FOREIGN]) * len(batch.arena)
    for job in list(jobs):
        if not job.cancelled():
            await asyncio.wait([asyncio.wrap_future(job)])
    assert bytes(batch.arena).count(FOREIGN) == len(batch.arena), "a buffer was touched too late"


class CancellationPromises(ContractBase):
    """A call that ended touches nothing any more."""

    @pytest.mark.parametrize("turns", STEPS)
    async def test_a_cancelled_read_leaves_its_buffers_alone(
        self, tmp_path: pathlib.Path, turns: int
    ) -> None:
        blocks = make_blocks(18, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            await save(backend, blocks)
            with thread_jobs() as jobs:
                batch = empty_batch(sizes(blocks))
                await cancelled_after(turns, backend.read(batch))
                await take_back_and_watch(batch, jobs)
            assert await load(backend, sizes(blocks)) == blocks

    @pytest.mark.parametrize("turns", STEPS)
    async def test_a_cancelled_write_is_whole_or_a_miss(
        self, tmp_path: pathlib.Path, turns: int
    ) -> None:
        blocks = make_blocks(18, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            with thread_jobs() as jobs:
                batch = make_batch(blocks)
                await cancelled_after(turns, backend.write(batch))
                await take_back_and_watch(batch, jobs)
            await self._whole_or_missing(backend, blocks)
            assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
            assert await load(backend, sizes(blocks)) == blocks

    @staticmethod
    async def _whole_or_missing(backend: Backend, blocks: dict[Key, bytes]) -> None:
        there = await contained(backend, list(blocks))
        found = await load(backend, sizes(blocks))
        for (key, got), listed in zip(found.items(), there, strict=True):
            assert got == (blocks[key] if listed else Outcome.MISSING)

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
