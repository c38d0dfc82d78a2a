"""A root is looked into and given up from outside, in use or not, without reading a payload."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import Eviction, Inspection, SupportsEvict, SupportsInspect
from tierkv.blocks import Keys
from tierkv.errors import StoreUnusableError
from tierkv.registry import make_backend
from tierkv.testing import make_blocks, save

Opened = Callable[..., Any]
BYTES = (4096, 700)
OTHER = b"\x02" * 32


async def inspected(root: Path) -> Inspection:
    backend = make_backend(f"nvme://{root}?capacity=2MiB")
    assert isinstance(backend, SupportsInspect)
    return await backend.inspect()


async def evicted(
    root: Path, *, namespace: bytes | None = None, keep_bytes: int = 0
) -> tuple[Eviction, list[tuple[int, int]]]:
    backend = make_backend(f"nvme://{root}")
    assert isinstance(backend, SupportsEvict)
    steps: list[tuple[int, int]] = []

    def step(freed: int, wanted: int) -> None:
        steps.append((freed, wanted))

    done = await backend.evict(step, namespace=namespace, keep_bytes=keep_bytes)
    return done, steps


def physical(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("seg-*"))


async def test_every_part_adds_up_to_what_lies_on_disk(tmp_path: Path, opened: Opened) -> None:
    for rank in range(2):
        async with opened(tmp_path, block_bytes=BYTES, rank=rank) as backend:
            await save(backend, make_blocks(30, BYTES))
    found = await inspected(tmp_path)
    assert [(part.namespace, part.rank, part.blocks) for part in found.parts] == [
        ("test 01010101", 0, 30),
        ("test 01010101", 1, 30),
    ]
    for part in found.parts:
        assert [(g.group, g.blocks, g.payload_bytes) for g in part.groups] == [
            (0, 15, 15 * 4096),
            (1, 15, 15 * 700),
        ]
        # 700 bytes are padded to 1024 or, where the device wants it so, to 4096.
        assert part.padding_bytes in (15 * 324, 15 * 3396)
        assert part.dead_bytes > 0  # the tables of the extents
        assert part.physical_bytes == (
            part.payload_bytes + part.padding_bytes + part.dead_bytes + part.unused_bytes
        )
        assert (part.owner, part.owner_pid, part.problem) == ("", None, "")
    assert sum(part.physical_bytes for part in found.parts) == physical(tmp_path)
    assert (found.capacity_bytes, found.unreadable) == (2 << 20, ())


async def test_the_listing_names_every_block_and_where_its_bytes_are(
    tmp_path: Path, opened: Opened
) -> None:
    blocks = make_blocks(7, BYTES)
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        await save(backend, blocks)
    (part,) = (await inspected(tmp_path)).parts
    listed = {(group, bytes.fromhex(text)): where for group, text, _, where in part.listing}
    assert set(listed) == set(blocks)
    for key, where in listed.items():
        path, _, offset = where.rpartition("+")
        data = Path(path).read_bytes()[int(offset) :]
        assert data[: len(blocks[key])] == blocks[key]


async def test_a_store_in_use_is_listed_and_says_by_whom(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(5, (4096,)))
        (part,) = (await inspected(tmp_path)).parts
        assert (part.blocks, part.owner_pid) == (5, os.getpid())
        assert (await backend.contains(Keys.of(make_blocks(5, (4096,))))).all()


async def test_looking_changes_nothing_not_even_what_is_cold(
    tmp_path: Path, opened: Opened, killed: Callable[[Path], Path]
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(5, (4096,)))
        copy = killed(tmp_path)
    for root in (tmp_path, copy):
        for path in root.rglob("seg-*"):
            os.utime(path, (1000, 2000))  # last read before it was written: a read would show
        before = {p: (p.read_bytes() if "seg" not in p.name else b"") for p in root.glob("*/*")}
        (part,) = (await inspected(root)).parts
        assert part.blocks == 5
        assert (part.oldest_use_s, part.newest_use_s) == (2000, 2000)
        assert {p.stat().st_atime for p in root.rglob("seg-*")} == {1000}
        assert {p: (p.read_bytes() if "seg" not in p.name else b"") for p in root.glob("*/*")} == (
            before
        )


async def test_what_cannot_be_read_is_said_and_still_counted(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(5, (4096,)))
    (meta,) = tmp_path.glob("*/meta.json")
    meta.write_text('{"format": 99}')
    found = await inspected(tmp_path)
    (part,) = found.parts
    assert (part.blocks, part.problem) == (0, "meta.json has another format")
    assert part.physical_bytes == physical(tmp_path)
    assert [skip.directory for skip in found.unreadable] == [part.directory]


async def test_a_root_that_holds_no_store_is_no_empty_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusableError, match="holds no nvme store"):
        await inspected(tmp_path)
    with pytest.raises(StoreUnusableError, match="no such directory"):
        await evicted(tmp_path / "absent")


async def test_only_the_namespace_that_was_named_goes(tmp_path: Path, opened: Opened) -> None:
    blocks = make_blocks(5, (4096,))
    for context in ({"rank": 0}, {"rank": 1}, {"namespace": OTHER}):
        async with opened(tmp_path, **context) as backend:
            await save(backend, blocks)
    before = physical(tmp_path)
    done, steps = await evicted(tmp_path, namespace=b"\x01" * 32)
    assert [one.namespace for one in done.evicted] == ["test 01010101"] * 2
    assert done.physical_bytes == physical(tmp_path) == before // 3
    freed = sum(one.freed_bytes for one in done.evicted)
    assert steps[-1] == (freed, freed) == (before - before // 3,) * 2
    (part,) = (await inspected(tmp_path)).parts
    assert (part.namespace_hex, part.blocks) == (OTHER.hex(), 5)


async def test_a_root_shrinks_to_a_size_the_coldest_segments_first(
    tmp_path: Path, opened: Opened, proven: Callable[..., Any]
) -> None:
    blocks = make_blocks(60, (4096,))
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
    paths = sorted(tmp_path.rglob("seg-*"))
    assert len(paths) >= 4
    for age, path in enumerate(reversed(paths)):  # the last one is the coldest
        os.utime(path, (1000 + age, 1000 + age))
    size = paths[0].stat().st_size
    done, _ = await evicted(tmp_path, keep_bytes=2 * size + 1)
    assert done.physical_bytes == 2 * size
    assert sorted(tmp_path.rglob("seg-*")) == paths[:2]
    (part,) = (await inspected(tmp_path)).parts
    async with opened(tmp_path) as backend:  # what is left is a whole store
        left = await proven(backend, {key: 4096 for key in blocks})
    assert 0 < part.blocks == len(left) < 60
    assert all(blocks[key] == payload for key, payload in left.items())


async def test_a_size_for_one_namespace_is_compared_with_what_that_one_takes(
    tmp_path: Path, opened: Opened
) -> None:
    blocks = make_blocks(60, (4096,))
    for context in ({"rank": 0}, {"namespace": OTHER}):
        async with opened(tmp_path, **context) as backend:
            await save(backend, blocks)
    sizes = {part.namespace_hex: part.physical_bytes for part in (await inspected(tmp_path)).parts}
    keep = sizes[OTHER.hex()] // 2
    done, steps = await evicted(tmp_path, namespace=OTHER, keep_bytes=keep)
    assert 0 < done.left_bytes <= keep
    after = {part.namespace_hex: part.physical_bytes for part in (await inspected(tmp_path)).parts}
    assert after == sizes | {OTHER.hex(): done.left_bytes}
    assert done.physical_bytes == physical(tmp_path) == sum(after.values())
    # What was wanted is known at once, and at least that much went: whole segments go.
    assert {wanted for _, wanted in steps} == {sizes[OTHER.hex()] - keep}
    assert steps[-1][0] == sizes[OTHER.hex()] - done.left_bytes >= steps[-1][1]
    again, steps = await evicted(tmp_path, namespace=OTHER, keep_bytes=sizes[OTHER.hex()])
    assert (again.evicted, steps) == ((), [])


async def test_what_an_owner_has_open_is_never_touched(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, rank=1) as backend:
        await save(backend, make_blocks(5, (4096,)))
    async with opened(tmp_path, rank=0) as backend:
        await save(backend, make_blocks(5, (4096,)))
        done, _ = await evicted(tmp_path)
        assert len(done.evicted) == 1
        (skip,) = done.skipped
        assert f"in use by pid {os.getpid()} " in skip.reason
        (part,) = (await inspected(tmp_path)).parts
        assert (part.rank, part.blocks, part.physical_bytes) == (0, 5, done.physical_bytes)


async def test_giving_up_everything_leaves_an_empty_root_that_opens_again(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path, rank=0):
        pass  # holds nothing, but has a directory
    async with opened(tmp_path, rank=1) as backend:
        await save(backend, make_blocks(5, (4096,)))
    done, _ = await evicted(tmp_path)
    assert (done.physical_bytes, done.skipped) == (0, ())
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]
    async with opened(tmp_path, rank=1) as backend:
        assert (await backend.usage()).blocks == 0
