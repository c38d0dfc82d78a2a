"""What cannot be opened says so in one line: what, where, and what to write instead."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import (
    CapacityError,
    ConfigError,
    StoreBusyError,
    StoreError,
    StoreUnusableError,
)
from tierkv.registry import make_backend
from tierkv.testing import load, make_blocks, make_context, save, sizes
from tierkv_backends.nvme.lock import root_lock_sync

Opened = Callable[..., Any]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nvme:///x?capcity=1GiB", "did you mean 'capacity'"),
        ("nvme:///x?capacity=many", "'many' is not a size"),
        ("nvme:///x?segment=5000", "multiple of 4096"),
        ("nvme:///x?segment=4KiB", "from 64KiB to 4GiB"),
        ("nvme:///x?direct=onn", "did you mean 'on'"),
        ("nvme:///x?threads=0", "from 1 to 64"),
        ("nvme:///x?threads=four", "from 1 to 64"),
        ("nvme://mnt/kv", "absolute path"),
        ("nvme://", "absolute path"),
    ],
)
def test_a_wrong_url_says_what_to_write(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_backend(url)
    assert "\n" not in str(caught.value)


async def refused(url: str, error: type[Exception], says: str, **context: Any) -> None:
    backend = make_backend(url)
    with pytest.raises(error, match=says) as caught:
        await backend.open(make_context(context.pop("block_bytes", (4096,)), **context))
    assert "\n" not in str(caught.value)
    await backend.close()


async def test_a_capacity_below_two_segments_is_refused(tmp_path: Path) -> None:
    await refused(
        f"nvme://{tmp_path}?capacity=511MiB", CapacityError, "write capacity=536870912 or more"
    )
    assert not list(tmp_path.glob("*/seg-*"))


async def test_a_capacity_above_the_disk_is_refused(tmp_path: Path) -> None:
    await refused(f"nvme://{tmp_path}?capacity=1000TiB", CapacityError, "but the disk has")


async def test_a_block_larger_than_a_segment_is_refused(tmp_path: Path) -> None:
    await refused(
        f"nvme://{tmp_path}?capacity=1MiB&segment=64KiB", CapacityError, "write segment=",
        block_bytes=(70_000,),
    )  # fmt: skip


async def test_more_owners_than_the_quota_has_segments_for_are_refused(
    tmp_path: Path, opened: Opened
) -> None:
    options = "capacity=256KiB&segment=64KiB"
    async with opened(tmp_path, options, rank=0), opened(tmp_path, options, rank=1):
        await refused(f"nvme://{tmp_path}?{options}", CapacityError, "3 processes share", rank=2)
    async with opened(tmp_path, options, rank=2):
        pass


async def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path) as backend:
        url = f"nvme://{tmp_path}?capacity=1MiB&segment=64KiB"
        await refused(url, StoreBusyError, f"in use by pid {os.getpid()} on ")
        with pytest.raises(StoreError, match="open already"):
            await backend.open(make_context((4096,)))
    async with opened(tmp_path):
        pass


async def test_a_stopped_holder_of_the_books_does_not_stop_an_open_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv_backends.nvme.lock.ROOT_WAIT_S", 0.0)
    with root_lock_sync(tmp_path):
        url = f"nvme://{tmp_path}?capacity=1MiB&segment=64KiB"
        await refused(url, StoreBusyError, "another process has held its lock")


async def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    says = "file is a file, not a directory; write a directory"
    for path in ("file", "file/deeper"):
        url = f"nvme://{tmp_path}/{path}?capacity=1MiB&segment=64KiB"
        await refused(
            url, StoreUnusableError, says if "/" in path else says.replace("file is", "is")
        )


async def test_using_it_before_open_or_after_close_is_an_error(
    tmp_path: Path, opened: Opened
) -> None:
    blocks = make_blocks(1, [4096])
    backend = make_backend(f"nvme://{tmp_path}?capacity=1MiB&segment=64KiB")
    with pytest.raises(StoreError, match="not open"):
        await save(backend, blocks)
    await backend.open(make_context((4096,)))
    await backend.close()
    with pytest.raises(StoreError, match="not open"):
        await load(backend, sizes(blocks))


UNPRIVILEGED = """
    import asyncio, os, sys
    from tierkv.errors import StoreUnusableError
    from tierkv.registry import make_backend
    from tierkv.testing import make_context

    async def main(backend, context):
        try:
            await backend.open(context)
        except StoreUnusableError as exc:
            print("refused:", exc)
        await backend.close()

    backend, context = make_backend(sys.argv[1]), make_context((4096,))
    os.setgroups([]); os.setgid(65534); os.setuid(65534)  # everything is imported by now
    asyncio.run(main(backend, context))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="drops from root to nobody")
@pytest.mark.parametrize("there", [True, False])
def test_an_unwritable_directory_is_refused(there: bool, opened: Opened) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        Path(name).chmod(0o755)
        root = Path(name) / "store"
        if there:
            root.mkdir(mode=0o755)
        url = f"nvme://{root}?capacity=1MiB&segment=64KiB"
        said = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(UNPRIVILEGED), url],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert said.stdout.startswith(f"refused: nvme store {root}: Permission denied"), said.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_up(path: Path) -> None:
    """Make a file that leaves no room."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(fd, bytes(4096)):
            pass
    os.close(fd)


async def test_a_full_disk_is_refused_at_open(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(1000 << 10))
    await refused(
        f"nvme://{small_disk}/kv?capacity=512KiB&segment=64KiB", StoreUnusableError, "full"
    )


async def test_a_disk_that_fills_up_costs_saves_and_no_reads(
    small_disk: Path, opened: Opened
) -> None:
    options = "capacity=768KiB&segment=128KiB"
    async with opened(small_disk / "kv", options) as backend:
        assert (await backend.usage()).modes["direct"].startswith("no (")
        written: dict[Any, bytes] = {}
        filler = small_disk / "filler"
        for number in range(10):
            blocks = make_blocks(20, [4096], first=number * 100)
            await save(backend, blocks)
            written |= blocks
            if number == 3:
                fill_up(filler)
        assert blocks.items() <= (await load(backend, sizes(written))).items(), "old ones made room"
    async with opened(small_disk / "kv", options) as backend:
        assert blocks.items() <= (await load(backend, sizes(written))).items()
        filler.unlink()
        for number in range(10, 14):
            blocks = make_blocks(20, [4096], first=number * 100)
            await save(backend, blocks)
            assert await load(backend, sizes(blocks)) == blocks


async def test_tmpfs_is_buffered_and_says_so(small_disk: Path, opened: Opened) -> None:
    blocks = make_blocks(4, [4096, 700])
    async with opened(small_disk, "capacity=512KiB&segment=64KiB", block_bytes=(4096, 700)) as b:
        assert await save(b, blocks)
        assert await load(b, sizes(blocks)) == blocks
        assert (await b.usage()).modes["direct"] == "no (statx tells no direct-I/O alignment)"
    await refused(
        f"nvme://{small_disk}?capacity=512KiB&segment=64KiB&direct=on", StoreUnusableError,
        "direct=on, but direct I/O does not work",
    )  # fmt: skip


@pytest.mark.parametrize("spoilt", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"format": "1"}'])
async def test_a_description_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, opened: Opened, spoilt: bytes
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    (meta,) = tmp_path.glob("*/meta.json")
    whole = meta.read_bytes()
    meta.write_bytes(spoilt)
    says = r"meta\.json cannot be read.*restore it, or delete this directory"
    await refused(f"nvme://{tmp_path}?capacity=2MiB&segment=64KiB", StoreUnusableError, says)
    assert [path.name for path in tmp_path.glob("*/")] == [meta.parent.name]
    meta.write_bytes(whole)
    async with opened(tmp_path) as backend:
        blocks = make_blocks(3, [4096])
        assert await load(backend, sizes(blocks)) == blocks
