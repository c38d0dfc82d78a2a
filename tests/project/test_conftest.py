"""The shared fixtures do what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from blockbuster import BlockingError

from tierkv.errors import LayoutError
from tierkv.layout import Layout


@pytest.mark.usefixtures("blockbuster")
async def test_a_file_opened_on_the_loop_is_caught(tmp_path: Path) -> None:
    with pytest.raises(BlockingError):
        Layout.from_file(tmp_path / "layout.json")


@pytest.mark.usefixtures("blockbuster")
async def test_a_thread_may_block(tmp_path: Path) -> None:
    with pytest.raises(LayoutError):
        await asyncio.to_thread(Layout.from_file, tmp_path / "layout.json")


@pytest.mark.every_loop
async def test_a_marked_test_runs_on_each_loop(request: pytest.FixtureRequest) -> None:
    module = type(asyncio.get_running_loop()).__module__
    name = "uvloop" if module.startswith("uvloop") else "asyncio"
    assert request.node.name.endswith(f"[{name}]")


async def test_any_other_runs_on_asyncio_only() -> None:
    assert not type(asyncio.get_running_loop()).__module__.startswith("uvloop")
