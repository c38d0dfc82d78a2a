"""The async API over a device whose copies end later: nothing is done, free or served before."""

from __future__ import annotations

import asyncio

import pytest

import tierkv
from tests.cache.engine import PROMPT, Engine, assert_loaded, open_cache, settled, tables
from tierkv.streams import Queue
from tierkv.testing.fake_device import FakeDevice

OTHER = [*range(1000, 1070)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Every cache opened from now on copies on this device."""
    made = FakeDevice(16 << 10)
    monkeypatch.setattr("tierkv.jobs.device_for", lambda _: made)
    return made


async def launched(cache: tierkv.Cache, device: FakeDevice) -> None:
    """Return once a copy was launched, all of it."""
    while not device.holds_work(Queue.OUT) and not device.holds_work(Queue.SCATTER):
        await turn(cache)
    await turn(cache)


async def turn(cache: tierkv.Cache) -> None:
    """Return when the launching thread has done what it has to do by now: it does one at a time."""
    await asyncio.get_running_loop().run_in_executor(cache._jobs._thread, lambda: None)


async def test_a_save_is_kept_once_its_last_copy_has_ended_and_not_before(
    device: FakeDevice,
) -> None:
    one, two = Engine(1), Engine(2)
    async with open_cache("memory://") as cache:
        saving = asyncio.ensure_future(cache.save(PROMPT, one.pages, tables()))
        await launched(cache, device)
        while device.step(Queue.GATHER):
            pass
        assert not await cache.lookup(PROMPT), "the bytes are in staging"
        assert cache.stats()["leased_blocks"] > 0
        assert not saving.done()
        device.finish()
        await saving
        hit = await cache.lookup(PROMPT)
        assert hit.tokens == 64
        loading = asyncio.ensure_future(cache.load(hit, two.pages, tables(1)))
        await launched(cache, device)
        leased = cache.stats()["leased_blocks"]
        device.step(Queue.IN)
        await asyncio.sleep(0)
        assert not loading.done()
        assert cache.stats()["leased_blocks"] == leased > 0
        device.finish()
        await loading
        assert_loaded(one, two, hit, tables(), tables(1))
        await settled(cache)


async def test_a_save_starts_behind_what_the_caller_had_launched_when_it_asked(
    device: FakeDevice,
) -> None:
    one, two = Engine(1), Engine(2)

    def compute() -> None:
        for name, pools in one.tensors.items():
            for mine, other in zip(pools, two.tensors[name], strict=True):
                mine.copy_(other)

    async with open_cache("memory://") as cache:
        device.run(Queue.ENGINE, compute)
        saving = asyncio.ensure_future(cache.save(PROMPT, one.pages, tables()))
        await launched(cache, device)
        device.finish([Queue.GATHER, Queue.OUT, Queue.ENGINE])
        await saving
        hit, three = await cache.lookup(PROMPT), Engine(3)
        loading = asyncio.ensure_future(cache.load(hit, three.pages, tables()))
        await launched(cache, device)
        device.finish()
        await loading
        assert_loaded(two, three, hit, tables(), tables())


@pytest.mark.parametrize("what", ["save", "load"])
async def test_who_is_cancelled_in_mid_copy_waits_until_the_device_leaves_its_pages_alone(
    device: FakeDevice, what: str
) -> None:
    one, two = Engine(1), Engine(2)
    async with open_cache("memory://") as cache:
        saving = asyncio.ensure_future(cache.save(PROMPT, one.pages, tables()))
        await launched(cache, device)
        device.finish()
        await saving
        hit = await cache.lookup(PROMPT)
        if what == "load":
            task = asyncio.ensure_future(cache.load(hit, two.pages, tables()))
            await launched(cache, device)
        else:
            hit.release()
            task = asyncio.ensure_future(cache.save(OTHER, two.pages, tables()))
            await launched(cache, device)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done(), "the device may still touch the pages"
        assert cache.stats()["leased_blocks"] > 0
        device.finish()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(cache)
