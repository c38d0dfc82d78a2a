"""Cases of kind DIO. 141, 142 and 143 are about registered buffers and io_uring, which the pool of
threads does not have: nothing is registered, and a call that returned is over."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv.backend import Backend, BlockBatch
from tierkv.blocks import Outcome
from tierkv.record import blank, seal_sync, verify_sync
from tierkv.registry import make_backend
from tierkv.testing import empty_batch, load, make_batch, make_blocks, make_context, save, sizes
from tierkv_backends.nvme.direct import aligned_buffer, dio_alignment_sync


@contextlib.asynccontextmanager
async def opened(
    root: Path, options: str = "capacity=8MiB&segment=1MiB", block_bytes: Sequence[int] = (4096,)
) -> AsyncIterator[Backend]:
    backend = make_backend(f"nvme://{root}?{options}")
    await backend.open(make_context(block_bytes))
    try:
        yield backend
    finally:
        await backend.close()


async def need_direct(backend: Backend) -> None:
    mode = (await backend.usage()).modes["direct"]
    if mode != "yes":
        pytest.skip(f"direct I/O here: {mode}")


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_case_131_buffers_of_our_own_start_at_a_page() -> None:
    for nbytes in (1, 512, 5000, 1 << 20):
        assert np.frombuffer(aligned_buffer(nbytes), np.uint8).ctypes.data % 4096 == 0


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
async def test_case_131_the_first_einval_means_buffered_said_once_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    first, second = make_blocks(5, [4096]), make_blocks(5, [4096], first=20)
    async with opened(tmp_path) as backend:
        await need_direct(backend)
        real = getattr(os, call)

        def einval(fd: int, *arguments: Any) -> int:
            if is_direct(fd):
                raise OSError(errno.EINVAL, "the flag was accepted at open")
            result: int = real(fd, *arguments)
            return result

        monkeypatch.setattr(os, call, einval)
        for blocks in (first, second):
            assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
            assert await load(backend, sizes(blocks)) == blocks
        usage = await backend.usage()
        assert usage.modes["direct"].startswith("no (")
        assert usage.counters["direct_fallbacks"] == 1
    assert caplog.text.count("direct I/O stopped working") == 1
    async with opened(tmp_path, "capacity=8MiB&segment=1MiB&direct=off") as backend:
        assert await load(backend, sizes(first | second)) == first | second


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache, by mincore(2)."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        table = (ctypes.c_ubyte * (size // 4096))()
        anchor = ctypes.c_char.from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        assert libc.mincore(address, ctypes.c_size_t(size), table) == 0
        del anchor
        return sum(page & 1 for page in table)


async def test_case_132_direct_means_that_descriptor_and_page_cache_agree(tmp_path: Path) -> None:
    blocks = make_blocks(64, [1 << 18])
    async with opened(tmp_path, "capacity=64MiB&segment=32MiB", [1 << 18]) as backend:
        await need_direct(backend)
        await save(backend, blocks)
        assert await load(backend, sizes(blocks)) == blocks
        (segment,) = tmp_path.glob("*/seg-*")
        fds = [
            int(link.name)
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and os.path.realpath(link) == str(segment)
        ]
        assert fds
        assert all(is_direct(fd) for fd in fds)
        assert cached_pages(segment) < 16, "16 MiB went by"
    async with opened(tmp_path, "capacity=64MiB&segment=32MiB&direct=off", [1 << 18]) as backend:
        assert await load(backend, sizes(blocks)) == blocks
        assert (await backend.usage()).modes["direct"] == "no (direct=off)"
        assert cached_pages(segment) > 1000


def dio_alignment(root: Path) -> int:
    """What statx tells of buffers, not what statvfs tells of blocks."""
    fd = os.open(next(root.glob("*/seg-*")), os.O_RDONLY)
    told = dio_alignment_sync(fd)
    os.close(fd)
    assert told is not None
    return told[0]


@pytest.mark.parametrize("skew", [1, 64, 512])
async def test_case_134_a_skewed_arena_gives_right_bytes_and_is_counted_where_it_is_too_skewed(
    tmp_path: Path, skew: int
) -> None:
    blocks = make_blocks(4, [4096])
    async with opened(tmp_path) as backend:
        await need_direct(backend)
        for write in (True, False):
            batch = empty_batch(sizes(blocks))
            arena = memoryview(mmap.mmap(-1, len(batch.arena) + 4096))[skew:]
            skewed = BlockBatch(batch.keys, batch.records, arena, batch.offsets, batch.nbytes)
            if write:
                for i, data in enumerate(blocks.values()):
                    skewed.payload(i)[:] = data
                skewed.records[:] = seal_sync(skewed.keys, skewed.payloads())
                assert (await backend.write(skewed) == Outcome.DONE).all()
            else:
                assert (await backend.read(skewed) == Outcome.DONE).all()
                assert [bytes(p) for p in skewed.payloads()] == list(blocks.values())
        usage = await backend.usage()
        assert usage.modes["direct"] == "yes", "an arena of somebody is no fault of the disk"
        memory_alignment = dio_alignment(tmp_path)
        assert usage.counters["unaligned_batches"] == (2 if skew % memory_alignment else 0)
        assert await load(backend, sizes(blocks)) == blocks


@pytest.mark.parametrize("nbytes", [1, 100, 511, 513, 3 * 4096 + 100, 5 * 4096 - 1])
async def test_case_138_a_tail_changes_only_its_own_range(tmp_path: Path, nbytes: int) -> None:
    first, second = make_blocks(3, [8192]), make_blocks(2, [nbytes], first=30)
    async with opened(tmp_path, block_bytes=[8192]) as backend:
        await save(backend, first)
        (segment,) = tmp_path.glob("*/seg-*")
        before = np.frombuffer(segment.read_bytes(), np.uint8)
        await save(backend, second)
        after = np.frombuffer(segment.read_bytes(), np.uint8)
        changed = np.flatnonzero(before != after)
        end = 4096 + 4096 + 3 * 8192  # header page, extent header, three blocks
        padded = -(-nbytes // 512) * 512
        assert changed.min() >= end
        assert changed.max() < end + 4096 + 2 * padded
        assert await load(backend, sizes(first | second)) == first | second


async def test_case_140_three_reads_into_slots_in_another_order_than_on_media(
    tmp_path: Path,
) -> None:
    blocks = make_blocks(3, [4096])
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
        batch = make_batch(blocks)
        arena = memoryview(mmap.mmap(-1, 3 * 4096))
        offsets = np.array([4096, 0, 8192], np.int64)
        into = BlockBatch(batch.keys, blank(3), arena, offsets, batch.nbytes)
        assert (await backend.read(into) == Outcome.DONE).all()
        assert verify_sync(into.keys, into.records, into.payloads()).all()


@pytest.mark.parametrize("fault", ["refused at open", "EINVAL at use", "reads back other bytes"])
async def test_case_144_a_probe_at_open_that_fails_means_buffered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    real_open, real_read = os.open, os.preadv

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT and fault == "refused at open":
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *arguments, **options)

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if is_direct(fd) and fault == "EINVAL at use":
            raise OSError(errno.EINVAL, "not like this")
        n = real_read(fd, buffers, offset)
        if is_direct(fd):
            memoryview(buffers[0])[:1] = b"?"
        return n

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    blocks = make_blocks(4, [4096])
    async with opened(tmp_path) as backend:
        assert (await backend.usage()).modes["direct"].startswith("no (")
        await save(backend, blocks)
        assert await load(backend, sizes(blocks)) == blocks
