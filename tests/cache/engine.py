"""A pretended engine with real pages, and words for what tests say to a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tierkv import Group, GroupKind, Layout
from tierkv.backend import Backend
from tierkv_backends.memory import MemoryBackend

LAYOUT = Layout(
    (
        Group(name="full", kind=GroupKind.FULL, block_tokens=16, block_bytes=3 * 1000),
        Group(
            name="swa",
            kind=GroupKind.SLIDING_WINDOW,
            block_tokens=4,
            window_tokens=8,
            block_bytes=512,
        ),
        Group(name="state", kind=GroupKind.RECURRENT, block_tokens=16, block_bytes=2048),
    )
)
FULL_ONLY = Layout(
    (Group(name="full", kind=GroupKind.FULL, block_tokens=16, block_bytes=3 * 1000),)
)
PROMPT = list(range(70))
NS = "model@rev1"
BLOCKS = 40

Tables = dict[str, list[int | None]]


class Engine:
    """Pages of a pretended engine: strided views into one storage, filled at random."""

    def __init__(self, seed: int, layout: Layout = LAYOUT) -> None:
        rng = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng)

        tensors = {
            "full": [rand(BLOCKS, 1200)[:, 100:1100] for _ in range(3)],  # padded pages
            "swa": [rand(2, BLOCKS, 256)[0], rand(BLOCKS, 64, 8).transpose(1, 2)[:, :4]],
            "state": [rand(BLOCKS, 512).view(torch.float32), rand(BLOCKS, 3, 512)],
        }
        self.tensors = {g.name: tensors[g.name] for g in layout.groups}
        self.pages = tierkv.Pages(layout, self.tensors)

    def block(self, group: str, block_id: int) -> bytes:
        return b"".join(
            t[block_id].contiguous().view(torch.uint8).numpy().tobytes()
            for t in self.tensors[group]
        )

    def contents(self) -> dict[tuple[str, int], bytes]:
        """Every block of every group."""
        return {(n, i): self.block(n, i) for n in self.tensors for i in range(BLOCKS)}


def tables(shift: int = 0, layout: Layout = LAYOUT) -> Tables:
    made: Tables = {
        "full": [(i * 7 + shift) % BLOCKS for i in range(4)],
        "swa": [(i * 3 + shift) % BLOCKS for i in range(17)],
        "state": [(i * 5 + 1 + shift) % BLOCKS for i in range(4)],
    }
    return {g.name: made[g.name] for g in layout.groups}


def open_cache(url: str, layout: Layout = LAYOUT, **options: Any) -> tierkv.Cache:
    return tierkv.open(
        url, layout=layout, **{"pinned": "1MiB", "namespace": NS, "policy": "dense", **options}
    )


def assert_loaded(
    ours: Engine, theirs: Engine, hit: tierkv.PrefixHit, a: Tables, b: Tables
) -> None:
    for name, blocks in hit.blocks.items():
        for i in blocks:
            mine, other = a[name][i], b[name][i]
            assert mine is not None and other is not None
            assert ours.block(name, mine) == theirs.block(name, other), (name, i)


async def settled(cache: tierkv.Cache) -> None:
    """Return once nothing moves any more; then everything must be accounted for."""
    ledger, books = cache._ledger, cache._ledger._books
    while ledger.moves_in_flight or ledger._flights._by_id or cache._jobs._running:  # noqa: ASYNC110 - no event says all of it
        await asyncio.sleep(0)
    stats = cache.stats()
    assert (stats["leased_blocks"], stats["moves_in_flight"]) == (0, 0)
    assert not books.index.leases.any()
    assert not books.index.tier_leases.any()
    assert ledger._flights.load_bytes == ledger._flights.save_bytes == 0
    pinned = np.flatnonzero(books.index.pinned)
    slots = books.room.slots
    assert books.room.slot_bytes(pinned) == slots.capacity_bytes - slots.free_bytes
    assert not cache._loads
    assert not cache._released_early
    assert all(owner.startswith("kept") for owner in ledger._requests)


class Shelf(MemoryBackend):
    """A memory tier that keeps its blocks when it is closed, as a disk does."""

    async def close(self) -> None:
        """Keep everything."""


class Inline(ThreadPoolExecutor):
    """Does the work at once, in the caller's thread: every run takes the same turns of the loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it now."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as exc:  # noqa: BLE001 - an executor hands every error on
            done.set_exception(exc)
        return done


def use(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """Caches that are opened from now on, in this process, get this very backend."""
    monkeypatch.setattr("tierkv.local.make_backend", lambda url: backend)
