"""Whatever a kill, a cut or a flipped byte left behind: right bytes or a miss, nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.blocks import Keys, Outcome
from tierkv.testing import load, make_blocks, make_context, save, sizes
from tierkv.urls import TierURL
from tierkv_backends.nvme import NvmeBackend
from tierkv_backends.nvme.format import PAGE
from tierkv_backends.nvme.options import Options
from tierkv_backends.nvme.recovery import Meta, recover_sync

Opened = Callable[..., Any]
Killed = Callable[[Path], Path]
Segments = Callable[[Path], list[Path]]

BYTES = (4096, 700)


def stores(blocks: dict[Any, bytes]) -> list[dict[Any, bytes]]:
    """Blocks in batches of three, so that there are several extents."""
    items = list(blocks.items())
    return [dict(items[i : i + 3]) for i in range(0, len(items), 3)]


async def fill(backend: NvmeBackend, n: int) -> dict[Any, bytes]:
    blocks = make_blocks(n, BYTES)
    for some in stores(blocks):
        assert set((await save(backend, some)).values()) == {Outcome.DONE}
    return blocks


@pytest.mark.every_loop
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
async def test_a_restart_serves_every_block_over_several_segments(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments, clean: bool
) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        blocks = await fill(backend, 60)
        assert len(segments(tmp_path)) >= 3
        root = tmp_path if clean else killed(tmp_path)
    async with opened(root, block_bytes=BYTES) as backend:
        assert await load(backend, sizes(blocks)) == blocks
        assert (await backend.usage()).blocks == 60


async def test_a_clean_close_is_read_from_the_snapshot_and_a_killed_one_from_footers(
    tmp_path: Path, opened: Opened, killed: Killed
) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        await fill(backend, 60)
        after_kill = killed(tmp_path)
    for root, by_snapshot in ((tmp_path, True), (after_kill, False)):
        (directory,) = [p for p in root.iterdir() if p.is_dir()]
        meta = Meta.read_sync(directory)
        assert meta is not None
        found = recover_sync(directory, meta)
        assert found.from_snapshot is by_snapshot
        assert sum(len(s.rows) for s in found.segments) == 60
    async with opened(tmp_path, block_bytes=BYTES):
        assert not list(tmp_path.glob("*/snapshot")), "it must go before anything is written"


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
async def test_opening_reads_no_payload_but_that_of_the_last_extent_before_a_kill(
    tmp_path: Path, opened: Opened, killed: Killed, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    root = tmp_path
    async with opened(root, "capacity=32MiB&segment=4MiB", block_bytes=(1 << 20,)) as backend:
        await save(backend, make_blocks(9, [1 << 20]))
        root = root if clean else killed(root)
    read = 0
    pread = os.pread

    def counting(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal read
        data = pread(fd, nbytes, offset)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    async with opened(root, "capacity=32MiB&segment=4MiB", block_bytes=(1 << 20,)) as backend:
        assert (await backend.usage()).blocks == 9
    assert 0 < read - (0 if clean else 3 << 20) < 40 * PAGE


async def test_writing_goes_on_in_the_segment_that_was_active(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    blocks = make_blocks(6, [4096])
    for key, data in blocks.items():
        async with opened(tmp_path) as backend:
            await save(backend, {key: data})
    assert len(segments(tmp_path)) == 1
    async with opened(tmp_path) as backend:
        assert await load(backend, sizes(blocks)) == blocks


async def test_writing_goes_on_after_a_kill_and_survives_the_next_kill(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments
) -> None:
    root, blocks = tmp_path, make_blocks(6, [4096])
    for key, data in blocks.items():
        async with opened(root) as backend:
            await save(backend, {key: data})
            root = killed(root)
    assert len(segments(root)) == 1
    async with opened(root) as backend:
        assert await load(backend, sizes(blocks)) == blocks


async def test_cut_at_every_page_the_blocks_before_the_cut_are_served(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments, proven: Any
) -> None:
    async with opened(tmp_path) as backend:
        blocks = make_blocks(9, [4096])
        for some in stores(blocks):
            await save(backend, some)
        base = killed(tmp_path)
    served = []
    for cut in range(0, 65536, PAGE):
        root = killed(base)
        (segment,) = segments(root)
        os.truncate(segment, cut)
        async with opened(root) as backend:
            found = await proven(backend, sizes(blocks))
            assert found.items() <= blocks.items()
            assert (await backend.contains(Keys.of(found))).all()
            assert (await backend.usage()).blocks == len(found)
            served.append(len(found))
            await save(backend, blocks)
            assert await load(backend, sizes(blocks)) == blocks
    # Header page, then three times (extent header page, three payload pages).
    whole = [max(0, min(9, 3 * ((page - 1) // 4) + max(0, (page - 1) % 4 - 1))) for page in
             range(16)]  # fmt: skip
    assert served == whole


@pytest.mark.parametrize("arrived", [0, 1, 2, 3])
async def test_a_kill_in_an_extent_leaves_its_beginning_and_nothing_else(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments, arrived: int
) -> None:
    """The header is there, the blocks behind it only in part, as a cut write leaves them."""
    whole, cut = make_blocks(3, [4096]), make_blocks(3, [4096], first=50)
    later = make_blocks(3, [4096], first=70)
    async with opened(tmp_path) as backend:
        await save(backend, whole)
        await save(backend, cut)
        root = killed(tmp_path)
    (segment,) = segments(root)
    first = (1 + 4 + 1) * PAGE  # the segment's header, an extent, the header of the next
    with segment.open("r+b") as file:
        file.seek(first + arrived * PAGE)
        file.write(bytes((3 - arrived) * PAGE))
    left = whole | dict(list(cut.items())[:arrived])
    for more in ({}, later, {}):  # and the next kill brings nothing back
        async with opened(root) as backend:
            left |= more
            await save(backend, more)
            assert (await backend.contains(Keys.of(whole | cut))).tolist() == [
                key in left for key in whole | cut
            ]
            assert await load(backend, sizes(left)) == left
            root = killed(root)


async def test_of_the_last_extent_before_a_kill_only_proven_blocks_are_served_and_damage_is_told(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments
) -> None:
    """A block that is wrong before others that are right: not a kill's doing."""
    blocks = make_blocks(3, [4096])
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
        root = killed(tmp_path)
    (segment,) = segments(root)
    with segment.open("r+b") as file:
        file.seek(2 * PAGE + 7)
        file.write(b"\xff\xfe\xfd")
    backend = NvmeBackend.from_url(TierURL.parse(f"nvme://{root}"))
    told = await backend.verify(lambda done, total: None)
    assert [one.hash_hex for one in told.corrupt] == [next(iter(blocks))[1].hex()]
    async with opened(root) as backend:
        assert (await backend.contains(Keys.of(blocks))).tolist() == [False, True, True]
        left = dict(list(blocks.items())[1:])
        assert await load(backend, sizes(left)) == left


async def test_a_header_that_was_written_in_part_ends_the_walk_there(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments
) -> None:
    first, second = make_blocks(3, [16]), make_blocks(100, [16], first=50)
    options = "capacity=4MiB&segment=256KiB"
    async with opened(tmp_path, options, block_bytes=(16,)) as backend:
        await save(backend, first)
        at = 2 * PAGE + round_up(3 * 512)
        await save(backend, second)  # 100 entries: a header of two pages
        root = killed(tmp_path)
    (segment,) = segments(root)
    with segment.open("r+b") as file:
        file.seek(at + PAGE)
        assert file.read(8) != bytes(8)
        file.seek(at + PAGE)
        file.write(bytes(PAGE))
    async with opened(root, options, block_bytes=(16,)) as backend:
        found = await load(backend, sizes(first | second))
        assert {k for k, v in found.items() if v is not Outcome.MISSING} == set(first)
        await save(backend, second)
        assert await load(backend, sizes(second)) == second


def round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


async def test_remains_of_a_cut_chain_never_join_a_later_one(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments
) -> None:
    a, b, c, d = (make_blocks(1, [4096], first=i) for i in range(4))
    async with opened(tmp_path) as backend:
        for some in (a, b, c):
            await save(backend, some)
        root = killed(tmp_path)
    (segment,) = segments(root)
    with segment.open("r+b") as file:  # b's header is lost; c's, behind it, is whole
        file.seek(3 * PAGE)
        file.write(bytes(8))
    async with opened(root) as backend:
        assert (await backend.usage()).blocks == 1
        await save(backend, d)  # as long as b: c's header would come next
        root = killed(root)
    async with opened(root) as backend:
        found = await load(backend, sizes(a | b | c | d))
        assert {k for k, v in found.items() if v is not Outcome.MISSING} == set(a | d)


@pytest.mark.parametrize("state", ["closed", "killed"])
async def test_a_flipped_byte_anywhere_costs_at_most_blocks(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments, proven: Any, state: str
) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        blocks = await fill(backend, 36)
        root = killed(tmp_path)
    base = tmp_path if state == "closed" else root
    assert len(segments(base)) == 4
    lost = 0
    for position in range(5, 4 * 65536, 4567):
        root = killed(base)
        segment = segments(root)[position // 65536]
        with segment.open("r+b") as file:
            file.seek(position % 65536)
            (byte,) = file.read(1)
            file.seek(position % 65536)
            file.write(bytes([byte ^ 0x10]))
        async with opened(root, block_bytes=BYTES) as backend:
            found = await proven(backend, sizes(blocks))
            assert found.items() <= blocks.items()
            lost += len(found) < len(blocks)
            await backend.delete(Keys.of(set(blocks) - set(found)))  # as the mover does
            await save(backend, blocks)
            assert await load(backend, sizes(blocks)) == blocks
    assert lost > 10


async def test_a_broken_footer_is_replaced_by_walking(
    tmp_path: Path, opened: Opened, killed: Killed, segments: Segments
) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        blocks = await fill(backend, 60)
        root = killed(tmp_path)
    for segment in segments(root):
        os.truncate(segment, 65536 - PAGE)
        os.truncate(segment, 65536)
    async with opened(root, block_bytes=BYTES) as backend:
        assert await load(backend, sizes(blocks)) == blocks


async def test_a_broken_snapshot_is_replaced_by_footers(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        blocks = await fill(backend, 60)
    (snapshot,) = tmp_path.glob("*/snapshot")
    snapshot.write_bytes(snapshot.read_bytes()[:-1])
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        assert await load(backend, sizes(blocks)) == blocks


async def test_a_snapshot_does_not_speak_for_a_segment_that_was_used_anew(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    old, new = make_blocks(3, [4096]), make_blocks(3, [4096], first=10)
    async with opened(tmp_path) as backend:
        await save(backend, old)
    stale = next(tmp_path.glob("*/snapshot")).read_bytes()
    async with opened(tmp_path) as backend:
        await backend.delete(Keys.of(old))
    async with opened(tmp_path) as backend:
        await save(backend, new)
    next(tmp_path.glob("*/snapshot")).write_bytes(stale)
    assert len(segments(tmp_path)) == 1
    async with opened(tmp_path) as backend:
        assert set((await load(backend, sizes(old))).values()) == {Outcome.MISSING}


async def test_a_segment_deleted_between_runs_costs_its_blocks_only(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        blocks = await fill(backend, 60)
    segments(tmp_path)[0].unlink()
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        found = await load(backend, sizes(blocks))
        there = {k: v for k, v in found.items() if v is not Outcome.MISSING}
        assert 0 < len(there) < 60
        assert there.items() <= blocks.items()


async def test_cleared_blocks_stay_away_after_a_kill(
    tmp_path: Path, opened: Opened, killed: Killed
) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        blocks = await fill(backend, 30)
        await backend.clear()
        new = make_blocks(3, BYTES, first=100)
        await save(backend, new)
        root = killed(tmp_path)
    async with opened(root, block_bytes=BYTES) as backend:
        assert set((await load(backend, sizes(blocks))).values()) == {Outcome.MISSING}
        assert await load(backend, sizes(new)) == new


async def test_a_key_written_twice_counts_once_and_the_later_bytes_win_after_a_kill(
    tmp_path: Path, opened: Opened, killed: Killed
) -> None:
    blocks = make_blocks(4, BYTES)
    first, second, *_ = blocks
    anew = make_blocks(4, BYTES, variant=1)
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        await save(backend, blocks)
        await backend.delete(Keys.of([first, second]))
        await save(backend, {first: anew[first]})  # in the same segment
        await save(backend, make_blocks(20, BYTES, first=50))
        await save(backend, {second: anew[second]})  # in a later one
        root = killed(tmp_path)
    async with opened(root, block_bytes=BYTES) as backend:
        right = blocks | {first: anew[first], second: anew[second]}
        assert await load(backend, sizes(blocks)) == right
        usage = await backend.usage()
        assert (usage.blocks, usage.payload_bytes) == (24, 12 * sum(BYTES))


async def test_deleted_blocks_stay_away_after_a_clean_close(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        blocks = await fill(backend, 30)
        await backend.delete(Keys.of(list(blocks)[:10]))
    async with opened(tmp_path, block_bytes=BYTES) as backend:
        assert (await backend.usage()).blocks == 20


async def test_another_segment_size_still_reads_the_old_segments(
    tmp_path: Path, opened: Opened
) -> None:
    old, new = make_blocks(20, [4096]), make_blocks(20, [4096], first=50)
    async with opened(tmp_path, "capacity=2MiB&segment=64KiB") as backend:
        await save(backend, old)
    async with opened(tmp_path, "capacity=2MiB&segment=128KiB") as backend:
        assert await load(backend, sizes(old)) == old
        await save(backend, new)
        assert await load(backend, sizes(old | new)) == old | new


async def test_a_file_without_a_header_is_used_or_removed(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    (segment,) = segments(tmp_path)
    segment.with_name("seg-00000002.tkv").write_bytes(bytes(65536))  # preallocated, then killed
    segment.with_name("seg-00000003.tkv").write_bytes(bytes(4096))  # killed while preallocating
    segment.with_name("seg-00000004.tkv").write_bytes(b"?" * 65536)  # header torn
    async with opened(tmp_path) as backend:
        assert [s.name for s in segments(tmp_path)] == ["seg-00000001.tkv", "seg-00000002.tkv"]
        blocks = make_blocks(16, [4096], first=20)
        await save(backend, blocks)
        assert len(segments(tmp_path)) == 2
        assert await load(backend, sizes(blocks)) == blocks


async def test_every_option_survives_the_way_through_the_url(tmp_path: Path) -> None:
    url = TierURL.parse(f"nvme://{tmp_path}?capacity=1GiB&segment=1MiB&direct=off&threads=2")
    options = Options.parse(url)
    assert (options.capacity_bytes, options.segment_bytes) == (1 << 30, 1 << 20)
    backend = NvmeBackend(options)
    await backend.open(make_context([4096]))
    usage = await backend.usage()
    await backend.close()
    assert usage.modes["direct"] == "no (direct=off)"
    assert usage.modes["threads"] == "2"
    assert usage.capacity_bytes == 1 << 30
