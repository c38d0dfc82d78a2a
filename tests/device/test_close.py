"""A device that never ends its copies: whoever closes waits for a while, and gives nothing away."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch

from tests.cache.engine import PROMPT, Engine, open_cache, tables
from tierkv import Group, GroupKind, Layout, jobs
from tierkv.copier import Copier
from tierkv.device import Pages
from tierkv.streams import CpuDevice, Device, Mark, Queue
from tierkv.testing.fake_device import FakeDevice

LAYOUT = Layout((Group(name="kv", kind=GroupKind.FULL, block_tokens=16, block_bytes=4096),))


def begun(device: Device) -> Copier:
    """A copier with a save under way."""
    pages = Pages(LAYOUT, {"kv": [torch.zeros(4, 4096, dtype=torch.uint8)]})
    copier = Copier(torch.zeros(4 * 4096, dtype=torch.uint8), device)
    rows = np.zeros(4, np.uint16), np.arange(4, dtype=np.int32), np.arange(4) * 4096
    copier.save(pages, *rows, after=copier.mark())
    return copier


def test_close_says_whether_the_device_has_let_go(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(16 << 10)
    copier = begun(device)
    with caplog.at_level(logging.WARNING, "tierkv"):
        assert not copier.close(deadline_s=0.05)
    assert "has not ended its copies" in caplog.text
    device.finish()
    assert copier.close()
    assert begun(CpuDevice()).close(deadline_s=0.05)


class Broken(CpuDevice):
    """Reports an error for whatever was launched, as a GPU does after a fault."""

    class _Mark:
        def done(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

        def wait(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    def record(self, queue: Queue) -> Mark:
        return self._Mark()


def test_a_device_that_reports_an_error_may_still_write() -> None:
    assert not begun(Broken()).close(deadline_s=30.0)


async def test_a_cache_whose_device_hangs_closes_and_leaves_its_arena_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(16 << 10)
    monkeypatch.setattr("tierkv.jobs.device_for", lambda _: device)
    monkeypatch.setattr(jobs, "_HUNG", [])
    cache = open_cache("memory://")
    await cache.aopen()
    saving = asyncio.ensure_future(cache.save(PROMPT, Engine(1).pages, tables()))
    while not device.holds_work(Queue.OUT):
        await asyncio.get_running_loop().run_in_executor(cache._jobs._thread, lambda: None)
    await cache.aclose(deadline_s=0.05)
    assert cache._arena is not None
    assert len(cache._arena.view) == 1 << 20, "the device may write there still"
    assert [cache._jobs] == jobs._HUNG
    device.finish()
    await asyncio.wait({saving})
    assert saving.exception() is not None or saving.result() is not None
