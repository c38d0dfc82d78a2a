"""Cases of kinds DURA and HASH that are a backend's to keep, held against every registered one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
from collections.abc import AsyncIterator, Callable

import aiofiles.os
import pytest

from tierkv import registry
from tierkv.backend import Backend
from tierkv.blocks import Keys, Outcome
from tierkv.errors import StoreBusyError
from tierkv.record import verify_sync
from tierkv.testing import (
    FaultyBackend,
    Lie,
    assert_same,
    empty_batch,
    load,
    make_blocks,
    make_context,
    make_key,
    make_payload,
    save,
    sizes,
)

BYTES = [4096, 600]


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Backend]:
    backend = registry.make_backend(url)
    await backend.open(make_context(BYTES))
    try:
        yield backend
    finally:
        await backend.close()


async def scanned(backend: Backend) -> set[tuple[int, bytes]]:
    return {key async for keys in backend.scan() for key in keys}


async def test_case_020_a_miss_answered_before_a_write_does_not_stick(
    tier: Callable[[], str],
) -> None:
    blocks = make_blocks(3, BYTES)
    keys = Keys.of(blocks)
    async with opened(tier()) as backend:
        assert not (await backend.contains(keys)).any()
        await save(backend, blocks)
        assert (await backend.contains(keys)).all()
        second = registry.make_backend(tier())
        with contextlib.suppress(StoreBusyError):  # refused is right too; a stale "no" is not
            await second.open(make_context(BYTES))
            assert second.scheme == "memory", "a second owner of one store"
        await second.close()


@pytest.mark.parametrize("how", [Outcome.FAILED, Lie.FLIP_BIT, Lie.SHORT])
async def test_case_074_one_failed_block_is_told_and_its_bytes_never_pass(
    tier: Callable[[], str], how: Outcome | Lie
) -> None:
    blocks = make_blocks(8, BYTES)
    third = list(blocks)[3]
    async with opened(tier()) as inner:
        await save(inner, blocks)
        faulty = FaultyBackend(inner)
        faulty.fail("read", how, where=lambda key: key == third)
        batch = empty_batch(sizes(blocks))
        outcomes = (await faulty.read(batch)).tolist()
        good = verify_sync(batch.keys, batch.records, batch.payloads()).tolist()
        proven = [o == Outcome.DONE and g for o, g in zip(outcomes, good, strict=True)]
        assert proven == [key != third for key in blocks]


async def test_case_074_a_file_that_cannot_be_read_fails_alone(tmp_path: pathlib.Path) -> None:
    blocks = make_blocks(8, BYTES)
    third = list(blocks)[3]
    async with opened(f"file://{tmp_path}?capacity=64MiB") as backend:
        await save(backend, blocks)
        (path,) = tmp_path.rglob(f"{third[0]}/*/{third[1].hex()}.kv")
        path.unlink()
        path.mkdir()  # opening it is an error, not a miss
        assert_same(await load(backend, sizes(blocks)), {**blocks, third: Outcome.FAILED})
        assert (await backend.contains(Keys.of([third]))).all(), "a transient error forgets nothing"


async def test_case_077_what_is_listed_can_be_read_and_what_failed_is_listed_nowhere(
    tier: Callable[[], str],
) -> None:
    blocks = make_blocks(1000, [64, 80])
    refused = set(list(blocks)[::10])
    async with opened(tier()) as inner:
        faulty = FaultyBackend(inner)
        faulty.fail("write", Outcome.FAILED, where=lambda key: key in refused)
        outcomes = await save(faulty, blocks)
        assert {key for key, o in outcomes.items() if o is Outcome.FAILED} == refused
        found = await load(inner, sizes(blocks))
        readable = {key for key, data in found.items() if isinstance(data, bytes)}
        assert await scanned(inner) == readable == blocks.keys() - refused


@pytest.mark.parametrize(
    ("code", "answer"), [(errno.EIO, Outcome.FAILED), (errno.ENOSPC, Outcome.DECLINED)]
)
async def test_case_077_files_that_fail_to_appear_are_listed_nowhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int, answer: Outcome
) -> None:
    blocks = make_blocks(100, [64])
    refused = {key[1].hex() for key in list(blocks)[::10]}
    rename = aiofiles.os.replace

    async def failing(source: pathlib.Path, target: pathlib.Path, **options: object) -> None:
        if target.stem in refused:
            raise OSError(code, os.strerror(code), str(target))
        await rename(source, target, **options)  # type: ignore[arg-type] # its stub names them all

    async with opened(f"file://{tmp_path}?capacity=64MiB") as backend:
        with monkeypatch.context() as patch:
            patch.setattr(aiofiles.os, "replace", failing)
            outcomes = await save(backend, blocks)
        assert {k[1].hex() for k, o in outcomes.items() if o is answer} == refused
        assert {k[1].hex() for k in await scanned(backend)} & refused == set()
        assert not list(tmp_path.rglob("*.tmp"))
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}


async def test_case_079_no_name_is_too_long_for_a_file_system(tmp_path: pathlib.Path) -> None:
    key = make_key(1, group=65_535)
    blocks = {key: make_payload(key, 100)}
    context = dataclasses.replace(
        make_context([100], rank=10**6, data_parallel_rank=10**6),
        namespace_text="organisation/" + "m" * 300,
    )
    backend = registry.make_backend(f"file://{tmp_path}?capacity=64MiB")
    await backend.open(context)
    assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
    assert_same(await load(backend, sizes(blocks)), blocks)
    temporary = f"{key[1].hex()}.{10**12}.tmp"
    components = {part for path in tmp_path.rglob("*") for part in path.parts} | {temporary}
    assert max(len(part.encode()) for part in components) <= 100
    await backend.close()


async def test_case_080_few_blocks_at_a_time_are_all_kept(tier: Callable[[], str]) -> None:
    blocks = make_blocks(35, BYTES)
    async with opened(tier()) as backend:
        for key, data in blocks.items():
            assert await save(backend, {key: data}) == {key: Outcome.DONE}
        assert_same(await load(backend, sizes(blocks)), blocks)
    async with opened(tier()) as backend:
        kept = blocks.keys() if backend.scheme != "memory" else set()
        assert await scanned(backend) == kept


async def test_case_081_an_existing_key_does_not_fail_its_batch(tier: Callable[[], str]) -> None:
    old = make_blocks(1, BYTES)
    batch = make_blocks(3, BYTES, variant=1)
    async with opened(tier()) as backend:
        await save(backend, old)
        assert set((await save(backend, batch)).values()) == {Outcome.DONE}
        assert set((await save(backend, batch)).values()) == {Outcome.DONE}
        assert_same(await load(backend, sizes(batch)), {**batch, **old})
