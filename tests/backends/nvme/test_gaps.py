"""Blocks that lie near each other are one read, whatever lies between them."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest

from tierkv.backend import BlockBatch
from tierkv.blocks import Keys, Outcome
from tierkv.record import blank, verify_sync
from tierkv.testing import assert_same, load, make_blocks, save, sizes
from tierkv_backends.nvme import NvmeBackend, transfer

Opened = Callable[..., AbstractAsyncContextManager[NvmeBackend]]
BLOCKS = (4096, 5000, 12288, 100)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Vectors of every call that read payload."""
    seen: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        seen.append(len(buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return seen


@pytest.mark.parametrize("gap_bytes", [0, 4096, 64 << 10])
async def test_any_part_of_a_store_is_read_right_and_nothing_else_is_touched(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, gap_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "GAP_BYTES", gap_bytes)
    monkeypatch.setattr(transfer, "MAX_VECTORS", 8)
    rng = random.Random(gap_bytes)
    async with opened(tmp_path, "capacity=8MiB&segment=256KiB", block_bytes=BLOCKS) as backend:
        blocks = make_blocks(90, BLOCKS)
        for at in range(0, 90, 30):
            await save(backend, dict(list(blocks.items())[at : at + 30]))
        for _ in range(30):
            some = rng.sample(sorted(blocks), rng.randint(1, 60))
            part = {key: blocks[key] for key in some}
            assert_same(await load(backend, sizes(part)), part)


async def test_every_other_block_is_one_call(
    tmp_path: Path, opened: Opened, reads: list[int]
) -> None:
    async with opened(tmp_path, "capacity=8MiB&segment=1MiB&threads=1") as backend:
        blocks = make_blocks(40, [4096])
        await save(backend, blocks)
        reads.clear()  # one to see whether direct I/O works
        part = dict(list(blocks.items())[::2])
        assert_same(await load(backend, sizes(part)), part)
    assert reads == [39]  # twenty blocks and what lies between them


async def test_neighbours_in_memory_and_on_media_are_one_vector(
    tmp_path: Path, opened: Opened, reads: list[int]
) -> None:
    async with opened(tmp_path, "capacity=8MiB&segment=1MiB&threads=1") as backend:
        blocks = make_blocks(40, [4096])
        await save(backend, blocks)
        reads.clear()
        arena = memoryview(mmap.mmap(-1, 40 * 4096))
        offsets, nbytes = np.arange(40) * 4096, np.full(40, 4096)
        batch = BlockBatch(Keys.of(blocks), blank(40), arena, offsets, nbytes)
        assert set((await backend.read(batch)).tolist()) == {Outcome.DONE}
        assert verify_sync(batch.keys, batch.records, batch.payloads()).all()
    assert reads == [1]
