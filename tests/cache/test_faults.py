"""A tier that fails, lies or hangs under a cache: what cannot be had is said, never passed off."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

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
from tests.core.oracle import Oracle
from tierkv.blocks import Outcome
from tierkv.layout import Layout
from tierkv.testing import Fault, FaultyBackend, Key, Lie, SlowBackend

pytestmark = pytest.mark.usefixtures("blockbuster")

FULL, SWA, STATE = 0, 1, 2


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyBackend:
    backend = FaultyBackend(Shelf())
    use(monkeypatch, backend)
    return backend


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowBackend:
    backend = SlowBackend(Shelf(), stubborn=True)
    use(monkeypatch, backend)
    return backend


async def store(engine: Engine, layout: Layout | None = None) -> None:
    """Have the tier keep PROMPT, in an earlier life."""
    options = {} if layout is None else {"layout": layout}
    async with open_cache("shelf://", **options) as cache:
        await cache.save(PROMPT, engine.pages, tables())
        assert await cache.flush() == tierkv.Flushed(0)


def block(cache: tierkv.Cache, group: int, index: int) -> Callable[[Key], bool]:
    """Whether a key is this block of PROMPT."""
    layout = cache.layout
    at = (index + 1) * layout.groups[group].block_tokens // layout.hash_block_tokens - 1
    wanted = (group, cache.chain(PROMPT).hashes[at])
    return lambda key: (key[0], bytes(key[1])) == wanted


PROVEN_GONE = [Outcome.MISSING, Outcome.CORRUPT, Lie.FLIP_BIT, Lie.SHORT, Lie.DROP]
TRANSIENT = [Outcome.FAILED, OSError(errno.EIO, "the disk has a bad day")]


@pytest.mark.parametrize("how", [*PROVEN_GONE, TRANSIENT[0]])
@pytest.mark.parametrize("index", range(4))
async def test_a_block_that_fails_ends_the_prefix_and_leaves_its_page_alone(
    faulty: FaultyBackend, how: Outcome | Lie, index: int
) -> None:
    one, two = Engine(1, FULL_ONLY), Engine(2, FULL_ONLY)
    names = tables(0, FULL_ONLY)
    async with open_cache("shelf://", FULL_ONLY) as cache:
        await cache.save(PROMPT, one.pages, names)
        await cache.flush()
    async with open_cache("shelf://", FULL_ONLY) as cache:
        fault = faulty.fail("read", how, where=block(cache, FULL, index))
        before = two.contents()
        hit = await cache.lookup(PROMPT)
        loaded = await cache.load(hit, two.pages, names)
        assert fault.hits == 1
        assert loaded == tierkv.Loaded(16 * index, 3, 3 * 3000, {"full": [index]})
        ours, theirs = one.contents(), two.contents()
        for i, page in enumerate(names["full"]):
            at = ("full", page or 0)
            assert theirs[at] == (before[at] if i == index else ours[at])
        await settled(cache)
        faulty.heal()
        again = await cache.lookup(PROMPT)
        assert again.tokens == (64 if how in TRANSIENT else 16 * index)
        again.release()
        await cache.save(PROMPT, one.pages, names)  # the engine has computed it again
        hit = await cache.lookup(PROMPT)
        assert (await cache.load(hit, two.pages, names)).tokens == hit.tokens == 64
        assert_loaded(one, two, hit, names, names)
        await settled(cache)


@pytest.mark.parametrize("how", [Lie.FLIP_BIT, Outcome.FAILED])
@pytest.mark.parametrize(
    ("group", "index"), [(FULL, 0), (FULL, 3), (SWA, 14), (SWA, 15), (STATE, 3)]
)
async def test_what_is_left_of_a_hybrid_hit_is_what_the_oracle_says(
    faulty: FaultyBackend, how: Outcome | Lie, group: int, index: int
) -> None:
    one, two = Engine(1), Engine(2)
    await store(one)
    async with open_cache("shelf://") as cache:
        oracle, name = Oracle.of(cache.layout), cache.layout.groups[group].name
        faulty.fail("read", how, where=block(cache, group, index))
        hit = await cache.lookup(PROMPT)
        loaded = await cache.load(hit, two.pages, tables())
        assert loaded.failed == {name: [index]}
        there = {(cache.layout.index_of(n), i) for n, blocks in hit.blocks.items() for i in blocks}
        assert loaded.tokens == oracle.hit(65, there - {(group, index)})
        faulty.heal()
        after = await cache.lookup(PROMPT)
        everything = oracle.everything(len(PROMPT))
        if how is Lie.FLIP_BIT:
            everything -= {(group, index)}
        assert after.tokens == oracle.hit(len(PROMPT), everything)
        if after:
            loaded = await cache.load(after, two.pages, tables())
            assert (loaded.tokens, loaded.failed) == (after.tokens, {})
            assert_loaded(one, two, after, tables(), tables())
        await settled(cache)


async def test_a_read_that_raises_is_a_miss_and_nothing_is_forgotten(
    faulty: FaultyBackend,
) -> None:
    one, two = Engine(1), Engine(2)
    await store(one)
    async with open_cache("shelf://") as cache:
        faulty.fail("read", OSError(errno.EIO, "the disk has a bad day"), times=1)
        before = two.contents()
        loaded = await cache.load(await cache.lookup(PROMPT), two.pages, tables())
        assert (loaded.tokens, loaded.blocks, loaded.nbytes) == (0, 0, 0)
        assert loaded.failed == {"full": [0, 1, 2, 3], "swa": [14, 15], "state": [3]}
        assert two.contents() == before
        await settled(cache)
        hit = await cache.lookup(PROMPT)
        assert (await cache.load(hit, two.pages, tables())).tokens == 64
        assert_loaded(one, two, hit, tables(), tables())


async def test_a_failed_load_falls_back_to_what_the_caller_holds(faulty: FaultyBackend) -> None:
    one, two = Engine(1), Engine(2)
    await store(one)
    async with open_cache("shelf://") as cache:
        faulty.fail("read", Outcome.FAILED)
        hit = await cache.lookup(PROMPT, local_tokens=32)
        loaded = await cache.load(hit, two.pages, tables())
        assert loaded.tokens == 32
        assert loaded.failed == {"full": [2, 3], "swa": [14, 15], "state": [3]}


async def test_a_load_that_hangs_ends_in_time_and_its_slots_wait_for_the_tier(
    slow: SlowBackend,
) -> None:
    one, two = Engine(1), Engine(2)
    await store(one)
    async with open_cache("shelf://", read_timeout_s=0.05) as cache:
        slow.hold("read")
        before = two.contents()
        loaded = await cache.load(await cache.lookup(PROMPT), two.pages, tables())
        assert loaded.tokens == 0
        assert loaded.failed == {"full": [0, 1, 2, 3], "swa": [14, 15], "state": [3]}
        stats = cache.stats()
        assert stats["moves_in_flight"] == 0
        assert stats["pinned_bytes"] == 7 * 4096, "a late read may still write there"
        slow.release("read")
        await settled(cache)
        assert two.contents() == before
        assert cache.stats()["pinned_bytes"] == 0
        hit = await cache.lookup(PROMPT)
        assert (await cache.load(hit, two.pages, tables())).tokens == 64
        assert_loaded(one, two, hit, tables(), tables())


async def test_closing_does_not_wait_for_a_load_that_hangs(slow: SlowBackend) -> None:
    one, two = Engine(1), Engine(2)
    await store(one)
    cache = open_cache("shelf://", read_timeout_s=60)
    await cache.aopen()
    slow.hold("read")
    hit = await cache.lookup(PROMPT)
    load = asyncio.ensure_future(cache.load(hit, two.pages, tables()))
    waiting = asyncio.ensure_future(cache.lookup(PROMPT))
    await slow.held("read")
    await cache.aclose(deadline_s=0.05)
    assert (await load).tokens == 0
    with pytest.raises(tierkv.CacheClosedError):
        await waiting
    slow.release("read")


async def test_closing_does_not_wait_for_a_save_that_hangs(slow: SlowBackend) -> None:
    one = Engine(1)
    cache = open_cache("shelf://", pinned=8 * 4096, write_timeout_s=60)
    await cache.aopen()
    slow.hold("write")
    save = asyncio.ensure_future(cache.save(PROMPT, one.pages, tables()))
    await slow.held("write")
    flush = asyncio.ensure_future(cache.flush())
    await asyncio.sleep(0)
    await cache.aclose(deadline_s=0.05)
    for task in (save, flush):
        with pytest.raises(tierkv.CacheClosedError):
            await task
    slow.release("write")


@pytest.mark.parametrize("how", [Outcome.DECLINED, Outcome.FAILED, OSError(errno.ENOSPC, "full")])
async def test_flush_says_what_the_tier_did_not_take_and_tries_once_more(
    faulty: FaultyBackend, how: Outcome | OSError
) -> None:
    one = Engine(1)
    async with open_cache("shelf://") as cache:
        faulty.fail("write", how)
        saved = await cache.save(PROMPT, one.pages, tables())
        assert (saved.blocks, saved.declined_blocks) == (16, 0)
        assert await cache.flush() == tierkv.Flushed(16)
        assert (await cache.lookup(PROMPT)).tokens == 64, "RAM has it"
        faulty.heal()
        assert await cache.flush() == tierkv.Flushed(0)
        assert cache.stats()["tier_blocks"] == 16
    async with open_cache("shelf://") as cache:
        assert (await cache.lookup(PROMPT)).tokens == 64


async def test_flush_offers_everything_that_is_not_stored_even_if_it_fills_the_arena(
    faulty: FaultyBackend,
) -> None:
    one = Engine(1)
    async with open_cache("shelf://", pinned=16 * 4096) as cache:
        fault = faulty.fail("write", Outcome.FAILED)
        saved = await cache.save(PROMPT, one.pages, tables())
        assert (saved.blocks, saved.declined_blocks) == (16, 0)
        assert fault.hits
        faulty.heal()
        assert await cache.flush() == tierkv.Flushed(0)


async def test_a_tier_that_loses_blocks_is_found_out_one_load_later(
    faulty: FaultyBackend,
) -> None:
    one, two = Engine(1), Engine(2)
    fault: Fault = faulty.fail("write", Lie.FLIP_BIT, where=lambda key: key[0] == SWA)
    await store(one)
    assert fault.hits == 1
    async with open_cache("shelf://") as cache:
        loaded = await cache.load(await cache.lookup(PROMPT), two.pages, tables())
        assert (loaded.tokens, loaded.failed) == (0, {"swa": [14, 15]})
        assert (await cache.lookup(PROMPT)).tokens == 48
        assert cache.stats()["load_corrupt_blocks"] == 2


async def test_flush_and_rotate_raise_at_their_deadline_and_what_they_began_goes_on(
    slow: SlowBackend,
) -> None:
    one = Engine(1)
    async with open_cache("shelf://") as cache:
        slow.hold("write")
        await cache.save(PROMPT, one.pages, tables())
        with pytest.raises(tierkv.DeadlineError, match="flush: 1 moves are not stored after 0"):
            await cache.flush(deadline_s=0)
        slow.release("write")
        assert await cache.flush() == tierkv.Flushed(0)
        slow.hold("clear")
        with pytest.raises(tierkv.DeadlineError, match="rotate: the tier has not confirmed"):
            await cache.rotate(deadline_s=0)
        assert not await cache.lookup(PROMPT)
        await slow.held("clear")
        slow.release("clear")
        await cache.rotate()
        await settled(cache)
        assert cache.stats()["tier_blocks"] == 0


async def test_the_arenas_failure_to_copy_is_the_callers_and_the_books_are_settled(
    faulty: FaultyBackend,
) -> None:
    one = Engine(1)
    async with open_cache("shelf://") as cache:
        beyond = {name: [99 + i for i, _ in enumerate(ids)] for name, ids in tables().items()}
        with pytest.raises(ValueError, match="are outside"):
            await cache.save(PROMPT, one.pages, beyond)
        await settled(cache)
        assert not await cache.lookup(PROMPT)
        await cache.save(PROMPT, one.pages, tables())
        hit = await cache.lookup(PROMPT)
        with pytest.raises(ValueError, match="are outside"):
            await cache.load(hit, one.pages, beyond)
        await settled(cache)
        assert (await cache.lookup(PROMPT)).tokens == 64
