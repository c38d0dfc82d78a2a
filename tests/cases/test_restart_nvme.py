"""Cases of kind RESTART (and 012, 094) that the nvme backend must keep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import Backend
from tierkv.blocks import Keys, Outcome
from tierkv.registry import make_backend
from tierkv.testing import load, make_blocks, make_context, save, sizes
from tierkv_backends.nvme import quota

SMALL = "capacity=2MiB&segment=64KiB"


@contextlib.asynccontextmanager
async def opened(
    root: Path, options: str = SMALL, *, block_bytes: Sequence[int] = (4096,), **context: Any
) -> AsyncIterator[Backend]:
    backend = make_backend(f"nvme://{root}?{options}")
    await backend.open(make_context(block_bytes, **context))
    try:
        yield backend
    finally:
        await backend.close()


async def test_case_012_an_older_format_is_neither_read_nor_deleted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = make_blocks(4, [4096]), make_blocks(4, [4096], first=50)
    async with opened(tmp_path) as backend:
        await save(backend, old)
    meta = next(tmp_path.glob("*/meta.json"))
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 0}))
    before = {path: path.read_bytes() for path in meta.parent.iterdir()}
    async with opened(tmp_path) as backend:
        assert set((await load(backend, sizes(old))).values()) == {Outcome.MISSING}
        await save(backend, new)
        assert await load(backend, sizes(new)) == new
    async with opened(tmp_path) as backend:
        assert await load(backend, sizes(new)) == new
    assert {path: path.read_bytes() for path in meta.parent.iterdir()} == before
    said = [r for r in caplog.records if "ignored" in r.getMessage()]
    assert len(said) == 2  # one line for each open


WRITER = """
import asyncio, sys
from tierkv.registry import make_backend
from tierkv.testing.batches import make_blocks, make_context, save

async def main():
    backend = make_backend(sys.argv[1])
    await backend.open(make_context((4096,)))
    await save(backend, make_blocks(100, [4096]))
    await backend.close()

asyncio.run(main())
"""


async def test_case_121_what_another_process_wrote_is_there_without_reading_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, f"nvme://{tmp_path}?{SMALL}"
    )
    assert await process.wait() == 0
    (directory,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    (directory / "seg-00000099.tkv").write_bytes(b"data without a header" * 5000)
    reads: list[int] = []
    monkeypatch.setattr(os, "preadv", lambda *a: reads.append(1))
    async with opened(tmp_path) as backend:
        assert (await backend.contains(Keys.of(make_blocks(100, [4096])))).all()
        assert (await backend.usage()).blocks == 100
        assert len(reads) == 1  # the probe of direct I/O


async def test_case_124_without_a_capacity_it_takes_a_share_of_what_is_free_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    free = shutil.disk_usage(tmp_path).free
    async with opened(tmp_path, "segment=64KiB") as backend:
        capacity = (await backend.usage()).capacity_bytes
    assert 0 < capacity < 0.25 * free
    assert f"no capacity given, so it takes {capacity} bytes (20 %" in caplog.text


async def test_case_126_what_a_kill_left_half_made_is_removed_and_usage_is_what_the_disk_says(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(30, [4096]))
    (directory,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    (directory / "seg-00000050.tkv").write_bytes(bytes(20_000))
    (directory / "meta.json.tmp").write_bytes(b"{")
    (directory / "snapshot.tmp").write_bytes(b"half")
    (directory / "probe-123").write_bytes(bytes(4096))
    async with opened(tmp_path) as backend:
        names = {path.name for path in directory.iterdir()}
        assert names == {"LOCK", "meta.json", *(f"seg-{n:08d}.tkv" for n in (1, 2, 3))}
        blocks_on_disk = sum(path.stat().st_blocks for path in directory.glob("seg-*"))
        assert (await backend.usage()).physical_bytes == blocks_on_disk * 512


async def test_case_127_an_open_reads_the_index_only_however_many_blocks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks(20_000, [16])
    options = "capacity=64MiB&segment=4MiB"
    async with opened(tmp_path, options, block_bytes=(16,)) as backend:
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
        killed = shutil.copytree(tmp_path, tmp_path.with_name("killed"))
    real, read = os.pread, 0

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal read
        data = real(fd, nbytes, offset)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", pread)
    for root, limit in ((tmp_path, 50_000), (killed, 100 * 20_000)):
        read = 0
        async with opened(root, options, block_bytes=(16,)) as backend:
            assert (await backend.contains(Keys.of(blocks))).all()
        assert read < limit, "20,000 blocks take 10 MB on media"


async def test_case_129_094_a_segment_deleted_under_us_is_a_miss_and_its_reclaim_no_error(
    tmp_path: Path,
) -> None:
    blocks = make_blocks(10, [4096])
    async with opened(tmp_path, "capacity=256KiB&segment=64KiB") as backend:
        await save(backend, blocks)
        next(tmp_path.glob("*/seg-*")).unlink()
        for first in range(100, 2000, 100):
            more = make_blocks(10, [4096], first=first)
            outcomes = await save(backend, more)
            if first > 100:  # the first may still hit the deleted file
                assert set(outcomes.values()) == {Outcome.DONE}
                assert await load(backend, sizes(more)) == more
        assert set((await load(backend, sizes(blocks))).values()) == {Outcome.MISSING}
        assert not (await backend.contains(Keys.of(blocks))).any()
        usage = await backend.usage()
        assert usage.physical_bytes == quota.physical_bytes_sync(tmp_path) <= 256 << 10
