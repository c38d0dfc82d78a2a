"""What the file backend does beyond the kit: its directory, its quota, its faults."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import aiofiles.os
import pytest

from tierkv.backend import Backend, SupportsVerify
from tierkv.blocks import Keys, Outcome
from tierkv.errors import CapacityError, ConfigError, StoreBusyError, StoreError, StoreUnusableError
from tierkv.registry import make_backend
from tierkv.testing import (
    BackendMachine,
    Key,
    agree_at_once,
    assert_same,
    load,
    make_blocks,
    make_context,
    save,
    sizes,
)
from tierkv_backends.file import FileBackend, names

MIB = 1 << 20


@contextlib.asynccontextmanager
async def opened(
    directory: pathlib.Path,
    *,
    capacity: str = "64MiB",
    block_bytes: Sequence[int] = (4096,),
    namespace: bytes = b"\x01" * 32,
    rank: int = 0,
    retire: Callable[[Keys], Awaitable[None]] = agree_at_once,
) -> AsyncIterator[Backend]:
    backend = make_backend(f"file://{directory}?capacity={capacity}")
    await backend.open(make_context(block_bytes, namespace=namespace, rank=rank, retire=retire))
    try:
        yield backend
    finally:
        await backend.close()


async def listed(backend: Backend) -> set[Key]:
    return {key async for keys in backend.scan() for key in keys}


def files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    return {path.stem: path for path in directory.rglob("*.kv")}


class SmallMachine(BackendMachine):
    """Room for three of the largest blocks: most writes have to make room."""

    def make_backend(self, directory: pathlib.Path) -> Backend:
        return make_backend(f"file://{directory}?capacity=72KiB")


def test_random_histories_agree_with_a_dict_while_room_is_made() -> None:
    SmallMachine.check()


# The URL and opening. ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file://mnt/kv", "write it like file:///mnt/kv"),
        ("file://", "write it like file:///mnt/kv"),
        ("file:///mnt/kv?capacty=1GiB", "did you mean 'capacity'"),
        ("file:///mnt/kv?capacity=much", "is not a size"),
    ],
)
def test_a_bad_url_is_refused_in_one_line(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_backend(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("capacity", "says"), [("9KiB", "two of the largest"), ("9000TiB", "exceeds the file system")]
)
async def test_a_capacity_that_cannot_be_is_refused_and_nothing_stays_locked(
    tmp_path: pathlib.Path, capacity: str, says: str
) -> None:
    with pytest.raises(CapacityError, match=says):
        async with opened(tmp_path, capacity=capacity):
            pass
    async with opened(tmp_path) as backend:
        assert await listed(backend) == set()


async def test_without_a_capacity_a_share_of_free_space_is_taken_and_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend = make_backend(f"file://{tmp_path}")
    await backend.open(make_context([4096]))
    usage = await backend.usage()
    await backend.close()
    status = os.statvfs(tmp_path)
    assert 0 < usage.capacity_bytes < status.f_bavail * status.f_frsize
    assert "capacity" in caplog.text


async def test_a_path_that_is_a_file_is_unusable(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(StoreUnusableError, match="name a directory"):
        async with opened(tmp_path / "kv"):
            pass


async def test_a_second_owner_is_told_who_the_first_is(tmp_path: pathlib.Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(StoreBusyError, match=f"owned by process {os.getpid()} on "):
            async with opened(tmp_path):
                pass


async def test_a_directory_removed_while_its_lock_is_taken_is_made_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[pathlib.Path] = []

    def late(fd: int, flags: int) -> None:
        if (
            not removed and flags & fcntl.LOCK_NB
        ):  # somebody who needs room takes the directory away at the worst moment
            (path,) = tmp_path.glob("kv1-*")
            path.rename(tmp_path / "trash")
            removed.append(path)
        flock(fd, flags)

    blocks = make_blocks(1, [4096])
    monkeypatch.setattr(fcntl, "flock", late)
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
        with pytest.raises(StoreBusyError):
            async with opened(tmp_path):
                pass
    assert len(removed) == 1
    async with opened(tmp_path) as backend:
        assert_same(await load(backend, sizes(blocks)), blocks)


async def test_a_closed_backend_says_so(tmp_path: pathlib.Path) -> None:
    async with opened(tmp_path) as backend:
        pass
    with pytest.raises(StoreError, match="not open"):
        await save(backend, make_blocks(1, [4096]))


# What a kill or a power loss leaves. ------------------------------------------------------------


async def test_temporary_files_of_a_killed_writer_go_at_open(tmp_path: pathlib.Path) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(1, [4096]))
    ((_, path),) = files(tmp_path).items()
    stale = path.with_name(f"{path.stem}.7.tmp")
    stale.write_bytes(b"half")
    async with opened(tmp_path) as backend:
        assert (len(await listed(backend)), stale.exists()) == (1, False)


@pytest.mark.parametrize("left", [0, 1, 64, 65, 2000, 4159])
async def test_a_truncated_file_is_a_miss_and_goes(tmp_path: pathlib.Path, left: int) -> None:
    blocks = make_blocks(3, [4096])
    torn = list(blocks)[1]
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
        os.truncate(files(tmp_path)[torn[1].hex()], left)
        expected: dict[Key, bytes | Outcome] = {**blocks, torn: Outcome.MISSING}
        assert_same(await load(backend, sizes(blocks)), expected)
        assert await listed(backend) == blocks.keys() - {torn}
        await save(backend, blocks)
        os.truncate(files(tmp_path)[torn[1].hex()], left)
    async with opened(tmp_path) as backend:
        assert_same(await load(backend, sizes(blocks)), expected)


async def test_a_clear_killed_after_the_switch_stays_cleared(tmp_path: pathlib.Path) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    (old,) = tmp_path.glob("*/blocks-0")
    (old.parent / "blocks-1").mkdir()  # what clear does first
    async with opened(tmp_path) as backend:
        assert await listed(backend) == set()
    assert not old.exists()


@pytest.mark.parametrize("renamed", [False, True])
async def test_a_write_begun_before_a_clear_does_not_come_after_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    blocks = make_blocks(3, [4096])
    at_the_rename, go_on = asyncio.Event(), asyncio.Event()
    rename = aiofiles.os.replace

    async def waiting(source: str, target: str, **options: object) -> None:
        if renamed:
            await rename(source, target, **options)  # type: ignore[arg-type] # stub names them all
        at_the_rename.set()
        await go_on.wait()
        if not renamed:
            await rename(source, target, **options)  # type: ignore[arg-type] # stub names them all

    async with opened(tmp_path) as backend:
        with monkeypatch.context() as patch:
            patch.setattr(aiofiles.os, "replace", waiting)
            writing = asyncio.create_task(save(backend, blocks))
            await at_the_rename.wait()
            await backend.clear()
            go_on.set()
            assert set((await writing).values()) == {Outcome.DECLINED}
        assert await listed(backend) == set()
        assert (await backend.usage()).physical_bytes == 0
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
    async with opened(tmp_path) as backend:
        assert_same(await load(backend, sizes(blocks)), blocks)


async def test_files_that_are_not_ours_are_left_alone(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(2, [4096]))
    theirs = [tmp_path / "notes.txt", next(tmp_path.glob("*/blocks-0")) / "notes.txt"]
    for path in theirs:
        path.write_text("keep")
    older = tmp_path / names.owner_of(make_context([1])).replace("kv1-", "kv0-")
    older.mkdir()
    async with opened(tmp_path) as backend:
        assert len(await listed(backend)) == 2
    assert all(path.exists() for path in [*theirs, older])
    assert caplog.text.count("not ours") == 1


# The quota. -------------------------------------------------------------------------------------


async def test_what_was_read_lately_outlives_what_was_not(tmp_path: pathlib.Path) -> None:
    blocks = make_blocks(8, [MIB])
    used = dict(list(blocks.items())[:4])
    async with opened(tmp_path, capacity="9MiB", block_bytes=[MIB]) as backend:
        await save(backend, blocks)
        await load(backend, sizes(used))
        await save(backend, make_blocks(4, [MIB], first=100))
        assert_same(await load(backend, sizes(used)), used)


async def test_blocks_beyond_a_smaller_quota_go_at_open_the_oldest_first(
    tmp_path: pathlib.Path,
) -> None:
    blocks = make_blocks(8, [MIB])
    async with opened(tmp_path, block_bytes=[MIB]) as backend:
        await save(backend, blocks)
    for age, key in enumerate(reversed(blocks)):
        os.utime(files(tmp_path)[key[1].hex()], (1e9 - age, 1e9 - age))
    async with opened(tmp_path, capacity="5MiB", block_bytes=[MIB]) as backend:
        usage = await backend.usage()
        assert usage.physical_bytes <= usage.capacity_bytes
        assert await listed(backend) == set(list(blocks)[-4:])


async def test_a_block_written_again_while_it_retires_stays(tmp_path: pathlib.Path) -> None:
    blocks = make_blocks(8, [MIB])
    asked: asyncio.Queue[Keys] = asyncio.Queue()
    agreed = asyncio.Event()

    async def retire(keys: Keys) -> None:
        asked.put_nowait(keys)
        await agreed.wait()

    async with opened(tmp_path, capacity="9MiB", block_bytes=[MIB], retire=retire) as backend:
        await save(backend, blocks)
        writing = asyncio.create_task(save(backend, make_blocks(1, [MIB], first=100)))
        wanted = {key: blocks[key] for key in await asked.get()}
        assert set((await save(backend, wanted)).values()) == {Outcome.DONE}
        agreed.set()
        await writing
        assert_same(await load(backend, sizes(wanted)), wanted)


async def test_a_cancelled_wait_for_room_gives_its_reservation_back(
    tmp_path: pathlib.Path,
) -> None:
    asked = asyncio.Event()

    async def never(keys: Keys) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with opened(tmp_path, capacity="9MiB", block_bytes=[MIB], retire=never) as backend:
        await save(backend, make_blocks(8, [MIB]))
        before = await backend.usage()
        writing = asyncio.create_task(save(backend, make_blocks(4, [MIB], first=100)))
        await asked.wait()
        writing.cancel()
        await asyncio.wait([writing])
        assert await backend.usage() == before


async def test_a_block_larger_than_the_quota_is_declined_and_costs_nobody_else(
    tmp_path: pathlib.Path,
) -> None:
    small, large = make_blocks(3, [4096]), make_blocks(1, [4096, MIB], first=9, groups=[1])
    async with opened(tmp_path, capacity="512KiB") as backend:
        await save(backend, small)
        assert set((await save(backend, large)).values()) == {Outcome.DECLINED}
        assert_same(await load(backend, sizes(small)), small)


async def test_other_namespaces_that_nobody_holds_go_first(tmp_path: pathlib.Path) -> None:
    mine = make_blocks(4, [MIB])
    for namespace in (b"\x02" * 32, b"\x03" * 32):
        async with opened(tmp_path, block_bytes=[MIB], namespace=namespace) as other:
            await save(other, mine)
    async with (
        opened(tmp_path, block_bytes=[MIB], namespace=b"\x03" * 32) as held,
        opened(tmp_path, block_bytes=[MIB], rank=1) as sibling,
    ):
        await save(sibling, mine)
        await sibling.close()
        async with opened(tmp_path, capacity="9MiB", block_bytes=[MIB]) as backend:
            foreign_bytes = (await backend.usage()).physical_bytes - 4 * (MIB + 4096)
            assert 0 <= foreign_bytes <= 2 * 4096, "one namespace, its lock and description"
            await save(backend, mine)
            await save(backend, make_blocks(4, [MIB], first=100))
            assert_same(await load(backend, sizes(mine)), mine)  # the unheld ones went first
            assert_same(await load(held, sizes(mine)), mine)
    async with opened(tmp_path, block_bytes=[MIB], namespace=b"\x02" * 32) as other:
        assert await listed(other) == set()
    async with opened(tmp_path, block_bytes=[MIB], rank=1) as sibling:
        assert await listed(sibling) == mine.keys()


# Faults of the disk. ----------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


async def test_a_disk_fuller_than_the_quota_knows_evicts_and_tries_once_more(
    tiny_disk: pathlib.Path,
) -> None:
    old, new = make_blocks(2, [MIB]), make_blocks(1, [MIB], first=100)
    async with opened(tiny_disk, capacity="4MiB", block_bytes=[MIB]) as backend:
        await save(backend, old)
        (tiny_disk / "theirs").write_bytes(bytes(MIB + MIB // 2))
        assert set((await save(backend, new)).values()) == {Outcome.DONE}
        assert_same(await load(backend, sizes(new)), new)
        there = await listed(backend)
        assert len(there) == 2
        usage = await backend.usage()
        assert (usage.counters["writes_disk_full"], usage.counters["blocks_evicted"]) == (1, 1)
        assert usage.physical_bytes == 2 * (MIB + 4096)


async def test_a_full_disk_with_nothing_to_evict_declines(tiny_disk: pathlib.Path) -> None:
    blocks = {**make_blocks(1, [MIB]), **make_blocks(2, [MIB, 4096], first=9, groups=[1])}
    async with opened(tiny_disk, capacity="4MiB", block_bytes=[MIB, 4096]) as backend:
        (tiny_disk / "theirs").write_bytes(bytes(3 * MIB + MIB // 2))
        outcomes = await save(backend, blocks)
        assert next(iter(outcomes.values())) is Outcome.DECLINED
        done = {key for key, outcome in outcomes.items() if outcome is Outcome.DONE}
        assert await listed(backend) <= done
        assert not list(tiny_disk.rglob("*.tmp"))
        assert (await backend.usage()).physical_bytes == len(await listed(backend)) * 8192
        (tiny_disk / "theirs").unlink()
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
        assert_same(await load(backend, sizes(blocks)), blocks)


async def test_a_disk_full_at_open_is_said_in_one_line(tiny_disk: pathlib.Path) -> None:
    (tiny_disk / "theirs").write_bytes(bytes(4 * MIB))
    with pytest.raises(StoreUnusableError, match="No space left"):
        async with opened(tiny_disk, capacity="1MiB"):
            pass


async def test_a_disk_that_cannot_delete_keeps_its_bytes_in_the_books(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(path: str, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    blocks = make_blocks(2, [4096])
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
        monkeypatch.setattr(aiofiles.os, "unlink", refuse)
        await backend.delete(Keys.of(blocks))
        assert not (await backend.contains(Keys.of(blocks))).any()
        assert (await backend.usage()).physical_bytes == 2 * 8192
        assert caplog.text.count("cannot remove") == 2


# Verify. ----------------------------------------------------------------------------------------


async def test_verify_finds_the_one_flipped_byte_among_all_owners(tmp_path: pathlib.Path) -> None:
    blocks = make_blocks(4, [4096])
    bad = list(blocks)[2]
    for rank in range(2):
        async with opened(tmp_path, rank=rank) as backend:
            await save(backend, blocks)
    path = next(p for p in tmp_path.rglob(f"{bad[1].hex()}.kv") if "-r1-" in str(p))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}

    seen: list[tuple[int, int]] = []
    store = make_backend(f"file://{tmp_path}")
    assert isinstance(store, SupportsVerify)
    report = await store.verify(lambda done, total: seen.append((done, total)))
    assert (report.blocks, report.payload_bytes) == (8, 8 * 4096)
    (corrupt,) = report.corrupt
    assert (corrupt.group, corrupt.hash_hex, corrupt.where) == (0, bad[1].hex(), str(path))
    assert seen[-1] == (8 * 4096, 8 * 4096)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


async def test_verify_lists_an_owner_of_another_format(tmp_path: pathlib.Path) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(2, [4096]))
    other = tmp_path / "kv2-of-a-later-version"
    other.mkdir()
    report = await FileBackend(tmp_path).verify(lambda done, total: None)
    assert report.blocks == 2
    assert [(s.directory, s.reason) for s in report.skipped] == [(str(other), "another format")]


async def test_verify_does_not_count_what_went_while_it_read(tmp_path: pathlib.Path) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    first, *others = sorted(tmp_path.rglob("*.kv"))

    def remove_others(done: int, total: int) -> None:
        assert total == 3 * 4096
        for path in [*others, first]:
            path.unlink(missing_ok=True)

    report = await FileBackend(tmp_path).verify(remove_others)
    assert (report.blocks, report.payload_bytes, report.corrupt) == (1, 4096, ())


async def test_verify_says_when_there_is_nothing_to_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StoreUnusableError, match="name a readable store"):
        await FileBackend(tmp_path / "absent").verify(lambda done, total: None)
