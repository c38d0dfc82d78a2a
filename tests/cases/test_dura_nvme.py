"""Cases of kind DURA that the nvme backend must keep."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import Backend
from tierkv.blocks import Keys, Outcome
from tierkv.record import verify_sync
from tierkv.registry import make_backend
from tierkv.testing import (
    empty_batch,
    load,
    make_blocks,
    make_context,
    make_payload,
    save,
    sizes,
)


@contextlib.asynccontextmanager
async def opened(
    root: Path, block_bytes: Sequence[int] = (4096,), **context: Any
) -> AsyncIterator[Backend]:
    backend = make_backend(f"nvme://{root}?capacity=32MiB&segment=1MiB")
    await backend.open(make_context(block_bytes, **context))
    try:
        yield backend
    finally:
        await backend.close()


async def test_case_072_one_flipped_bit_on_media_does_not_verify_and_can_be_saved_anew(
    tmp_path: Path,
) -> None:
    blocks = make_blocks(8, [4096])
    bad = list(blocks)[3]
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
        (segment,) = tmp_path.glob("*/seg-*")
        data = segment.read_bytes()
        at = data.index(blocks[bad]) + 77
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 4]))
        batch = empty_batch(sizes(blocks))
        outcomes = await backend.read(batch)
        good = verify_sync(batch.keys, batch.records, batch.payloads())
        assert [bool(g) for g in good & (outcomes == Outcome.DONE)] == [k != bad for k in blocks]
        await backend.delete(Keys.of([bad]))  # what the mover does then
        await save(backend, {bad: blocks[bad]})
        assert await load(backend, sizes(blocks)) == blocks


async def test_case_077_with_one_write_in_ten_failing_what_is_listed_is_what_is_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, counter = os.pwritev, itertools.count(1)

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        if next(counter) % 10 == 0:
            raise OSError(errno.EIO, "one in ten")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    blocks = make_blocks(1000, [300])
    outcomes: dict[Any, Outcome] = {}
    async with opened(tmp_path, (300,)) as backend:
        items = list(blocks.items())
        for i in range(0, 1000, 20):
            outcomes |= await save(backend, dict(items[i : i + 20]))
        listed = {key async for keys in backend.scan() for key in keys}
        readable = {k for k, v in (await load(backend, sizes(blocks))).items() if v == blocks[k]}
    done = {key for key, outcome in outcomes.items() if outcome is Outcome.DONE}
    assert listed == readable == done
    assert 0 < len(done) < 1000


async def test_case_079_no_path_component_is_too_long_whatever_the_model_is_called(
    tmp_path: Path,
) -> None:
    backend = make_backend(f"nvme://{tmp_path}?capacity=32MiB&segment=1MiB")
    context = make_context([4096])
    long_name = type(context)(
        namespace=context.namespace,
        namespace_text="organization/" + "m" * 300 + "/" + "group" * 100 + "\n/../..",
        block_bytes=(4096,),
        retire=context.retire,
    )
    await backend.open(long_name)
    blocks = make_blocks(2, [4096])
    await save(backend, blocks)
    assert await load(backend, sizes(blocks)) == blocks
    await backend.close()
    names = [path.name for path in tmp_path.rglob("*")]
    assert max(map(len, names)) <= 64
    assert "m" * 300 in next(tmp_path.glob("*/meta.json")).read_text()


async def test_case_080_nothing_is_put_aside_to_fill_an_extent_later(tmp_path: Path) -> None:
    blocks = make_blocks(35, [4096])
    items = list(blocks.items())
    async with opened(tmp_path) as backend:
        for i in range(0, 35, 10):
            some = dict(items[i : i + 10])
            assert set((await save(backend, some)).values()) == {Outcome.DONE}
            assert await load(backend, sizes(some)) == some
    async with opened(tmp_path) as backend:
        assert await load(backend, sizes(blocks)) == blocks


async def test_case_081_an_existing_key_is_a_success_and_stays_as_it_was(tmp_path: Path) -> None:
    blocks = make_blocks(3, [4096])
    first, *_ = blocks
    async with opened(tmp_path) as backend:
        await save(backend, {first: blocks[first]})
        other = blocks | {first: make_payload(first, 4096, 1)}
        assert set((await save(backend, other)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(blocks)) == blocks
        (segment,) = tmp_path.glob("*/seg-*")
        assert segment.read_bytes().count(blocks[first]) == 1
