"""Cases of kind HASH that need a store: equal names in other processes, and names that collide."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tierkv
from tierkv import Group, GroupKind, Layout, local
from tierkv.backend import Backend, BlockBatch, Outcomes
from tierkv.blocks import Keys
from tierkv.urls import TierURL
from tierkv_backends.memory import MemoryBackend

LAYOUT = Layout((Group(name="a", kind=GroupKind.FULL, block_tokens=4, block_bytes=5000),))

STORE = """
import asyncio, sys, torch, tierkv
from tierkv import Group, GroupKind, Layout
layout = Layout((Group(name="a", kind=GroupKind.FULL, block_tokens=4, block_bytes=5000),))
async def main():
    async with tierkv.open(sys.argv[1], layout=layout, namespace="m@1", pinned="1MiB") as cache:
        pages = {"a": [torch.full((6, 5000), 7, dtype=torch.uint8)]}
        await cache.save(list(range(25)), pages, {"a": list(range(6))})
        assert (await cache.flush()).unstored_blocks == 0
asyncio.run(main())
"""


@pytest.mark.parametrize("seed", ["0", "12345"])
async def test_case_017_what_one_process_stored_another_finds(tmp_path: Path, seed: str) -> None:
    url = f"file://{tmp_path}/kv?capacity=1MiB"
    env = os.environ | {"PYTHONHASHSEED": seed}
    child = [sys.executable, "-c", STORE, url]
    await asyncio.to_thread(subprocess.run, child, check=True, env=env, timeout=100)
    async with tierkv.open(url, layout=LAYOUT, namespace="m@1", pinned="1MiB") as cache:
        hit = await cache.lookup(range(25))
        assert hit.tokens == 24
        mine = torch.zeros((6, 5000), dtype=torch.uint8)
        assert (await cache.load(hit, {"a": [mine]}, {"a": [*range(6)]})).tokens == 24
        assert bool((mine == 7).all())


class EightBits(MemoryBackend):
    """Names blocks by the first byte of their hash alone, so that many collide."""

    @staticmethod
    def _short(keys: Keys) -> Keys:
        return Keys.of((g, h[:1]) for g, h in keys)

    async def write(self, batch: BlockBatch) -> Outcomes:
        return await super().write(replace(batch, keys=self._short(batch.keys)))

    async def read(self, batch: BlockBatch) -> Outcomes:
        return await super().read(replace(batch, keys=self._short(batch.keys)))

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        return await super().contains(self._short(keys))

    async def delete(self, keys: Keys) -> None:
        await super().delete(self._short(keys))


async def test_case_027_a_block_under_a_colliding_name_is_a_miss_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eight_bits(url: str | TierURL) -> Backend:
        return EightBits.from_url(TierURL.parse("memory://?capacity=64MiB"))

    monkeypatch.setattr(local, "make_backend", eight_bits)
    pages = torch.arange(600 * 5000, dtype=torch.int64).to(torch.uint8).reshape(600, 5000)
    async with tierkv.open(
        "memory://", layout=LAYOUT, namespace="m@1", pinned="64KiB", policy="dense"
    ) as cache:
        prompts = [range(n * 1000, n * 1000 + 5) for n in range(600)]
        for n, prompt in enumerate(prompts):  # one block each: 600 blocks under 256 names
            await cache.save(prompt, {"a": [pages]}, {"a": [n]})
            await cache.flush()
        right = 0
        for n, prompt in enumerate(prompts):
            hit = await cache.lookup(prompt)
            if hit:
                mine = torch.zeros((1, 5000), dtype=torch.uint8)
                loaded = await cache.load(hit, {"a": [mine]}, {"a": [0]})
                right += loaded.tokens == 4
                assert torch.equal(mine[0], pages[n]) if loaded.tokens else not mine.any()
        assert 0 < right < 600
        assert cache.stats()["load_corrupt_blocks"] > 0
