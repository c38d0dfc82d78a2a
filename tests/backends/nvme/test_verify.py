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


async def test_a_directory_in_use_is_skipped_and_says_by_whom(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path, rank=0) as backend:
        await save(backend, make_blocks(3, [4096]))
        async with opened(tmp_path, rank=1) as other:
            await save(other, make_blocks(2, [4096]))
        found, _ = await verified(tmp_path)
    assert found.blocks == 2
    (skipped,) = found.skipped
    assert skipped.directory in {str(path) for path in tmp_path.iterdir()}
    assert skipped.reason.startswith("in use by pid")


async def test_reading_a_root_leaves_every_byte_of_it_and_every_time_alone(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))

    def all_of_it() -> dict[Path, Any]:
        paths = [p for p in tmp_path.rglob("*") if p.is_file()]
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}

    before = all_of_it()
    (lock,) = tmp_path.glob("*/LOCK")
    assert before[lock][0]
    await verified(tmp_path)
    assert all_of_it() == before
    lock.unlink()
    found, _ = await verified(tmp_path)
    assert (found.blocks, found.skipped) == (3, ())
    assert not lock.exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "meta.json").unlink(), "meta.json is missing"),
        (lambda path: (path / "meta.json").write_text("{}"), "meta.json has another format"),
        (
            lambda path: (path / "seg-00000001.tkv").write_bytes(b"not a header" * 1000),
            "the header of seg-00000001.tkv does not prove right",
        ),
        (
            lambda path: (path / "seg-00000001.tkv").rename(path / "seg-00000007.tkv"),
            "seg-00000007.tkv is a copy of segment 1",
        ),
    ],
)
async def test_what_cannot_be_read_is_no_success(
    damage: Callable[[Path], Any], reason: str, tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    (directory,) = {path.parent for path in tmp_path.glob("*/meta.json")}
    damage(directory)
    found, _ = await verified(tmp_path)
    assert (found.blocks, found.corrupt) == (0, ())
    assert [(s.directory, s.reason) for s in found.skipped] == [(str(directory), reason)]


async def test_a_root_without_a_store_is_an_error(tmp_path: Path, opened: Opened) -> None:
    with pytest.raises(StoreUnusableError, match="holds no nvme store"):
        await verified(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnusableError, match="is a file, not a directory"):
        await verified(tmp_path / "file")
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    (segment,) = tmp_path.glob("*/seg-*")
    with pytest.raises(StoreUnusableError, match=f"name {tmp_path}$"):
        await verified(segment.parent)


async def test_a_store_that_holds_nothing_yet_is_sound(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path):
        pass
    found, _ = await verified(tmp_path)
    assert (found.blocks, found.skipped) == (0, ())


async def test_a_root_that_is_not_there_is_an_error_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusableError, match="no such directory"):
        await verified(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
