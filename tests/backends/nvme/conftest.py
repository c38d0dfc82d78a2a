"""Small nvme stores for tests, and what a mover would make of their answers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tierkv.blocks import Outcome
from tierkv.record import verify_sync
from tierkv.testing import Key, empty_batch, make_context
from tierkv.urls import TierURL
from tierkv_backends.nvme import NvmeBackend

SMALL = "capacity=2MiB&segment=64KiB"

Opened = Callable[..., AbstractAsyncContextManager[NvmeBackend]]


@contextlib.asynccontextmanager
async def _opened(
    root: Path, options: str = SMALL, *, block_bytes: tuple[int, ...] = (4096,), **context: Any
) -> AsyncIterator[NvmeBackend]:
    backend = NvmeBackend.from_url(TierURL.parse(f"nvme://{root}?{options}"))
    await backend.open(make_context(block_bytes, **context))
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture
def opened() -> Opened:
    """`async with opened(root, "capacity=…", block_bytes=…, rank=…) as backend`."""
    return _opened


@pytest.fixture
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """`killed(root)`: a copy of an open store, which is what SIGKILL leaves behind."""

    def copy(root: Path) -> Path:
        return Path(shutil.copytree(root, tmp_path_factory.mktemp("killed") / "store"))

    return copy


@pytest.fixture
def proven() -> Callable[..., Any]:
    """`await proven(backend, sizes)`: what verifies, as the mover would pass it on; no more."""

    async def call(backend: NvmeBackend, wanted: Mapping[Key, int]) -> dict[Key, bytes]:
        batch = empty_batch(wanted)
        outcomes = await backend.read(batch)
        good = verify_sync(batch.keys, batch.records, batch.payloads())
        return {
            key: bytes(batch.payload(i))
            for i, key in enumerate(wanted)
            if outcomes[i] == Outcome.DONE and good[i]
        }

    return call


@pytest.fixture
def segments() -> Callable[[Path], list[Path]]:
    """All segment files below a root, by name."""
    return lambda root: sorted(root.glob("*/seg-*.tkv"))
