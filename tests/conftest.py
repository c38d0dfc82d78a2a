"""What every test may ask for: a detector of blocking calls, and both event loops."""

from __future__ import annotations

import asyncio
import builtins
import io
import os
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from blockbuster import BlockBuster, BlockBusterFunction

OURS = ["tierkv", "tierkv_backends"]

UNKNOWN_TO_BLOCKBUSTER = (
    *("fallocate", "fdatasync", "fsync", "ftruncate", "open", "posix_fallocate"),
    *("pread", "preadv", "pwrite", "pwritev"),
)


@pytest.fixture
def blockbuster() -> Iterator[BlockBuster]:
    """While it is in use, a blocking call made by our code on a running loop raises."""
    detector = BlockBuster(OURS)
    for name in UNKNOWN_TO_BLOCKBUSTER:
        detector.functions[f"os.{name}"] = BlockBusterFunction(os, name, scanned_modules=OURS)
    for module in (builtins, io):  # one function under two names; `Path.open` uses the second
        detector.functions[f"{module.__name__}.open"] = BlockBusterFunction(
            module, "open", scanned_modules=OURS
        )
    detector.activate()
    try:
        yield detector
    finally:
        detector.deactivate()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Asyncio alone, and uvloop too for what is marked `every_loop`."""
    del config
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.SelectorEventLoop
    }
    if item.get_closest_marker("every_loop"):
        factories["uvloop"] = uvloop.new_event_loop
    return factories
