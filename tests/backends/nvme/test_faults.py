"""Faults at the system calls: a miss or a declined save, and everything else goes on."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import SupportsVerify
from tierkv.blocks import Keys, Outcome
from tierkv.errors import StoreUnusableError
from tierkv.registry import make_backend
from tierkv.testing import load, make_batch, make_blocks, save, sizes
from tierkv_backends.nvme import recovery

Opened = Callable[..., Any]
Killed = Callable[[Path], Path]

BLOCKS = make_blocks(6, [4096])


class Faults:
    """Replaces one system call; `at[n]` is what happens instead at the n-th call from now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.at: dict[int, Callable[..., Any]] = {}
        self.calls = 0
        self.real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            self.calls += 1
            return self.at.get(self.calls, self.real)(*arguments)

        monkeypatch.setattr(os, name, call)


def fails(code: int) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("call", [1, 2])
async def test_a_write_error_fails_its_keys_and_the_next_write_works(
    tmp_path: Path, opened: Opened, killed: Killed, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Call 1 writes the segment's header, 2 an extent."""
    async with opened(tmp_path) as backend:
        faults = Faults(monkeypatch, "pwritev")
        faults.at[call] = fails(errno.EIO)
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.FAILED}
        assert not (await backend.contains(Keys.of(BLOCKS))).any()
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(BLOCKS)) == BLOCKS
        assert (await backend.usage()).counters["write_errors"] == 1
        root = killed(tmp_path)
    async with opened(root) as backend:
        assert await load(backend, sizes(BLOCKS)) == BLOCKS


async def test_an_extent_whose_header_may_be_there_is_never_written_over(
    tmp_path: Path, opened: Opened, killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header arrives, the answer is an error: another payload must not come under it."""
    headers, real = 0, os.pwritev

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        nonlocal headers
        if bytes(buffers[0][:8]) != b"TKVEXT01":
            return real(fd, buffers, offset)
        headers += 1
        if headers == 1:
            real(fd, buffers, offset)
        raise OSError(errno.EIO, "no answer from the disk")

    monkeypatch.setattr(os, "pwritev", pwritev)
    other = make_blocks(6, [4096], first=50)
    async with opened(tmp_path) as backend:
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.FAILED}
        assert set((await save(backend, other)).values()) == {Outcome.FAILED}
        root = killed(tmp_path)
    async with opened(root) as backend:
        found = await load(backend, sizes(BLOCKS))  # asserts that what is served verifies
        assert set(found.values()) <= {*BLOCKS.values(), Outcome.MISSING}


async def test_a_disk_that_takes_no_write_costs_one_segment_and_no_block(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the header of what failed can be taken back: nothing more goes into that segment."""
    async with opened(tmp_path) as backend:
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.DONE}
        faults = Faults(monkeypatch, "pwritev")
        faults.at = dict.fromkeys(range(1, 100), fails(errno.EIO))
        for first in range(50, 100, 10):
            other = make_blocks(6, [4096], first=first)
            assert set((await save(backend, other)).values()) == {Outcome.FAILED}
        assert await load(backend, sizes(BLOCKS)) == BLOCKS
        faults.at.clear()
        assert set((await save(backend, other)).values()) == {Outcome.DONE}
        assert (await backend.usage()).physical_bytes <= 3 * 65536


async def test_a_short_write_goes_on_where_it_stopped(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        faults = Faults(monkeypatch, "pwritev")
        faults.at[2] = lambda fd, buffers, offset: faults.real(
            fd, [buffers[0], buffers[1][:512]], offset
        )
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(BLOCKS)) == BLOCKS


async def test_a_write_of_nothing_is_an_error_and_no_endless_loop(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        faults = Faults(monkeypatch, "pwritev")
        faults.at[2] = lambda *arguments: 0
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.FAILED}


async def test_a_short_read_goes_on_and_ends_only_at_nothing(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
        faults = Faults(monkeypatch, "preadv")
        faults.at[1] = lambda fd, buffers, offset: faults.real(fd, buffers[:1], offset)
        assert await load(backend, sizes(BLOCKS)) == BLOCKS
        assert faults.calls >= 2


async def test_a_bad_sector_fails_its_block_only_and_forgets_nothing(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
        real, bad = os.preadv, 2 * 4096 + 3 * 4096  # header, extent header, the fourth block

        def preadv(fd: int, buffers: Any, offset: int) -> int:
            if offset <= bad < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, "bad sector")
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        found = await load(backend, sizes(BLOCKS))
        assert [v is Outcome.FAILED for v in found.values()] == [i == 3 for i in range(6)]
        monkeypatch.setattr(os, "preadv", real)
        assert await load(backend, sizes(BLOCKS)) == BLOCKS
        assert (await backend.usage()).counters["read_errors"] == 1


async def test_a_segment_that_cannot_be_read_at_open_is_left_alone(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
    faults = Faults(monkeypatch, "pread")
    faults.at[1] = fails(errno.EIO)
    async with opened(tmp_path) as backend:
        assert (await backend.usage()).blocks == 0
        other = make_blocks(6, [4096], first=50)
        await save(backend, other)
        assert await load(backend, sizes(other)) == other
        assert len(list(tmp_path.glob("*/seg-*"))) == 2


async def test_no_room_to_preallocate_means_declined(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.DECLINED}
        assert not list(tmp_path.glob("*/seg-*")), "nothing half-made stays"
        monkeypatch.undo()
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.DONE}


async def test_a_clear_that_cannot_be_made_durable_raises_and_forgets(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
        monkeypatch.setattr(os, "fsync", fails(errno.EIO))
        with pytest.raises(StoreUnusableError, match="cannot be made durable"):
            await backend.clear()
        assert (await backend.usage()).blocks == 0
        monkeypatch.undo()
        await save(backend, BLOCKS)
        assert await load(backend, sizes(BLOCKS)) == BLOCKS


async def test_what_is_saved_after_a_clear_that_failed_half_way_is_served_by_the_next_open(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new epoch is on disk, only its durability is not known."""
    async with opened(tmp_path) as backend:
        faults = Faults(monkeypatch, "fsync")
        faults.at[2] = fails(errno.EIO)  # of the directory, after the rename
        with pytest.raises(StoreUnusableError, match="cannot be made durable"):
            await backend.clear()
        monkeypatch.undo()
        assert set((await save(backend, BLOCKS)).values()) == {Outcome.DONE}
    async with opened(tmp_path) as backend:
        assert await load(backend, sizes(BLOCKS)) == BLOCKS


async def test_a_segment_file_without_a_byte_is_nothing_that_verify_must_tell(
    tmp_path: Path, opened: Opened
) -> None:
    """A process was killed between making the file and taking its space."""
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (directory / "seg-00000077.tkv").touch()
    outside = make_backend(f"nvme://{tmp_path}")
    assert isinstance(outside, SupportsVerify)
    verified = await outside.verify(lambda done, total: None)
    assert (verified.blocks, verified.corrupt, verified.skipped) == (len(BLOCKS), (), ())
    async with opened(tmp_path) as backend:
        assert await load(backend, sizes(BLOCKS)) == BLOCKS
        assert not (directory / "seg-00000077.tkv").exists()


async def test_a_failed_write_keeps_no_hold_of_the_arena(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        faults = Faults(monkeypatch, "pwritev")
        faults.at[2] = fails(errno.EIO)
        batch = make_batch(BLOCKS)
        arena = batch.arena.obj
        assert isinstance(arena, mmap.mmap)
        gc.disable()  # what only a collection would free is held
        try:
            assert set((await backend.write(batch)).tolist()) == {Outcome.FAILED}
            batch.arena.release()
            arena.close()  # BufferError while anybody refers to it
        finally:
            gc.enable()


async def test_who_closes_again_waits_for_the_first_and_the_store_is_free_then(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
        await asyncio.gather(*(backend.close() for _ in range(3)))
        async with opened(tmp_path) as again:
            assert await load(again, sizes(BLOCKS)) == BLOCKS


async def test_a_directory_that_is_deleted_under_an_open_store_fails_its_saves(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
        (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
        shutil.rmtree(directory)
        late = make_blocks(60, [4096], first=50)
        for _ in range(2):
            outcomes = set((await save(backend, late)).values())
            assert outcomes <= {Outcome.FAILED, Outcome.DECLINED}
        assert set((await load(backend, sizes(late))).values()) == {Outcome.MISSING}


@pytest.mark.parametrize("look", [1, 2])
@pytest.mark.parametrize("lie", ["gone", "another epoch"])
async def test_what_was_cleared_stays_so_whatever_an_open_reads_of_the_epoch(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, lie: str, look: int
) -> None:
    """meta.json is read twice: to find the directory, and by its owner.

    Wrong at the first look, the directory of another was made beside it, and what was cleared
    there came back with this one. At the second, a new file began with epoch 1 again.
    """
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
        await backend.clear()
        await save(backend, make_blocks(1, [4096], first=70))
    reads, real = 0, recovery.read_file_sync

    def lying(path: Path) -> bytes:
        nonlocal reads
        reads += path.name == "meta.json"
        if path.name != "meta.json" or reads != look:
            return real(path)
        if lie == "gone":
            raise FileNotFoundError(errno.ENOENT, "gone", str(path))
        return real(path).replace(b'"epoch": 2', b'"epoch": 1')

    monkeypatch.setattr(recovery, "read_file_sync", lying)
    with pytest.raises(StoreUnusableError, match=r"meta\.json cannot be read"):
        async with opened(tmp_path):
            pass
    assert len(list(tmp_path.glob("*/"))) == 1
    async with opened(tmp_path) as backend:
        assert set((await load(backend, sizes(BLOCKS))).values()) == {Outcome.MISSING}


async def test_a_snapshot_that_cannot_be_written_costs_nothing(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, BLOCKS)
        monkeypatch.setattr(Path, "replace", fails(errno.ENOSPC))
    monkeypatch.undo()
    async with opened(tmp_path) as backend:
        assert await load(backend, sizes(BLOCKS)) == BLOCKS
