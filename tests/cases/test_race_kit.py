"""Cases of kinds RACE, RESTART and GDS that are a backend's to keep."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv import registry
from tierkv.backend import Backend
from tierkv.blocks import HASH_BYTES, Keys, Outcome
from tierkv.testing import (
    agree_at_once,
    assert_same,
    empty_batch,
    load,
    make_batch,
    make_blocks,
    make_context,
    save,
    sizes,
)
from tierkv_backends.file import names

MIB = 1 << 20


@contextlib.asynccontextmanager
async def opened(
    url: str,
    block_bytes: Sequence[int] = (4096,),
    retire: Callable[[Keys], Awaitable[None]] = agree_at_once,
) -> AsyncIterator[Backend]:
    backend = registry.make_backend(url)
    await backend.open(make_context(block_bytes, retire=retire))
    try:
        yield backend
    finally:
        await backend.close()


async def test_case_094_evicting_a_file_already_gone_corrects_the_books(
    tmp_path: pathlib.Path,
) -> None:
    async with opened(f"file://{tmp_path}?capacity=10MiB", [MIB]) as backend:
        first = make_blocks(8, [MIB])
        await save(backend, first)
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        second = make_blocks(8, [MIB], first=100)
        assert set((await save(backend, second)).values()) == {Outcome.DONE}
        there = [key async for keys in backend.scan() for key in keys]
        usage = await backend.usage()
        assert usage.blocks == len(there)
        assert usage.payload_bytes == len(there) * MIB
        assert usage.physical_bytes == len(there) * (MIB + 4096)
        assert_same(await load(backend, sizes(second)), second)


async def test_case_095_a_read_beside_deletes_gives_everything_or_a_miss(
    tier: Callable[[], str],
) -> None:
    blocks = make_blocks(1, [4096])
    (key,) = blocks
    seen: set[bytes | Outcome] = set()

    async def delete_and_write(backend: Backend) -> None:
        for _ in range(200):
            await backend.delete(Keys.of([key]))
            await save(backend, blocks)

    async with opened(tier()) as backend:
        other = asyncio.create_task(delete_and_write(backend))
        while not other.done():
            seen |= set((await load(backend, sizes(blocks))).values())
            await asyncio.sleep(0)  # a miss may be answered without waiting: let the other go on
        await other
        seen |= set((await load(backend, sizes(blocks))).values())
    assert {blocks[key]} <= seen <= {blocks[key], Outcome.MISSING}


async def test_case_098_a_buffer_reused_after_a_cancelled_read_keeps_its_new_bytes(
    tier: Callable[[], str],
) -> None:
    blocks = make_blocks(2, [MIB])
    (k, j) = blocks
    async with opened(tier(), [MIB]) as backend:
        await save(backend, blocks)
        for turns in range(12):
            batch = empty_batch({k: MIB})
            task = asyncio.ensure_future(backend.read(batch))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            again = make_batch({j: blocks[j]})
            batch.payload(0)[:] = again.payload(0)  # the slot's next owner
            await load(backend, sizes(blocks))
            assert bytes(batch.payload(0)) == blocks[j]


async def test_case_129_a_file_deleted_under_us_is_promised_no_more(
    tmp_path: pathlib.Path,
) -> None:
    blocks = make_blocks(4, [4096])
    gone = list(blocks)[2]
    async with opened(f"file://{tmp_path}?capacity=64MiB") as backend:
        await save(backend, blocks)
        (path,) = tmp_path.rglob(f"{gone[1].hex()}.kv")
        path.unlink()
        assert_same(await load(backend, sizes(blocks)), {**blocks, gone: Outcome.MISSING})
        assert (await backend.contains(Keys.of(blocks))).tolist() == [True, True, False, True]
        usage = await backend.usage()
        assert (usage.blocks, usage.physical_bytes) == (3, 3 * 8192)
        await save(backend, blocks)
        assert_same(await load(backend, sizes(blocks)), blocks)


async def test_case_129_making_room_spares_what_is_in_use(tmp_path: pathlib.Path) -> None:
    used = make_blocks(8, [MIB])
    asked: asyncio.Queue[Keys] = asyncio.Queue()
    loads_done = asyncio.Event()

    async def retire(keys: Keys) -> None:
        asked.put_nowait(keys)
        await loads_done.wait()

    async with opened(f"file://{tmp_path}?capacity=10MiB", [MIB], retire) as backend:
        await save(backend, used)
        writing = asyncio.create_task(save(backend, make_blocks(4, [MIB], first=100)))
        await asked.get()
        assert_same(await load(backend, sizes(used)), used)
        loads_done.set()
        assert set((await writing).values()) == {Outcome.DONE}
        usage = await backend.usage()
        assert usage.physical_bytes <= usage.capacity_bytes


@settings(deadline=None)
@given(group=st.integers(0, 65_535), block_hash=st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES))
def test_case_160_a_path_is_turned_back_into_its_key(group: int, block_hash: bytes) -> None:
    assert names.key_of(names.path_of((group, block_hash))) == (group, block_hash)


def test_case_160_ten_thousand_keys_have_ten_thousand_paths() -> None:
    keys = [(i % 7, os.urandom(HASH_BYTES)) for i in range(10_000)]
    paths = [names.path_of(key) for key in keys]
    assert len(set(paths)) == len(keys)
    assert [names.key_of(path) for path in paths] == keys


@pytest.mark.parametrize(
    "path",
    ["", "0/ab/x.kv", "a@b/cd/ef.kv", "0/ab/" + "ab" * 31 + ".kv", "0/ff/" + "ab" * 32 + ".kv",
     "00/ab/" + "ab" * 32 + ".kv", "0/ab/" + "AB" * 32 + ".kv", "0/ab/" + "ab" * 32 + ".0.tmp",
     "99999/ab/" + "ab" * 32 + ".kv"],
)  # fmt: skip
def test_case_160_no_other_name_is_taken_for_a_key(path: str) -> None:
    assert names.key_of(path) is None
