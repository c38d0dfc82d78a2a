"""`verify` reads a root from outside: all namespaces, every block, and says where one is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import SupportsVerify
from tierkv.errors import StoreUnusableError
from tierkv.registry import make_backend
from tierkv.testing import make_blocks, save

Opened = Callable[..., Any]
BYTES = (4096, 700)


async def verified(root: Path) -> tuple[Any, list[tuple[int, int]]]:
    backend = make_backend(f"nvme://{root}")
    assert isinstance(backend, SupportsVerify)
    steps: list[tuple[int, int]] = []
    found = await backend.verify(lambda done, total: steps.append((done, total)))
    return found, steps


async def test_a_sound_root_is_read_whole_and_nothing_is_changed(
    tmp_path: Path, opened: Opened
) -> None:
    total = 0
    for rank in range(2):
        async with opened(tmp_path, block_bytes=BYTES, rank=rank) as backend:
            blocks = make_blocks(30, BYTES)
            await save(backend, blocks)
            total += sum(map(len, blocks.values()))
    before = {p: p.read_bytes() for p in tmp_path.glob("*/s*")}
    found, steps = await verified(tmp_path)
    assert (found.blocks, found.payload_bytes, found.corrupt) == (60, total, ())
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    assert {p: p.read_bytes() for p in tmp_path.glob("*/s*")} == before


async def test_a_flipped_byte_is_listed_with_its_key_and_place(
    tmp_path: Path, opened: Opened
) -> None:
    blocks = make_blocks(6, BYTES)
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        await save(backend, blocks)
    (path,) = tmp_path.glob("*/seg-*")
    data = path.read_bytes()
    (group, block_hash), payload = list(blocks.items())[3]
    at = data.index(payload)
    path.write_bytes(data[:at] + bytes([payload[0] ^ 1]) + data[at + 1 :])
    found, _ = await verified(tmp_path)
    (bad,) = found.corrupt
    assert (bad.group, bad.hash_hex) == (group, block_hash.hex())
    assert (bad.where, bad.reason) == (f"{path}+{at}", "checksum")
    assert bad.namespace == "test 01010101"


async def test_a_truncated_segment_is_no_corruption_its_blocks_are_gone(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        await save(backend, make_blocks(6, BYTES))
    (path,) = tmp_path.glob("*/seg-*")
    with path.open("r+b") as file:
        file.truncate(4 * 4096)
    found, _ = await verified(tmp_path)
    assert 0 < found.blocks < 6
    assert found.corrupt == ()


async def test_a_directory_in_use_is_left_out_and_named(
    tmp_path: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, rank=0) as backend:
        await save(backend, make_blocks(3, [4096]))
        async with opened(tmp_path, rank=1) as other:
            await save(other, make_blocks(2, [4096]))
        found, _ = await verified(tmp_path)
    assert found.blocks == 2
    assert "not verified: nvme store" in caplog.text
    assert "is in use by pid" in caplog.text


async def test_a_root_that_is_not_there_is_an_error_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusableError, match="no such directory"):
        await verified(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
