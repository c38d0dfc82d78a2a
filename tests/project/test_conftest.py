"""The shared fixtures do what they say."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from blockbuster import BlockBuster, BlockingError

from tierkv.errors import LayoutError
from tierkv.layout import Layout

pytestmark = pytest.mark.usefixtures("blockbuster")


async def test_our_code_that_opens_a_file_on_the_loop_is_caught(tmp_path: Path) -> None:
    with pytest.raises(BlockingError):
        Layout.from_file(tmp_path / "layout.json")


async def test_our_code_may_block_in_a_thread(tmp_path: Path) -> None:
    with pytest.raises(LayoutError):
        await asyncio.to_thread(Layout.from_file, tmp_path / "layout.json")


async def test_a_test_itself_may_block(tmp_path: Path, blockbuster: BlockBuster) -> None:
    (tmp_path / "file").write_text("text")
    assert "os.preadv" in blockbuster.functions
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.every_loop
async def test_a_marked_test_runs_on_each_loop(request: pytest.FixtureRequest) -> None:
    module = type(asyncio.get_running_loop()).__module__
    name = "uvloop" if module.startswith("uvloop") else "asyncio"
    assert request.node.name.endswith(f"[{name}]")
