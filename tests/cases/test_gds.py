"""Cases of kind GDS, and 115, with the real kvikio over the stub driver.

155 (a disk hit slower than recomputing) is the side's that decides: see the connector's tests of
what is worth loading. 160 speaks of names of files: here a key is a row of an extent's table.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import Backend
from tierkv.blocks import Outcome
from tierkv.errors import StoreError
from tierkv.registry import make_backend
from tierkv.testing import Key, load, make_blocks, make_context, save, sizes
from tierkv_backends.gds import probe

SMALL = "capacity=4MiB&segment=256KiB"


async def opened(root: Path, more: str = "", *, block_bytes: tuple[int, ...] = (4096,)) -> Backend:
    backend = make_backend(f"gds://{root}?{SMALL}{more}")
    await backend.open(make_context(block_bytes))
    return backend


@pytest.mark.usefixtures("cuda_stub")
async def test_case_154_without_gds_the_bounce_path_is_taken_and_told(tmp_path: Path) -> None:
    blocks = make_blocks(6, [4096])
    backend = await opened(tmp_path)
    await save(backend, blocks)
    assert await load(backend, sizes(blocks)) == blocks
    modes = (await backend.usage()).modes
    await backend.close()
    assert modes["mode"] == "compat"
    assert modes["reason"]
    with pytest.raises(StoreError, match="mode=gds, but only compat works here") as caught:
        await opened(tmp_path, "&mode=gds")
    assert "\n" not in str(caught.value)


async def test_case_154_without_any_driver_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_known", {})
    blocks = make_blocks(6, [4096])
    backend = await opened(tmp_path)
    await save(backend, blocks)
    assert await load(backend, sizes(blocks)) == blocks
    modes = (await backend.usage()).modes
    await backend.close()
    assert (modes["mode"], modes["io"]) == ("host", "threads")
    assert "libcuda.so.1 was not found" in modes["reason"]
    with pytest.raises(StoreError, match="mode=gds, but only host works here"):
        await opened(tmp_path, "&mode=gds")


@pytest.fixture
def on_tmpfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a tmpfs, which takes O_DIRECT and ignores it, or refuses it."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.usefixtures("cuda_stub")
async def test_case_156_on_tmpfs_it_is_buffered_and_the_bytes_are_the_same(on_tmpfs: Path) -> None:
    blocks = make_blocks(20, [4096, 700])
    backend = await opened(on_tmpfs, block_bytes=(4096, 700))
    await save(backend, blocks)
    assert await load(backend, sizes(blocks)) == blocks
    modes = (await backend.usage()).modes
    await backend.close()
    assert modes["direct"].startswith("no (")
    assert modes["io"] == "kvikio"
    backend = await opened(on_tmpfs, block_bytes=(4096, 700))
    assert await load(backend, sizes(blocks)) == blocks
    await backend.close()


@pytest.mark.usefixtures("cuda_stub")
async def test_case_159_after_a_restart_everything_is_contained(tmp_path: Path) -> None:
    blocks = make_blocks(100, [4096])
    backend = await opened(tmp_path)
    assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
    await backend.close()
    for snapshot in tmp_path.glob("*/snapshot*"):
        snapshot.unlink()  # and from what lies beside the data, too
    backend = await opened(tmp_path)
    keys = [key async for part in backend.scan() for key in part]
    assert sorted(keys) == sorted(blocks)
    assert await load(backend, sizes(blocks)) == blocks
    await backend.close()


@pytest.mark.usefixtures("cuda_stub")
async def test_case_160_ten_thousand_keys_come_back_as_they_were(tmp_path: Path) -> None:
    source = random.Random(160)
    odd = (b"/", b"@", b"\0", b"..", "ü".encode(), b"\n", b"%2F")
    keys: list[Key] = [
        (source.randrange(3), (odd[i % len(odd)] + source.randbytes(32))[:32])
        for i in range(10_000)
    ]
    blocks = {key: key[1][:16] for key in keys}
    backend = make_backend(f"gds://{tmp_path}?capacity=128MiB&segment=16MiB")
    await backend.open(make_context((16, 16, 16)))
    assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
    await backend.close()
    backend = make_backend(f"gds://{tmp_path}?capacity=128MiB&segment=16MiB")
    await backend.open(make_context((16, 16, 16)))
    assert {key async for part in backend.scan() for key in part} == set(keys)
    assert await load(backend, sizes(blocks)) == blocks
    await backend.close()


@pytest.mark.usefixtures("cuda_stub")
async def test_case_115_a_transfer_that_hangs_stops_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvikio

    hangs, go_on = threading.Event(), threading.Event()
    real = kvikio.CuFile.pread

    class Hanging:
        def __init__(self, future: Any) -> None:
            self.future = future

        def get(self) -> int:
            hangs.set()
            go_on.wait()
            return int(self.future.get())

    blocks, more = make_blocks(4, [4096]), make_blocks(4, [4096], first=50)
    backend = await opened(tmp_path)
    await save(backend, blocks)
    monkeypatch.setattr(kvikio.CuFile, "pread", lambda *a: Hanging(real(*a)))
    try:
        stuck = asyncio.create_task(load(backend, sizes(blocks)))
        await asyncio.to_thread(hangs.wait)
        monkeypatch.setattr(kvikio.CuFile, "pread", real)
        assert set((await save(backend, more)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(more)) == more
        assert (await backend.usage()).blocks == 8
        stuck.cancel()
        await asyncio.sleep(0)
        assert not stuck.done(), "its buffers are still kvikio's"
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    await backend.close()
