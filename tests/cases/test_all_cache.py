"""Cases of kinds NS, HASH, DURA and LIVE through the async API, on real tiers."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

import tierkv
from tests.cache.engine import (
    FULL_ONLY,
    PROMPT,
    Engine,
    Shelf,
    assert_loaded,
    open_cache,
    settled,
    tables,
    use,
)
from tierkv.blocks import Outcome
from tierkv.testing import FaultyBackend, Key, SlowBackend


@pytest.fixture(params=["file", "nvme"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    segment = "&segment=1MiB" if request.param == "nvme" else ""
    return f"{request.param}://{tmp_path}/kv?capacity=64MiB{segment}"


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_case_011_after_new_weights_nothing_older_is_there_not_even_after_a_restart(
    url: str, isolation: str
) -> None:
    one = Engine(1)
    async with open_cache(url, isolation=isolation) as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
        late = asyncio.ensure_future(cache.save([*PROMPT, *PROMPT], one.pages, tables()))
        await asyncio.sleep(0)
        await cache.rotate()
        await asyncio.wait([late])
        if late.exception() is None:  # saved under the old weights or the new, never both
            await cache.rotate()
        assert not await cache.lookup(PROMPT)
        assert cache.stats()["tier_blocks"] == cache.stats()["pinned_blocks"] == 0
    async with open_cache(url, isolation=isolation) as cache:
        assert not await cache.lookup(PROMPT)
        assert cache.stats()["tier_blocks"] == 0


async def test_case_011_a_save_that_was_being_written_does_not_appear_under_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SlowBackend(Shelf())
    use(monkeypatch, slow)
    one = Engine(1)
    async with open_cache("shelf://") as cache:
        slow.hold("write")
        await cache.save(PROMPT, one.pages, tables())
        await slow.held("write")
        rotate = asyncio.ensure_future(cache.rotate())
        await asyncio.sleep(0)
        assert not await cache.lookup(PROMPT)
        slow.release("write")
        await rotate
        assert not await cache.lookup(PROMPT)
        await settled(cache)
    async with open_cache("shelf://") as cache:
        assert cache.stats()["tier_blocks"] == 0


async def test_case_020_what_was_asked_for_in_vain_is_found_once_it_is_saved(url: str) -> None:
    one = Engine(1)
    async with open_cache(url) as cache:
        chain = cache.chain(PROMPT)
        for _ in range(3):
            assert not await cache.lookup(chain)
        await cache.save(PROMPT, one.pages, tables())
        assert (await cache.lookup(chain)).tokens == 64
        assert (await cache.lookup(cache.chain(PROMPT))).tokens == 64


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        (tierkv.Extras(adapter="A"), tierkv.Extras(adapter="B")),
        (tierkv.Extras(adapter="A@1"), tierkv.Extras(adapter="A@2")),
        (tierkv.Extras(adapter="A"), tierkv.Extras()),
        (tierkv.Extras(salt="s1"), tierkv.Extras(salt="s2")),
        (tierkv.Extras(salt="X"), tierkv.Extras(adapter="X")),
    ],
)
async def test_case_022_023_adapters_and_tenants_share_nothing_in_any_tier(
    url: str, saved: tierkv.Extras, asked: tierkv.Extras
) -> None:
    one, two = Engine(1), Engine(2)
    async with open_cache(url) as cache:
        await cache.save(PROMPT, one.pages, tables(), extras=saved)
        await cache.flush()
        assert not await cache.lookup(PROMPT, extras=asked), "pinned"
        await cache.save(PROMPT, two.pages, tables(), extras=asked)
        await cache.flush()
        assert cache.stats()["tier_blocks"] == 2 * 16
    async with open_cache(url) as cache:
        for engine, extras in ((one, saved), (two, asked)):
            three = Engine(3)
            hit = await cache.lookup(PROMPT, extras=extras)
            assert (hit.tokens, hit.tier_tokens) == (64, 64)
            await cache.load(hit, three.pages, tables())
            assert_loaded(engine, three, hit, tables(), tables())


async def test_case_074_block_3_of_8_fails_and_3_blocks_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = FaultyBackend(Shelf())
    use(monkeypatch, faulty)
    one, two = Engine(1, FULL_ONLY), Engine(2, FULL_ONLY)
    tokens = list(range(8 * 16 + 1))
    table = {"full": [*range(8)]}
    async with open_cache("shelf://", FULL_ONLY) as cache:
        await cache.save(tokens, one.pages, table)
        await cache.flush()
        third = cache.chain(tokens).hashes[3]
    async with open_cache("shelf://", FULL_ONLY) as cache:
        faulty.fail("read", Outcome.FAILED, where=lambda key: key[1] == third)
        before = two.block("full", 3)
        loaded = await cache.load(await cache.lookup(tokens), two.pages, table)
        assert loaded.tokens == 3 * 16
        assert loaded.failed == {"full": [3]}
        assert two.block("full", 3) == before
        assert not cache.stats()["load_corrupt_blocks"]


async def test_case_077_what_was_not_stored_is_listed_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = FaultyBackend(Shelf())
    use(monkeypatch, faulty)
    one, two = Engine(1, FULL_ONLY), Engine(2, FULL_ONLY)

    def one_in_ten(key: Key) -> bool:
        return key[1][0] % 10 == 0

    faulty.fail("write", Outcome.FAILED, where=one_in_ten)
    prompts = [[n * 100 + i for i in range(65)] for n in range(60)]
    table = {"full": [*range(4)]}
    async with open_cache("shelf://", FULL_ONLY, pinned=16 * 4096) as cache:
        for tokens in prompts:
            await cache.save(tokens, one.pages, table)
        await cache.flush()
    assert faulty.faults[0].hits
    async with open_cache("shelf://", FULL_ONLY) as cache:
        short = 0
        for tokens in prompts:
            hashes = cache.chain(tokens).hashes
            bad = [one_in_ten((0, h)) for h in hashes]
            hit = await cache.lookup(tokens)
            assert hit.tokens == 16 * ([*bad, True].index(True))
            short += any(bad)
            if hit:
                loaded = await cache.load(hit, two.pages, table)
                assert (loaded.tokens, loaded.failed) == (hit.tokens, {})
        assert short


async def test_case_109_a_hundred_saves_into_three_slots_are_counted_and_raise_nothing() -> None:
    one = Engine(1, FULL_ONLY)
    async with open_cache("", FULL_ONLY, pinned=3 * 4096) as cache:
        saves = [
            cache.save([n * 100 + i for i in range(17)], one.pages, {"full": [n % 40]})
            for n in range(100)
        ]
        results = await asyncio.gather(*saves)
        assert all(r.blocks + r.declined_blocks == 1 for r in results)
        assert cache.stats()["saved_blocks"] == sum(r.blocks for r in results)
        await settled(cache)


async def test_case_110_an_io_error_is_told_and_the_cache_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = FaultyBackend(Shelf())
    use(monkeypatch, faulty)
    one, two = Engine(1), Engine(2)
    async with open_cache("shelf://") as cache:
        await cache.save(PROMPT, one.pages, tables())
        await cache.flush()
    async with open_cache("shelf://") as cache:
        faulty.fail("read", OSError(errno.EIO, "disk"), times=1)
        hit = await cache.lookup(PROMPT)
        loaded = await cache.load(hit, two.pages, tables())
        assert loaded.failed == {name: list(blocks) for name, blocks in hit.blocks.items()}
        await cache.save(PROMPT, one.pages, tables())
        loaded = await cache.load(await cache.lookup(PROMPT), two.pages, tables())
        assert loaded.tokens == 64
        await settled(cache)
