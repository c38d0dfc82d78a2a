"""A prompt that is asked for again and again outlives several fillings of the disk, anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cache.engine import FULL_ONLY, Engine, assert_loaded, open_cache, tables
from tierkv_backends.nvme.quota import physical_bytes_sync

SEGMENT = 64 << 10
CAPACITY = 16 * SEGMENT
PROMPTS = 280
"""Four times what fits, of four blocks each."""


def prompt(number: int) -> list[int]:
    return [number * 1000 + i for i in range(65)]


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_hot_blocks_stay_while_cold_ones_come_and_go(tmp_path: Path, isolation: str) -> None:
    url = f"nvme://{tmp_path}/kv?capacity={CAPACITY}&segment={SEGMENT}"
    engine, other = Engine(1, FULL_ONLY), Engine(2, FULL_ONLY)
    here, there = tables(0, FULL_ONLY), tables(3, FULL_ONLY)
    hot = prompt(1)
    async with open_cache(url, FULL_ONLY, pinned="128KiB", isolation=isolation) as cache:
        await cache.save(hot, engine.pages, here)
        for number in range(2, PROMPTS):
            await cache.save(prompt(number), engine.pages, here)
            if number % 8 == 0:
                hit = await cache.lookup(hot)
                assert hit.tokens == 64, f"away after {number} prompts"
                loaded = await cache.load(hit, other.pages, there)
                assert not loaded.failed
                assert_loaded(other, engine, hit, there, here)
            if number % 16 == 0:
                await cache.flush()
                assert await asyncio.to_thread(physical_bytes_sync, tmp_path / "kv") <= CAPACITY
        assert (await cache.lookup(prompt(2))).tokens == 0
        while not cache.stats()["storage_tier_blocks_reinserted"]:  # noqa: ASYNC110 - a keeper tells later
            await asyncio.sleep(0.01)
        stats = cache.stats()
        assert stats["evicted_tier_blocks"] > 2 * 16 * 18
        assert stats["storage_tier_write_amplification"] > 1
        assert stats["storage_questions_waiting"] == 0
