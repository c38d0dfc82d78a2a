"""Real tiers in both homes: who owns a directory, a keeper that is killed, a loop left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import tierkv
from tests.cache.engine import PROMPT, Engine, assert_loaded, open_cache, tables
from tierkv.keeper import KeeperClient
from tierkv.testing import never_blocked

OTHER = [*range(1000, 1070)]


def url_of(scheme: str, directory: Path) -> str:
    extra = "&segment=1MiB" if scheme == "nvme" else ""
    return f"{scheme}://{directory}/kv?capacity=64MiB{extra}"


async def killed(cache: tierkv.Cache) -> None:
    """Kill the keeper, and return once its tier is known to be down."""
    keeper = cache._port
    assert isinstance(keeper, KeeperClient)
    os.kill(keeper.pid, signal.SIGKILL)
    while cache._ledger.counters["tier_down"] == 0:
        await cache._change()


async def back(cache: tierkv.Cache) -> None:
    """Return once the tier is up again."""
    while not cache._ledger.tier_is_up:
        await cache._change()


@pytest.mark.parametrize("scheme", ["file", "nvme"])
@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_second_cache_on_a_directory_is_told_who_owns_it(
    tmp_path: Path, scheme: str, isolation: str
) -> None:
    url = url_of(scheme, tmp_path)
    async with open_cache(url):
        second = open_cache(url, isolation=isolation)
        with pytest.raises(tierkv.StoreBusyError, match=str(os.getpid())) as caught:
            await second.aopen()
        assert "\n" not in str(caught.value)
        async with open_cache(url, namespace="model@rev2", isolation=isolation):
            pass
    async with open_cache(url, isolation=isolation):
        pass


@pytest.mark.parametrize("scheme", ["memory", "file", "nvme"])
@pytest.mark.usefixtures("blockbuster")
async def test_nothing_blocks_the_loop_from_open_to_close(tmp_path: Path, scheme: str) -> None:
    one, two = Engine(1), Engine(2)
    for _ in range(2):
        url = "memory://" if scheme == "memory" else url_of(scheme, tmp_path)
        async with open_cache(url, pinned=12 * 4096) as cache:
            await cache.save(PROMPT, one.pages, tables())
            await cache.save(OTHER, one.pages, tables())
            await cache.flush()
            hit = await cache.lookup(PROMPT)
            assert (await cache.load(hit, two.pages, tables())).tokens == 64
            assert cache.stats()["tier_blocks"] == 32
    async with open_cache(url) as cache:
        await cache.rotate()


async def test_once_its_keeper_is_started_nothing_blocks_the_loop_either(tmp_path: Path) -> None:
    # The start itself does, for some milliseconds: a child lives as long as the thread that
    # started it, so that must be the caller's own.
    one, two = Engine(1), Engine(2)
    async with open_cache(url_of("nvme", tmp_path), isolation="process") as cache:
        with never_blocked():
            await cache.save(PROMPT, one.pages, tables())
            await cache.flush()
            hit = await cache.lookup(PROMPT)
            assert (await cache.load(hit, two.pages, tables())).tokens == 64
            await cache.rotate()
            await cache.aclose()


async def test_a_keeper_killed_during_a_save_costs_nothing_that_flush_does_not_mend(
    tmp_path: Path,
) -> None:
    one, two = Engine(1), Engine(2)
    async with open_cache(url_of("nvme", tmp_path), isolation="process") as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
        await cache.save(OTHER, one.pages, tables())
        await killed(cache)
        for prompt in (PROMPT, OTHER):
            hit = await cache.lookup(prompt)
            assert (hit.tokens, hit.tier_tokens) == (64, 0), "RAM still has it"
            hit.release()
        await back(cache)
        assert await cache.flush() == tierkv.Flushed(0)
        assert cache.stats()["tier_blocks"] == 32
        assert cache.stats()["storage_keeper_deaths"] == 1
    async with open_cache(url_of("nvme", tmp_path)) as cache:
        for prompt in (PROMPT, OTHER):
            hit = await cache.lookup(prompt)
            assert (hit.tokens, hit.tier_tokens) == (64, 64)
            assert (await cache.load(hit, two.pages, tables(3))).tokens == 64
            assert_loaded(one, two, hit, tables(), tables(3))


async def test_a_keeper_killed_during_a_load_is_a_miss_and_the_next_one_serves_it(
    tmp_path: Path,
) -> None:
    one, two = Engine(1), Engine(2)
    url = url_of("nvme", tmp_path)
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
    async with open_cache(url, isolation="process") as cache:
        keeper = cache._port
        assert isinstance(keeper, KeeperClient)
        before = two.contents()
        hit = await cache.lookup(PROMPT)
        os.kill(keeper.pid, signal.SIGSTOP)  # so that it surely dies before it answers
        load = asyncio.ensure_future(cache.load(hit, two.pages, tables(3)))
        await asyncio.sleep(0)
        await killed(cache)
        loaded = await load
        assert (loaded.tokens, loaded.blocks) == (0, 0)
        assert loaded.failed == {"full": [0, 1, 2, 3], "swa": [14, 15], "state": [3]}
        assert two.contents() == before
        await back(cache)
        hit = await cache.lookup(PROMPT)
        assert (await cache.load(hit, two.pages, tables(3))).tokens == 64
        assert_loaded(one, two, hit, tables(), tables(3))
        assert cache.stats()["leased_blocks"] == 0


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 50, 1000])
async def test_an_open_with_a_keeper_that_is_cancelled_leaves_no_process(
    tmp_path: Path, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[KeeperClient] = []

    class Remembered(KeeperClient):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type] # handed on as they are
            clients.append(self)

    monkeypatch.setattr("tierkv.cache.KeeperClient", Remembered)
    cache = open_cache(url_of("nvme", tmp_path), isolation="process")
    opening = asyncio.ensure_future(cache.aopen())
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    for client in clients:
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)
    async with open_cache(url_of("nvme", tmp_path), isolation="process"):
        pass


@pytest.mark.parametrize("turns", [0, 1, 5, 30, 300])
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_closing_while_everything_runs_ends_every_call(
    tmp_path: Path, isolation: str, kill: bool, turns: int
) -> None:
    if kill and isolation == "thread":
        pytest.skip("there is no keeper to kill")
    one, two = Engine(1), Engine(2)
    url = url_of("nvme", tmp_path)
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
    cache = open_cache(url, isolation=isolation, pinned=16 * 4096)
    await cache.aopen()
    hit = await cache.lookup(PROMPT)
    tasks = [
        asyncio.ensure_future(work)
        for work in (
            cache.load(hit, two.pages, tables()),
            cache.lookup(PROMPT),
            cache.save(OTHER, one.pages, tables()),
            cache.save([*OTHER[:16], *PROMPT, *OTHER], one.pages, tables()),
            cache.flush(),
            cache.rotate(),
            cache.save(PROMPT, one.pages, tables()),
        )
    ]
    for _ in range(turns):
        await asyncio.sleep(0)
    if kill:
        assert isinstance(cache._port, KeeperClient)
        os.kill(cache._port.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await cache.aclose(deadline_s=5)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert not isinstance(result, Exception) or isinstance(result, tierkv.CacheClosedError)
    assert cache._ledger.moves_in_flight == 0
    async with open_cache(url):
        pass
