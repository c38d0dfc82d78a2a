"""The arena: shared, aligned, never more than there is, and gone with its processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tierkv import pinned
from tierkv.errors import CapacityError, StoreUnusableError
from tierkv.pinned import Arena

MIB = 1 << 20


def test_two_mappings_of_one_arena_show_the_same_bytes() -> None:
    with Arena.create(MIB) as ours, Arena.attach(os.dup(ours.fd), MIB) as theirs:
        ours.view[4096:4100] = b"abcd"
        assert theirs.view[4096:4100] == b"abcd"
        theirs.view[0] = 7
        assert ours.view[0] == 7


def test_the_view_is_page_aligned_and_as_long_as_asked() -> None:
    with Arena.create(MIB) as arena:
        address = np.frombuffer(arena.view, np.uint8).ctypes.data
        assert address % 4096 == 0
        assert len(arena) == arena.view.nbytes == MIB
        assert not arena.view.readonly


def named() -> set[str]:
    """What of ours has a name in shared memory; doctor's probes, gone at once, do not count."""
    return {n for n in os.listdir("/dev/shm") if "tierkv" in n and "probe" not in n}


def test_the_arena_has_no_name_that_could_be_left_behind() -> None:
    with Arena.create(MIB) as arena:
        assert os.fstat(arena.fd).st_nlink == 0
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{arena.fd}")
        assert not os.get_inheritable(arena.fd)


def test_prefault_takes_the_memory_at_once() -> None:
    with Arena.create(MIB) as lazy, Arena.create(MIB, prefault=True) as taken:
        assert os.fstat(lazy.fd).st_blocks == 0
        assert os.fstat(taken.fd).st_blocks * 512 == MIB


@pytest.mark.parametrize("nbytes", [4 * MIB, 5 * MIB + 4096, 64 * MIB])
def test_an_arena_lies_where_huge_pages_can_and_all_of_it_is_there_and_zero(nbytes: int) -> None:
    with (
        Arena.create(nbytes, prefault=True) as ours,
        Arena.attach(os.dup(ours.fd), nbytes) as their,
    ):
        assert os.fstat(ours.fd).st_blocks * 512 == nbytes
        for arena in (ours, their):
            bytes_of = np.frombuffer(arena.view, np.uint8)
            assert bytes_of.ctypes.data % pinned.HUGE_PAGE == 0
            assert not bytes_of.any()
            del bytes_of


def test_without_huge_pages_the_memory_is_taken_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "_MADV_COLLAPSE", 9999)  # a kernel that does not know it
    with Arena.create(5 * MIB, prefault=True) as arena:
        assert os.fstat(arena.fd).st_blocks * 512 == 5 * MIB


@pytest.mark.parametrize("nbytes", [0, -4096, 100, 4097])
def test_a_size_that_is_not_whole_pages_is_refused(nbytes: int) -> None:
    with pytest.raises(CapacityError, match=f"{nbytes} bytes is not a multiple of 4096"):
        Arena.create(nbytes)


def test_more_than_the_machine_has_is_refused_by_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 3 * MIB)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match=f"needs {4 * MIB} .* only {3 * MIB} are free"):
        Arena.create(4 * MIB)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_container_limit_counts_where_it_is_lower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(pinned, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(pinned, "_CGROUP", tmp_path)
    assert pinned.available_bytes() == 1000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert pinned.available_bytes() == 1000 << 10
    (tmp_path / "memory.max").write_text("10000\n")
    assert pinned.available_bytes() == 10000 - 4096


def test_attaching_to_another_size_says_both_numbers() -> None:
    with Arena.create(MIB) as arena:
        fd = os.dup(arena.fd)
        with pytest.raises(StoreUnusableError, match=f"holds {MIB} bytes where {2 * MIB}"):
            Arena.attach(fd, 2 * MIB)
        os.close(fd)


def test_attaching_to_what_is_no_arena_is_refused() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(StoreUnusableError, match="not the arena it should be"):
        Arena.attach(read_end, MIB)
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(StoreUnusableError, match="is gone"):
        Arena.attach(read_end, MIB)


def test_close_with_views_about_leaves_them_whole() -> None:
    arena = Arena.create(MIB)
    part = arena.view[4096:8192]
    table = np.frombuffer(arena.view, np.uint8)
    part[:4] = b"live"
    fd = arena.fd
    arena.close()
    arena.close()
    assert part[:4] == b"live"
    assert table[4096] == ord("l")
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        _ = arena.view
    with pytest.raises(ValueError, match="closed"):
        _ = arena.fd


def test_closed_arenas_leave_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with Arena.create(MIB) as arena:
            arena.view[0] = 1
    assert len(os.listdir("/proc/self/fd")) == before


KEEPER = """
import os, sys
from tierkv.pinned import Arena
fd, nbytes = map(int, sys.argv[1:])
with Arena.attach(fd, nbytes) as arena:
    print("keeper sees", bytes(arena.view[:4]).decode(), flush=True)
    sys.stdin.read()  # until the worker's end of the pipe is gone
    print("worker is gone", bytes(arena.view[:4]).decode(), flush=True)
    sys.stdin.close()
    os.read(int(os.environ["TEST_PIPE"]), 1)
"""
WORKER = """
import os, subprocess, sys
from tierkv.pinned import Arena
nbytes = int(sys.argv[1])
arena = Arena.create(nbytes, prefault=True)
arena.view[:4] = b"live"
keeper = subprocess.Popen(
    [sys.executable, "-c", sys.argv[2], str(arena.fd), str(nbytes)],
    stdin=subprocess.PIPE, pass_fds=(arena.fd, int(os.environ["TEST_PIPE"])),
)
print(keeper.pid, os.fstat(arena.fd).st_ino, flush=True)
keeper.wait()
print("keeper is gone", bytes(arena.view[:4]).decode(), flush=True)
sys.stdin.read()
"""


def mapped_by(inode: int) -> set[int]:
    """Processes that map the arena with this inode."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [li.split() for li in maps.read_text().splitlines() if "tierkv-arena" in li]
        except OSError:  # it ended, or is somebody else's
            continue
        found |= {int(maps.parent.name) for fields in lines if int(fields[4]) == inode}
    return found


@pytest.mark.parametrize("first", ["worker", "keeper"])
def test_nothing_stays_in_shared_memory_when_either_process_is_killed(first: str) -> None:
    names, nbytes = named(), 64 * MIB
    hold, let_go = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(nbytes), KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(hold,),
        env={**os.environ, "TEST_PIPE": str(hold)},
    )
    os.close(hold)
    try:
        assert worker.stdin is not None and worker.stdout is not None
        lines = {worker.stdout.readline(), worker.stdout.readline()}
        assert "keeper sees live\n" in lines
        [numbers] = lines - {"keeper sees live\n"}
        keeper, inode = map(int, numbers.split())
        assert mapped_by(inode) == {worker.pid, keeper}
        if first == "worker":
            worker.kill()
            worker.wait()
            assert worker.stdout.readline() == "worker is gone live\n"
            assert mapped_by(inode) == {keeper}
            watch = os.pidfd_open(keeper)
            os.kill(keeper, signal.SIGKILL)
            assert select.select([watch], [], [], 60)[0]
            os.close(watch)
        else:
            os.kill(keeper, signal.SIGKILL)
            assert worker.stdout.readline() == "keeper is gone live\n"
            assert mapped_by(inode) == {worker.pid}
            worker.kill()
            worker.wait()
        assert not mapped_by(inode)
        assert not named() - names
    finally:
        worker.kill()
        worker.communicate()
        os.close(let_go)
