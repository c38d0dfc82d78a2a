"""Cancelled after every number of turns of the loop: nothing is leased, lost, hung or half closed.

Copies and checksums run in the loop's own thread here, so that every run takes the same turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

import tierkv
from tests.cache.engine import (
    PROMPT,
    Engine,
    Inline,
    Shelf,
    assert_loaded,
    open_cache,
    settled,
    tables,
    use,
)
from tierkv.jobs import Jobs
from tierkv.local import LocalStorage

pytestmark = pytest.mark.every_loop

OTHER = [*range(1000, 1070)]
ENDS = (
    tierkv.CacheClosedError,
    tierkv.Loaded,
    tierkv.Saved,
    tierkv.PrefixHit,
    tierkv.answers.Flushed,
)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    backend = Shelf()
    use(monkeypatch, backend)
    return backend


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tierkv.Cache]:
    asyncio.get_running_loop().set_default_executor(Inline())
    async with open_cache("shelf://", **options) as cache:
        cache._jobs._thread = Inline()
        port = cache._port
        assert isinstance(port, LocalStorage)
        assert port._mover._tier is not None
        port._mover._tier._pool = Inline()
        yield cache


async def cancel_everywhere(
    work: Callable[[], Coroutine[Any, Any, Any]],
    after: Callable[[bool], Awaitable[None]],
) -> int:
    """Run `work` again and again, cancelled one turn later every time, until it ends by itself.

    after: called each time, with whether it ended by itself. Returns how often it was cancelled.
    """
    for turns in range(500):
        task = asyncio.ensure_future(work())
        for _ in range(turns):
            await asyncio.sleep(0)
        whole = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert whole or task.cancelled()
        await after(whole)
        if whole:
            assert task.exception() is None
            return turns
    raise AssertionError("it never ends by itself")


async def stored(engine: Engine) -> None:
    async with opened() as cache:
        await cache.save(PROMPT, engine.pages, tables())
        assert await cache.flush() == tierkv.Flushed(0)


async def test_a_save_cancelled_anywhere_leaves_nothing_behind(shelf: Shelf) -> None:
    one, two = Engine(1), Engine(2)
    prompts = ([*range(n * 1000, n * 1000 + 70)] for n in range(1, 1000))
    async with opened() as cache:

        async def after(whole: bool) -> None:
            await settled(cache)
            hit = await cache.lookup(now)
            assert hit.tokens == 64 or not whole
            if hit:
                loaded = await cache.load(hit, two.pages, tables(3))
                assert (loaded.tokens, loaded.failed) == (hit.tokens, {})
                assert_loaded(one, two, hit, tables(), tables(3))

        now: list[int] = []

        def work() -> Coroutine[Any, Any, Any]:
            now[:] = next(prompts)
            return cache.save(list(now), one.pages, tables())

        assert await cancel_everywhere(work, after) > 1
        await cache.flush()
        await settled(cache)


async def test_a_save_larger_than_the_arena_cancelled_anywhere_leaves_nothing_behind(
    shelf: Shelf,
) -> None:
    one = Engine(1)
    prompts = ([*range(n * 1000, n * 1000 + 70)] for n in range(1, 1000))
    async with opened(pinned=6 * 4096) as cache:

        async def after(whole: bool) -> None:
            await settled(cache)
            await cache.flush()

        turns = await cancel_everywhere(
            lambda: cache.save(next(prompts), one.pages, tables()), after
        )
        assert turns > 10


async def test_a_load_cancelled_anywhere_ends_its_lease_and_shares_what_it_read(
    shelf: Shelf,
) -> None:
    one, two = Engine(1), Engine(2)
    await stored(one)
    async with opened(pinned=8 * 4096) as cache:

        async def lookup_and_load() -> tierkv.Loaded:
            hit = await cache.lookup(PROMPT)
            try:
                return await cache.load(hit, two.pages, tables(3))
            finally:
                hit.release()

        async def after(whole: bool) -> None:
            await settled(cache)
            before = two.contents()
            await asyncio.sleep(0)
            assert two.contents() == before
            hit = await cache.lookup(PROMPT)
            assert hit.tokens == 64
            assert (await cache.load(hit, two.pages, tables())).tokens == 64
            assert_loaded(one, two, hit, tables(), tables())
            await cache.save(OTHER, one.pages, tables())  # drives PROMPT out of the arena
            await cache.flush()
            await settled(cache)

        assert await cancel_everywhere(lookup_and_load, after) > 3


async def test_a_lookup_that_waits_for_another_load_leases_nothing_if_cancelled(
    shelf: Shelf,
) -> None:
    one, two = Engine(1), Engine(2)
    await stored(one)
    async with opened() as cache:
        hit = await cache.lookup(PROMPT)
        waiting = [asyncio.ensure_future(cache.lookup(PROMPT)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        assert (await cache.load(hit, two.pages, tables())).tokens == 64
        first, second = await waiting[0], await waiting[2]
        assert first.tokens == second.tokens == 64
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]
        first.release()
        second.release()
        await settled(cache)


async def test_a_flush_or_rotate_cancelled_anywhere_goes_on_by_itself(shelf: Shelf) -> None:
    one = Engine(1)
    async with opened() as cache:

        async def save_and_flush() -> None:
            await cache.save(PROMPT, one.pages, tables())
            await cache.flush()

        async def flushed(whole: bool) -> None:
            await settled(cache)
            assert await cache.flush() == tierkv.Flushed(0)

        async def rotated(whole: bool) -> None:
            assert not whole or not await cache.lookup(PROMPT)
            await cache.rotate()
            await settled(cache)
            assert not await cache.lookup(PROMPT)
            assert cache.stats()["tier_blocks"] == 0
            await cache.save(PROMPT, one.pages, tables())
            assert await cache.flush() == tierkv.Flushed(0)
            assert cache.stats()["tier_blocks"] == 16

        assert await cancel_everywhere(save_and_flush, flushed) > 3
        assert await cancel_everywhere(cache.rotate, rotated) > 1


@pytest.mark.parametrize("busy", [False, True])
async def test_a_close_cancelled_anywhere_goes_on_and_can_be_waited_for(
    shelf: Shelf, busy: bool
) -> None:
    one, two = Engine(1), Engine(2)
    await stored(one)
    for turns in range(100):
        asyncio.get_running_loop().set_default_executor(Inline())
        cache = open_cache("shelf://")
        await cache.aopen()
        tasks: list[asyncio.Future[Any]] = []
        if busy:
            hit = await cache.lookup(PROMPT)
            tasks = [
                asyncio.ensure_future(cache.load(hit, two.pages, tables())),
                asyncio.ensure_future(cache.save(OTHER, one.pages, tables())),
                asyncio.ensure_future(cache.lookup(PROMPT)),
                asyncio.ensure_future(cache.flush()),
            ]
            for _ in range(turns % 5):
                await asyncio.sleep(0)
        close = asyncio.ensure_future(cache.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        whole = close.done()
        close.cancel()
        await asyncio.wait([close])
        await cache.aclose()
        assert cache._arena is not None
        assert cache._arena._fd == -1
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, ENDS), result
        if whole:
            return
    raise AssertionError("it never ends by itself")


async def test_an_open_cancelled_anywhere_leaves_nothing_open(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    create = tierkv.cache.Arena.create

    def remember(nbytes: int, *, prefault: bool) -> Any:
        made.append(create(nbytes, prefault=prefault))
        return made[-1]

    monkeypatch.setattr(tierkv.cache.Arena, "create", remember)
    asyncio.get_running_loop().set_default_executor(Inline())
    caches: list[tierkv.Cache] = []

    def work() -> Coroutine[Any, Any, Any]:
        caches.append(open_cache("shelf://"))
        return caches[-1].aopen()

    async def after(whole: bool) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        if not whole:
            assert all(arena._fd == -1 for arena in made)
            with pytest.raises(tierkv.CacheClosedError):
                await caches[-1].lookup(PROMPT)
        await caches[-1].aclose()

    assert await cancel_everywhere(work, after) > 2
    assert all(arena._fd == -1 for arena in made)


@pytest.mark.parametrize("what", ["save", "load"])
async def test_cancelled_in_mid_copy_the_caller_waits_until_its_pages_are_left_alone(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    one, two = Engine(1), Engine(2)
    await stored(one)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    entered, go_on = threading.Event(), threading.Event()
    launch = Jobs._launch_sync

    def slow_launch(self: Jobs, *arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        return launch(self, *arguments)

    async with open_cache("shelf://") as cache:
        hit = await cache.lookup(PROMPT)
        monkeypatch.setattr(Jobs, "_launch_sync", slow_launch)
        task = asyncio.ensure_future(
            cache.load(hit, two.pages, tables())
            if what == "load"
            else cache.save(OTHER, one.pages, tables())
        )
        await asyncio.to_thread(entered.wait, 30)
        hit.release()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        ended_early = task.done()
        go_on.set()
        assert not ended_early, "the copy was still under way"
        with pytest.raises(asyncio.CancelledError):
            await task
        before = two.contents()
        await settled(cache)
        assert two.contents() == before
