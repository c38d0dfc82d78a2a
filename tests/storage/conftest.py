"""Desks (`tests.storage.desk`) that are closed when their test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

import pytest
import pytest_asyncio

from tests.storage.desk import SLOT, SLOTS, Desk
from tierkv.backend import Backend
from tierkv.pinned import Arena
from tierkv_backends.memory import MemoryBackend


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena of a desk's size."""
    with Arena.create(SLOT * SLOTS) as made:
        yield made


class OpenDesk(Protocol):
    def __call__(self, backend: Backend | None = ..., **options: Any) -> Awaitable[Desk]: ...


@pytest_asyncio.fixture
async def open_desk() -> AsyncIterator[OpenDesk]:
    """Opens desks and closes them at the end."""
    desks: list[Desk] = []

    async def opened(backend: Backend | None = None, **options: Any) -> Desk:
        desk = Desk(backend or MemoryBackend(), **options)
        desks.append(desk)
        await desk.open()
        return desk

    yield opened
    for desk in desks:
        await desk.close()


@pytest_asyncio.fixture
async def open_no_tier() -> AsyncIterator[Callable[[], Awaitable[Desk]]]:
    """Opens a desk without a tier."""
    desks: list[Desk] = []

    async def opened() -> Desk:
        desks.append(Desk(None))
        await desks[-1].open()
        return desks[-1]

    yield opened
    for desk in desks:
        await desk.close()
