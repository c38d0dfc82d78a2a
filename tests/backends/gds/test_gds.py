"""One format, two backends; device memory; and kvikio's settings. Real kvikio, stub driver."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.backend import DeviceBatch, DeviceMemory, DevicePath, SupportsDeviceIO
from tierkv.blocks import Outcome
from tierkv.errors import ConfigError, StoreBusyError, StoreError
from tierkv.record import verify_sync
from tierkv.registry import make_backend
from tierkv.testing import empty_batch, load, make_batch, make_blocks, save, sizes

pytestmark = pytest.mark.usefixtures("cuda_stub")

BYTES = (4096, 700, 9000)


@pytest.mark.parametrize(("writer", "reader"), [("gds", "nvme"), ("nvme", "gds"), ("gds", "gds")])
async def test_what_one_backend_wrote_the_other_serves(
    tmp_path: Path, opened: Any, writer: str, reader: str
) -> None:
    first, then = make_blocks(30, BYTES), make_blocks(30, BYTES, first=100)
    async with opened(writer, tmp_path, block_bytes=BYTES) as backend:
        await save(backend, first)
    async with opened(reader, tmp_path, block_bytes=BYTES) as backend:
        assert await load(backend, sizes(first)) == first
        await save(backend, then)
    async with opened(writer, tmp_path, block_bytes=BYTES) as backend:
        assert await load(backend, sizes(first | then)) == first | then


async def test_both_take_the_same_lock(tmp_path: Path, opened: Any) -> None:
    async with opened("gds", tmp_path):
        with pytest.raises(StoreBusyError):
            async with opened("nvme", tmp_path):
                pass


async def test_the_mode_is_compat_and_says_why(tmp_path: Path, opened: Any) -> None:
    async with opened("gds", tmp_path) as backend:
        modes = (await backend.usage()).modes
        assert (modes["mode"], modes["io"]) == ("compat", "kvikio")
        assert "cuFile" in modes["reason"]
        assert "threads 4" in modes["kvikio"]
        assert backend.device_path is DevicePath.BOUNCE
        assert modes["alignment"] == "4096"


async def test_nvme_takes_kvikio_for_its_engine(tmp_path: Path, opened: Any) -> None:
    blocks = make_blocks(30, BYTES)
    async with opened("nvme", tmp_path, "&engine=kvikio", block_bytes=BYTES) as backend:
        assert (await backend.usage()).modes["io"] == "kvikio"
        await save(backend, blocks)
        assert await load(backend, sizes(blocks)) == blocks
    async with opened("nvme", tmp_path, block_bytes=BYTES) as backend:
        assert (await backend.usage()).modes["io"] == "threads"
        assert await load(backend, sizes(blocks)) == blocks


async def test_payload_goes_through_kvikio_and_past_the_page_cache(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvikio

    moved: list[int] = []
    real = kvikio.CuFile.pwrite

    def pwrite(file: Any, buffer: Any, nbytes: int, offset: int) -> Any:
        moved.append(nbytes)
        return real(file, buffer, nbytes, offset)

    monkeypatch.setattr(kvikio.CuFile, "pwrite", pwrite)
    async with opened("gds", tmp_path) as backend:
        await save(backend, make_blocks(8, [4096]))
        assert "direct reads yes" in (await backend.usage()).modes["kvikio"]
    assert sum(moved) == 8 * 4096


async def test_no_transfer_is_spent_on_what_lies_between_blocks(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvikio

    moved: list[int] = []
    real = kvikio.CuFile.pread

    def pread(file: Any, buffer: Any, nbytes: int, offset: int) -> Any:
        moved.append(nbytes)
        return real(file, buffer, nbytes, offset)

    async with opened("gds", tmp_path) as backend:
        blocks = make_blocks(40, [4096])
        await save(backend, blocks)
        monkeypatch.setattr(kvikio.CuFile, "pread", pread)
        part = dict(list(blocks.items())[::2])
        assert await load(backend, sizes(part)) == part
    assert moved == [4096] * 20


async def test_neighbours_in_the_arena_are_one_transfer(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierkv_backends.gds.engine import pieces

    arena = memoryview(mmap.mmap(-1, 1 << 16))
    parts = [arena[0:4096], arena[4096:8192], arena[12288:16384], arena[16384:20480]]
    assert [piece.nbytes for piece in pieces(parts, 1 << 20)] == [8192, 8192]
    assert [piece.nbytes for piece in pieces(parts, 5000)] == [5000]
    device = DeviceMemory(base=1 << 32, base_nbytes=1 << 16)
    there = [device[0:4096], device[4096:8192], device[12288:16384]]
    assert [piece.nbytes for piece in pieces(there, 1 << 20)] == [8192, 4096]
    other = DeviceMemory(base=(1 << 32) + 8192, base_nbytes=4096)
    assert len(pieces([there[1], other[:]], 1 << 20)) == 2, "two allocations are never one"


@settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the stub, which stays as it is
)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=5))
def test_a_part_of_device_memory_is_that_of_a_memoryview(cuts: list[tuple[int, int]]) -> None:
    host = memoryview(bytes(range(100)))
    device = DeviceMemory(base=1000, base_nbytes=100)
    for first, last in cuts:
        host, device = host[first:last], device[first:last]
        assert device.nbytes == host.nbytes
        assert not host.nbytes or device.address == 1000 + host[0]
    with pytest.raises(ValueError, match="no step"):
        device[::2]


@pytest.fixture
def staging() -> Iterator[tuple[mmap.mmap, DeviceMemory]]:
    """Host memory that poses as a GPU's."""
    with mmap.mmap(-1, 1 << 20) as memory:
        base = np.frombuffer(memory, np.uint8).ctypes.data
        yield memory, DeviceMemory(base=base, base_nbytes=1 << 20, stream=2)


async def test_device_memory_is_written_and_read_and_meets_the_arena(
    tmp_path: Path, opened: Any, staging: tuple[mmap.mmap, DeviceMemory]
) -> None:
    memory, device = staging
    blocks = make_blocks(12, BYTES)
    source = make_batch(blocks)
    for i, payload in enumerate(source.payloads()):
        memory[65536 + i * 12288 : 65536 + i * 12288 + len(payload)] = payload
    arena = device[65536:]
    offsets = np.arange(12, dtype=np.int64) * 12288
    async with opened("gds", tmp_path, block_bytes=BYTES) as backend:
        assert isinstance(backend, SupportsDeviceIO)
        await backend.register_device(device)
        out = DeviceBatch(source.keys, source.records, arena, offsets, source.nbytes)
        assert set(await backend.write_device(out)) == {Outcome.DONE}
        assert await load(backend, sizes(blocks)) == blocks, "from device memory to the arena"

        memory[:] = bytes(len(memory))
        wanted = empty_batch(sizes(blocks))
        back = DeviceBatch(wanted.keys, wanted.records, arena, offsets, wanted.nbytes)
        assert set(await backend.read_device(back)) == {Outcome.DONE}
        payloads = [
            memoryview(memory)[65536 + a : 65536 + a + n]
            for a, n in zip(offsets.tolist(), wanted.nbytes.tolist(), strict=True)
        ]
        assert verify_sync(back.keys, back.records, payloads).all()
        for payload in payloads:
            payload.release()
        await backend.unregister_device(device)


async def test_a_segment_that_was_cut_short_is_a_miss_and_fails_no_neighbour(
    tmp_path: Path, opened: Any
) -> None:
    blocks = make_blocks(8, [4096])
    async with opened("gds", tmp_path) as backend:
        await save(backend, blocks)
        (segment,) = tmp_path.glob("*/seg-00000001.tkv")
        os.truncate(segment, 4096 + 4096 + 3 * 4096 + 100)
        found = await load(backend, sizes(blocks))
        keys = list(blocks)
        assert [found[key] == blocks[key] for key in keys] == [True] * 3 + [False] * 5
        assert {found[key] for key in keys[3:]} == {Outcome.MISSING}


async def test_an_error_of_the_disk_fails_blocks_and_keeps_its_number(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierkv_backends.gds.engine import _as_os_error

    words = f"KvikIO failure at: x.hpp:1: POSIX error on pwrite: {os.strerror(errno.ENOSPC)}"
    assert _as_os_error(RuntimeError(words)).errno == errno.ENOSPC
    assert _as_os_error(RuntimeError("CUDA error at: y")).errno == errno.EIO

    import kvikio

    def refuse(*arguments: Any) -> Any:
        raise RuntimeError(words)

    blocks = make_blocks(4, [4096])
    async with opened("gds", tmp_path) as backend:
        with monkeypatch.context() as patch:
            patch.setattr(kvikio.CuFile, "pwrite", refuse)
            assert set((await save(backend, blocks)).values()) == {Outcome.FAILED}
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
        with monkeypatch.context() as patch:
            patch.setattr(kvikio.CuFile, "pread", refuse)
            assert set((await load(backend, sizes(blocks))).values()) == {Outcome.FAILED}
        assert await load(backend, sizes(blocks)) == blocks


async def test_when_one_transfer_fails_the_others_are_waited_for(tmp_path: Path) -> None:
    from tierkv_backends.gds.engine import KvikioEngine, Settings
    from tierkv_backends.gds.modes import Mode

    waited: list[int] = []

    class Future:
        def __init__(self, number: int) -> None:
            self.number = number

        def get(self) -> int:
            waited.append(self.number)
            if self.number == 0:
                raise RuntimeError("broken: Input/output error")
            return 4096

    def start(buffer: Any, nbytes: int, offset: int) -> Future:
        if offset == 3 * 4096:
            raise RuntimeError("never begun")
        return Future(offset // 4096)

    engine = KvikioEngine(Settings(threads=1, direct=True, compat=True), Mode.COMPAT)
    arena = memoryview(mmap.mmap(-1, 1 << 16))
    try:
        from tierkv_backends.gds.engine import pieces

        parts = pieces([arena[i * 8192 : i * 8192 + 4096] for i in range(5)], 1 << 16)
        with pytest.raises(OSError, match="never begun"):
            engine._all_sync(parts, 0, start, start)
    finally:
        engine.close_sync()
    assert waited == [0, 1, 2]


async def test_device_memory_goes_by_its_base_and_stream_where_cufile_moves_it(
    tmp_path: Path,
) -> None:
    from tierkv_backends.gds.engine import KvikioEngine, Settings, pieces
    from tierkv_backends.gds.modes import Mode

    calls: list[tuple[Any, ...]] = []

    class Future:
        def check_bytes_done(self) -> int:
            return 4096

    def streamed(array: Any, stream: int, nbytes: int, offset: int, start: int) -> Future:
        where = array.__cuda_array_interface__
        calls.append((where["data"][0], where["shape"], stream, nbytes, offset, start))
        return Future()

    device = DeviceMemory(base=1 << 32, base_nbytes=1 << 16, stream=77)
    engine = KvikioEngine(Settings(threads=1, direct=True, compat=True), Mode.GDS)
    try:
        parts = pieces([device[8192:12288]], 1 << 16)
        assert engine._all_sync(parts, 4096, streamed, streamed) == 4096
    finally:
        engine.close_sync()
    assert calls == [(1 << 32, (1 << 16,), 77, 4096, 4096, 8192)]


async def test_two_stores_with_other_settings_are_not_open_at_once(
    tmp_path: Path, opened: Any
) -> None:
    async with opened("gds", tmp_path / "a"), opened("nvme", tmp_path / "b", "&engine=kvikio"):
        with pytest.raises(StoreError, match="hold for the whole process"):
            async with opened("gds", tmp_path / "c", "&threads=2"):
                pass
    async with opened("gds", tmp_path / "c", "&threads=2") as backend:
        assert "threads 2" in (await backend.usage()).modes["kvikio"]


async def test_a_failed_open_gives_kvikio_back(tmp_path: Path, opened: Any) -> None:
    async with opened("nvme", tmp_path):
        with pytest.raises(StoreBusyError):
            async with opened("gds", tmp_path, "&threads=3"):
                pass
    async with opened("gds", tmp_path, "&threads=2"):
        pass


async def test_mode_gds_refuses_what_is_less(tmp_path: Path, opened: Any) -> None:
    with pytest.raises(StoreError, match=r"mode=gds, but only compat works here: .*mode=auto"):
        async with opened("gds", tmp_path, "&mode=gds"):
            pass


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gds:///x?mode=gsd", "mode=gsd (did you mean 'gds'?); write one of auto, gds"),
        ("gds:///x?engine=kvikio", "unknown option 'engine'"),
        ("nvme:///x?engine=uring", "engine=uring; write one of threads, kvikio"),
        ("nvme:///x?mode=gds", "unknown option 'mode'"),
    ],
)
def test_a_bad_option_gets_one_clear_line(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_backend(url)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_no_descriptor_is_left_behind(tmp_path: Path, opened: Any) -> None:
    async with opened("gds", tmp_path) as backend:  # what loads once is loaded
        await save(backend, make_blocks(40, [4096]))
    before = len(os.listdir("/proc/self/fd"))
    async with opened("gds", tmp_path) as backend:
        await save(backend, make_blocks(200, [4096], first=100))
        assert len(os.listdir("/proc/self/fd")) > before
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_kvikio_is_not_loaded_by_nvme_nor_by_a_url(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from tierkv.registry import make_backend\n"
        "make_backend('gds:///nowhere'); make_backend('nvme:///nowhere')\n"
        "print('kvikio' in sys.modules, 'torch' in sys.modules)"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert out.decode().split() == ["False", "False"]
