"""Cases of kind RANK through the async API: memory of each rank's own, and a loop that goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cache.engine import PROMPT, Engine, assert_loaded, open_cache, tables
from tierkv.copier import Copier, Copy


async def test_case_116_each_rank_has_memory_of_its_own_and_needs_no_other_to_open(
    tmp_path: Path,
) -> None:
    before = set(os.listdir("/dev/shm"))
    url = f"nvme://{tmp_path}/kv?capacity=64MiB&segment=1MiB"
    async with open_cache(url, rank=1) as one:  # rank 0 is on another node, and is not there yet
        engine = Engine(1)
        await one.save(PROMPT, engine.pages, tables())
        async with open_cache(url, rank=0) as zero:
            assert one._arena is not None and zero._arena is not None
            mine, other = (os.fstat(c._arena.fd) for c in (one, zero) if c._arena)
            assert mine.st_ino != other.st_ino
            assert not await zero.lookup(PROMPT), "what another rank holds is not this one's"
        hit, back = await one.lookup(PROMPT), Engine(2)
        await one.load(hit, back.pages, tables(1))
        assert_loaded(engine, back, hit, tables(), tables(1))
    assert set(os.listdir("/dev/shm")) == before, "nothing is shared by a name"


@pytest.mark.parametrize("op", ["save", "load"])
async def test_case_116_the_loop_goes_on_while_blocks_are_copied(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()
    real = getattr(Copier, op)

    def slow(copier: Copier, *args: Any, **more: Any) -> Copy:
        assert seen.wait(30), "the loop stood still during a copy"
        copy: Copy = real(copier, *args, **more)
        return copy

    async def turns() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        seen.set()

    engine = Engine(1)
    async with open_cache("memory://") as cache:
        if op == "load":
            await cache.save(PROMPT, engine.pages, tables())
        monkeypatch.setattr(Copier, op, slow)
        turning = asyncio.ensure_future(turns())
        if op == "save":
            saved = await cache.save(PROMPT, engine.pages, tables())
            assert saved.blocks > 0
        else:
            loaded = await cache.load(await cache.lookup(PROMPT), engine.pages, tables())
            assert loaded.tokens == 64
        await turning
