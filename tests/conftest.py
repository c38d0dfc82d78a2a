"""What every test may ask for: a detector of blocking calls, and both event loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tierkv.testing import loop_factories, never_blocked
from tierkv.testing.loops import LoopFactory


@pytest.fixture
def blockbuster() -> Iterator[None]:
    """While it is in use, a blocking call on a running loop raises."""
    with never_blocked():
        yield


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """Asyncio, and uvloop too for the kit and for what is marked `every_loop`."""
    return loop_factories(config, item)
