"""Namespaces and backends that do not keep them apart: nothing of another namespace is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierkv
from tierkv import Group, GroupKind, Layout, local
from tierkv.backend import Backend, BackendContext
from tierkv.urls import TierURL
from tierkv_backends.memory import MemoryBackend

LAYOUT = Layout((Group(name="a", kind=GroupKind.FULL, block_tokens=4, block_bytes=5000),))
TOKENS = list(range(21))


class Careless(MemoryBackend):
    """Keeps one heap of blocks for everyone, whatever the namespace."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.first: BackendContext | None = None

    async def open(self, context: BackendContext) -> None:
        if self.first is None:
            self.first = context
            await super().open(context)

    async def close(self) -> None:
        """Stays as it is, for the next namespace."""


async def test_case_007_a_backend_that_ignores_the_namespace_serves_nothing_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = Careless.from_url(TierURL.parse("memory://?capacity=1MiB"))
    assert isinstance(shared, Careless)

    def one_for_all(url: str | TierURL) -> Backend:
        return shared

    monkeypatch.setattr(local, "make_backend", one_for_all)
    pages = torch.arange(8 * 5000, dtype=torch.int64).to(torch.uint8).reshape(8, 5000)

    def open_as(namespace: str) -> tierkv.Cache:
        return tierkv.open(
            "memory://", layout=LAYOUT, namespace=namespace, pinned="1MiB", policy="dense"
        )

    async with open_as("model@bf16") as cache:
        await cache.save(TOKENS, {"a": [pages]}, {"a": [0, 1, 2, 3, 4]})
        await cache.flush()
    mine = torch.zeros_like(pages)
    async with open_as("model@fp8") as cache:
        hit = await cache.lookup(TOKENS)
        assert hit.tokens == 20  # the careless backend claims to have it
        loaded = await cache.load(hit, {"a": [mine]}, {"a": [0, 1, 2, 3, 4]})
        assert loaded.tokens == 0
        assert loaded.failed == {"a": [0, 1, 2, 3, 4]}
        assert not mine.any()
        assert cache.stats()["load_corrupt_blocks"] == 5
        assert not await cache.lookup(TOKENS)
