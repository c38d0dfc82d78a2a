"""The main job on this machine: save through pinned RAM and NVMe, restart, load, compare all bytes.

The prompts have DeepSeek-V4-Flash's group structure (two windows, one full group, two compressor
states), with blocks scaled down so that the demo fits and ends in seconds. Their contents are
derived from the block hashes, so every byte that comes back can be checked without keeping a copy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tierkv import reach
from tierkv.answers import PrefixHit
from tierkv.cache import Cache
from tierkv.device import Pages
from tierkv.hashing import HashChain
from tierkv.layout import Layout
from tierkv.opening import open as open_cache
from tierkv.presets import load_preset

SCALE: Final = 16
"""Blocks are this many times smaller than the model's: 1 MiB becomes 64 KiB."""

PROMPT_TOKENS: Final = 8192
SHARED_TOKENS: Final = 2048
PROMPTS: Final = 12
POLICY: Final = "dense"
PINNED: Final = "32MiB"
"""Smaller than what the prompts store, so that RAM alone does not hold them."""


@dataclass(slots=True)
class _Timing:
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, started: float) -> None:
        self.nbytes += nbytes
        self.seconds += time.perf_counter() - started

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / 1e9 / self.seconds if self.seconds else 0.0


def demo_layout() -> Layout:
    """DeepSeek-V4-Flash with blocks scaled down by `SCALE`."""
    real = load_preset("dsv4-flash")
    groups = tuple(
        dataclasses.replace(g, block_bytes=g.block_bytes // SCALE, padded_block_bytes=0)
        for g in real.groups
    )
    return Layout(groups, real.hash_block_tokens, real.alignment_tokens)


def run_demo(directory: Path) -> dict[str, Any]:
    """Run the demo in `directory` (created files stay there) and say what happened.

    Returns the JSON fields of ``tierkv demo``. Rates are in 10^9 bytes per second of payload,
    `save` up to what survives a kill, `load` from NVMe after the restart.
    """
    return asyncio.run(_run(directory))


async def _run(directory: Path) -> dict[str, Any]:
    layout = demo_layout()
    url = f"nvme://{directory}/kv?capacity=1GiB&segment=32MiB"
    prompts = _prompts()
    engine = _Engine(layout)
    saves, loads = _Timing(), _Timing()

    def open_demo() -> Cache:
        return open_cache(url, layout=layout, namespace="demo@1", pinned=PINNED, policy=POLICY)

    async with open_demo() as cache:
        chains = [cache.chain(p) for p in prompts]
        for chain in chains:
            tables = engine.prefill(chain)
            started = time.perf_counter()
            saved = await cache.save(chain, engine.pages, tables)
            await cache.flush(deadline_s=60)
            saves.add(saved.nbytes, started)
        hits = [await _reuse(cache, chain, engine, _Timing()) for chain in chains]
        before = cache.stats()
    async with open_demo() as cache:
        again = [await _reuse(cache, chain, engine, loads) for chain in chains]
    hit_tokens, wrong = (sum(column) for column in zip(*hits, strict=True))
    hit_after, wrong_after = (sum(column) for column in zip(*again, strict=True))
    tokens = sum(len(p) for p in prompts)
    return {
        "ok": bool(hit_tokens and hit_tokens == hit_after and not wrong + wrong_after),
        "prompts": len(prompts),
        "tokens": tokens,
        "hit_tokens": hit_tokens,
        "hit_tokens_after_restart": hit_after,
        "bytes_stored": before["stored_bytes"],
        "bytes_skipped": before["skipped_bytes"],
        "bytes_per_token": round(before["stored_bytes"] / tokens, 1),
        "save_gb_per_s": round(saves.gb_per_s, 3),
        "load_gb_per_s": round(loads.gb_per_s, 3),
        "mismatched_blocks": wrong + wrong_after,
        "scale": SCALE,
        "policy": POLICY,
    }


def _prompts() -> list[list[int]]:
    """Prompts with one beginning (a system prompt) and ends of their own."""
    rng = np.random.default_rng(4)
    shared = rng.integers(0, 129_280, SHARED_TOKENS).tolist()
    return [
        shared + rng.integers(0, 129_280, PROMPT_TOKENS - SHARED_TOKENS + 17 * i).tolist()
        for i in range(PROMPTS)
    ]


async def _reuse(
    cache: Cache, chain: HashChain, engine: _Engine, timing: _Timing
) -> tuple[int, int]:
    """Look a prompt up and load it into cleared pages: hit tokens, blocks with a wrong byte."""
    engine.clear()
    hit = await cache.lookup(chain)
    if not hit:
        return 0, 0
    tables = engine.place(hit)
    started = time.perf_counter()
    loaded = await cache.load(hit, engine.pages, tables)
    timing.add(loaded.nbytes, started)
    return loaded.tokens, engine.mismatches(chain, hit, tables)


class _Engine:
    """Pages of a pretended engine: enough for one prompt's kept blocks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        kept = reach.keep(layout, reach.DENSE, PROMPT_TOKENS + 17 * PROMPTS)
        counts = [int((r[:, 1] - r[:, 0]).sum()) + 1 for r in kept]
        self._tensors = [
            torch.zeros((n, g.block_bytes), dtype=torch.uint8)
            for n, g in zip(counts, layout.groups, strict=True)
        ]
        self.pages = Pages(
            layout, {g.name: [t] for g, t in zip(layout.groups, self._tensors, strict=True)}
        )

    def clear(self) -> None:
        """Forget what the pages hold."""
        for tensor in self._tensors:
            tensor.zero_()

    def prefill(self, chain: HashChain) -> dict[str, list[int | None]]:
        """Fill pages with a prompt's blocks, as an engine would; blocks nobody reads get none."""
        tables: dict[str, list[int | None]] = {}
        for g, ranges in enumerate(reach.keep(self._layout, reach.DENSE, chain.tokens)):
            table: list[int | None] = [None] * (int(ranges[-1, 1]) if len(ranges) else 0)
            wanted = [i for first, end in ranges.tolist() for i in range(first, end)]
            for page, block in enumerate(wanted):
                table[block] = page
                self._tensors[g][page] = torch.from_numpy(self._bytes(chain, g, block))
            tables[self._layout.groups[g].name] = table
        return tables

    def place(self, hit: PrefixHit) -> dict[str, list[int | None]]:
        """Block tables for a load: page n for the n-th block of each group."""
        return {
            name: [*[None] * blocks.start, *range(len(blocks))]
            for name, blocks in hit.blocks.items()
        }

    def mismatches(
        self, chain: HashChain, hit: PrefixHit, tables: dict[str, list[int | None]]
    ) -> int:
        """Blocks of the hit whose pages hold anything but their own bytes."""
        wrong = 0
        for name, blocks in hit.blocks.items():
            g = self._layout.index_of(name)
            for block in blocks:
                page = tables[name][block]
                held = self._tensors[g][page].numpy()
                wrong += not np.array_equal(held, self._bytes(chain, g, block))
        return wrong

    def _bytes(
        self, chain: HashChain, group: int, block: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        name = chain.hashes[reach.block_hash_index(self._layout, group, block)]
        seed: Sequence[int] = [group, int.from_bytes(name, "little")]
        nbytes = self._layout.groups[group].block_bytes
        return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, nbytes, np.uint8)
