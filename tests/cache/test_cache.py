"""The async API end to end: real pages, real arena, real tiers, in this process and in a keeper."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tierkv
from tests.cache.engine import PROMPT, Engine, assert_loaded, open_cache, tables


@pytest.fixture(params=["memory", "file", "nvme"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return "memory://?capacity=64MiB"
    extra = "&segment=1MiB" if request.param == "nvme" else ""
    return f"{request.param}://{tmp_path}/kv?capacity=64MiB{extra}"


async def test_what_was_saved_comes_back_byte_for_byte(url: str) -> None:
    one, two = Engine(1), Engine(2)
    async with open_cache(url) as cache:
        saved = await cache.save(PROMPT, one.pages, tables())
        assert saved.declined_blocks == 0
        assert saved.skipped_blocks == 0 or saved.skipped_blocks > 0
        hit = await cache.lookup(PROMPT)
        assert hit.tokens == 64
        assert hit.blocks == {"full": range(4), "swa": range(14, 16), "state": range(3, 4)}
        loaded = await cache.load(hit, two.pages, tables(3))
        assert loaded == tierkv.Loaded(64, 7, 4 * 3000 + 2 * 512 + 2048, {})
        assert_loaded(one, two, hit, tables(), tables(3))


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_new_cache_serves_what_an_earlier_one_stored(url: str, isolation: str) -> None:
    if url.startswith("memory"):
        pytest.skip("memory does not outlive its cache")
    one, two = Engine(1), Engine(2)
    async with open_cache(url, isolation=isolation) as cache:
        await cache.save(PROMPT, one.pages, tables())
        assert await cache.flush(deadline_s=20) == tierkv.Flushed(0)
    async with open_cache(url, isolation=isolation) as cache:
        hit = await cache.lookup(PROMPT)
        assert (hit.tokens, hit.tier_tokens) == (64, 64)
        loaded = await cache.load(hit, two.pages, tables(3))
        assert (loaded.tokens, loaded.failed) == (64, {})
        assert_loaded(one, two, hit, tables(), tables(3))
        stats = cache.stats()
        assert stats["hit_tokens"] == 64
        assert stats["loaded_blocks"] == 7
        assert stats["never_read_blocks"] == stats["tier_blocks"] - 7


async def test_another_namespace_sees_nothing(url: str) -> None:
    one = Engine(1)
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
    async with open_cache(url, namespace="model@rev2") as cache:
        assert not await cache.lookup(PROMPT)


async def test_blocks_that_no_hit_reads_are_not_stored() -> None:
    one = Engine(1)
    async with open_cache("") as cache:
        saved = await cache.save(PROMPT, one.pages, tables())
        # Per 16 tokens: one full block, one state, and the last two of four window blocks.
        assert saved.blocks == 4 * (1 + 1 + 2)
        assert saved.skipped_blocks == 4 * 2
        again = await cache.save(PROMPT, one.pages, tables())
        assert again.blocks == 0


async def test_a_prompt_larger_than_the_arena_passes_through_it(url: str) -> None:
    one, two = Engine(1), Engine(2)
    async with open_cache(url, pinned=8 * 4096) as cache:
        saved = await cache.save(PROMPT, one.pages, tables())
        assert saved.blocks == 16
        await cache.flush()
        hit = await cache.lookup(PROMPT)
        assert hit.tokens == 64
        loaded = await cache.load(hit, two.pages, tables(3))
        assert loaded.tokens == 64
        assert_loaded(one, two, hit, tables(), tables(3))


async def test_local_tokens_are_not_loaded_again(url: str) -> None:
    one, two = Engine(1), Engine(2)
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables())
        hit = await cache.lookup(PROMPT, local_tokens=32)
        assert hit.tokens == 64
        assert hit.blocks == {"full": range(2, 4), "swa": range(14, 16), "state": range(3, 4)}
        await cache.load(hit, two.pages, tables(3))
        assert_loaded(one, two, hit, tables(), tables(3))
        assert not await cache.lookup(PROMPT, local_tokens=64)


async def test_rotate_makes_everything_older_a_miss_after_a_restart_too(url: str) -> None:
    one = Engine(1)
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
        held = await cache.lookup(PROMPT)
        await cache.rotate()
        assert not await cache.lookup(PROMPT)
        with pytest.raises(KeyError):
            await cache.load(held, one.pages, tables())
        await cache.save([*PROMPT[:32], 7], one.pages, tables())
        await cache.flush()
        assert (await cache.lookup(PROMPT)).tokens == 32
    async with open_cache(url) as cache:
        expected = 0 if url.startswith("memory") else 32
        assert (await cache.lookup(PROMPT)).tokens == expected


async def test_extras_keep_equal_tokens_apart() -> None:
    one = Engine(1)
    async with open_cache("") as cache:
        await cache.save(PROMPT, one.pages, tables(), extras=tierkv.Extras(salt="a"))
        assert not await cache.lookup(PROMPT)
        assert not await cache.lookup(PROMPT, extras=tierkv.Extras(adapter="a"))
        assert (await cache.lookup(PROMPT, extras=tierkv.Extras(salt="a"))).tokens == 64


async def test_a_cancelled_load_leaves_pages_alone_and_gives_its_lease_back(
    tmp_path: Path,
) -> None:
    one, two = Engine(1), Engine(2)
    url = f"file://{tmp_path}/kv?capacity=64MiB"
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
    async with open_cache(url) as cache:
        before = {n: [two.block(n, i) for i in range(40)] for n in two.tensors}
        hit = await cache.lookup(PROMPT)
        task = asyncio.ensure_future(cache.load(hit, two.pages, tables(3)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        after = {n: [two.block(n, i) for i in range(40)] for n in two.tensors}
        assert before == after
        hit = await cache.lookup(PROMPT)  # waits for the abandoned load and shares what it read
        assert (await cache.load(hit, two.pages, tables(3))).tokens == 64
        assert cache.stats()["leased_blocks"] == 0


async def test_two_lookups_of_one_prompt_share_one_load(tmp_path: Path) -> None:
    one, two, three = Engine(1), Engine(2), Engine(3)
    url = f"file://{tmp_path}/kv?capacity=64MiB"
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
    async with open_cache(url) as cache:
        hit = await cache.lookup(PROMPT)
        second = asyncio.ensure_future(cache.lookup(PROMPT))
        await cache.load(hit, two.pages, tables())
        other = await second
        assert (other.tokens, other.tier_tokens) == (64, 0)
        await cache.load(other, three.pages, tables())
        assert_loaded(one, three, other, tables(), tables())
        assert cache.stats()["storage_done_load_blocks"] == 7


async def test_a_closed_cache_says_so() -> None:
    one = Engine(1)
    cache = open_cache("")
    with pytest.raises(tierkv.CacheClosedError):
        await cache.lookup(PROMPT)
    async with cache:
        pass
    with pytest.raises(tierkv.CacheClosedError):
        await cache.save(PROMPT, one.pages, tables())
    with pytest.raises(tierkv.CacheClosedError):
        await cache.aopen()


async def test_a_table_that_is_too_short_is_refused_before_anything_moves() -> None:
    one = Engine(1)
    async with open_cache("") as cache:
        await cache.save(PROMPT, one.pages, tables())
        hit = await cache.lookup(PROMPT)
        with pytest.raises(ValueError, match="group 'swa': the hit fills blocks 14 to 15"):
            await cache.load(hit, one.pages, {"full": [1, 2, 3, 4], "state": [1, 2, 3, 4]})
        hit.release()
        assert cache.stats()["leased_blocks"] == 0


async def test_an_unpaged_block_is_not_saved_and_bounds_the_hit() -> None:
    one = Engine(1)
    table = tables()
    table["state"][3] = None  # no state was taken at 64
    async with open_cache("") as cache:
        await cache.save(PROMPT, one.pages, table)
        assert (await cache.lookup(PROMPT)).tokens == 48
