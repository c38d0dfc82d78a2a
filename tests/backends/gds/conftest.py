"""Small stores of the nvme format, opened by whichever backend a test names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import Backend
from tierkv.registry import make_backend
from tierkv.testing import make_context

Opened = Callable[..., AbstractAsyncContextManager[Any]]


@contextlib.asynccontextmanager
async def _opened(
    scheme: str,
    root: Path,
    more: str = "",
    *,
    block_bytes: Sequence[int] = (4096,),
    size: str = "capacity=2MiB&segment=64KiB",
) -> AsyncIterator[Backend]:
    backend = make_backend(f"{scheme}://{root}?{size}{more}")
    await backend.open(make_context(block_bytes))
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture
def opened() -> Opened:
    """`async with opened("gds", root, "&mode=auto", block_bytes=…) as backend`."""
    return _opened
