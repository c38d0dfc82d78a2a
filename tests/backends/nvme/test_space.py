"""How room is made: the quota holds, nothing goes before its owner agreed, nothing moves a read."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.blocks import Keys, Outcome
from tierkv.errors import StoreBusyError
from tierkv.testing import Key, empty_batch, load, make_blocks, save, sizes
from tierkv_backends.nvme import NvmeBackend
from tierkv_backends.nvme import space as space_module
from tierkv_backends.nvme.direct import DirectMode
from tierkv_backends.nvme.files import Files

Opened = Callable[..., Any]
Segments = Callable[[Path], list[Path]]

SEGMENT = 65536


def full_segment(number: int) -> dict[Key, bytes]:
    """As many blocks as one segment takes."""
    return make_blocks(11, [4096], first=number * 100)


def physical(root: Path) -> int:
    return sum(f.stat().st_size for f in root.glob("*/seg-*"))


async def happens(what: Callable[[], Awaitable[bool]]) -> None:
    """Turn the loop until `what` is true; for as many turns as any thread here could need."""
    for _ in range(100_000):
        if await what():
            return
    raise AssertionError("it never happened")


async def recycled(backend: NvmeBackend) -> bool:
    return (await backend.usage()).counters["segments_recycled"] > 0


async def forgotten(backend: NvmeBackend, blocks: dict[Key, bytes]) -> bool:
    await asyncio.sleep(0)
    return not (await backend.contains(Keys.of(blocks))).any()


class Handshake:
    """Stands for the side that decides: notes what it is asked, answers when told."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[set[Key]] = asyncio.Queue()
        self.agreed = asyncio.Event()

    async def __call__(self, keys: Keys) -> None:
        self.asked.put_nowait(set(keys))
        await self.agreed.wait()


@pytest.mark.every_loop
@pytest.mark.usefixtures("blockbuster")
async def test_the_quota_holds_while_ten_times_as_much_is_written(
    tmp_path: Path, opened: Opened
) -> None:
    retired: set[Key] = set()

    async def retire(keys: Keys) -> None:
        retired.update(keys)

    async with opened(tmp_path, "capacity=256KiB&segment=64KiB", retire=retire) as backend:
        written: dict[Key, bytes] = {}
        for number in range(40):
            blocks = full_segment(number)
            outcomes = await save(backend, blocks)
            assert set(outcomes.values()) == {Outcome.DONE}
            written |= blocks
            assert await asyncio.to_thread(physical, tmp_path) <= 256 << 10
        there = await load(backend, sizes(written))
        kept = {k: v for k, v in there.items() if v is not Outcome.MISSING}
        assert kept.items() <= written.items()
        assert len(kept) >= 20
        assert set(written) - set(kept) <= retired
        usage = await backend.usage()
        counters = usage.counters
        assert counters["segments_recycled"] >= 35
        assert counters["blocks_evicted"] == len(written) - usage.blocks
        assert counters["bytes_written"] > counters["bytes_asked"] == 440 * 4096


async def test_the_least_recently_used_segment_goes_first(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, "capacity=256KiB&segment=64KiB") as backend:
        for number in range(3):
            await save(backend, full_segment(number))
        for number in range(3, 12):
            await load(backend, sizes(full_segment(0)))
            await save(backend, full_segment(number))
            assert await load(backend, sizes(full_segment(0))) == full_segment(0)


async def test_a_write_never_gives_up_its_own_blocks(tmp_path: Path, opened: Opened) -> None:
    """It would say done for what is gone."""
    async with opened(tmp_path, "capacity=128KiB&segment=64KiB") as backend:
        blocks = make_blocks(40, [4096])
        outcomes = await save(backend, blocks)
        done = {key for key, outcome in outcomes.items() if outcome is Outcome.DONE}
        assert len(done) == 22
        assert set(outcomes.values()) == {Outcome.DONE, Outcome.DECLINED}
        assert {
            k for k, v in (await load(backend, sizes(blocks))).items() if v == blocks[k]
        } == done


async def test_a_late_agreement_declines_writes_and_keeps_blocks_readable(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "ROOM_WAIT_S", 0.0)
    side = Handshake()
    async with opened(tmp_path, "capacity=128KiB&segment=64KiB", retire=side) as backend:
        first = full_segment(0)
        await save(backend, first)
        await save(backend, full_segment(1))
        assert await side.asked.get() == set(first)
        outcomes = await save(backend, full_segment(2))
        assert Outcome.DECLINED in outcomes.values()
        assert await load(backend, sizes(first)) == first
        assert (await backend.contains(Keys.of(first))).all()
        side.agreed.set()
        await happens(lambda: recycled(backend))
        assert set((await save(backend, full_segment(2))).values()) == {Outcome.DONE}
        assert set((await load(backend, sizes(first))).values()) == {Outcome.MISSING}


async def test_a_write_waits_a_little_for_an_agreement_that_is_on_its_way(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "ROOM_WAIT_S", 60.0)
    side = Handshake()
    async with opened(tmp_path, "capacity=128KiB&segment=64KiB", retire=side) as backend:
        await save(backend, full_segment(0))
        await save(backend, full_segment(1))
        await side.asked.get()
        writing = asyncio.create_task(save(backend, full_segment(2)))
        await asyncio.sleep(0.05)
        assert not writing.done()
        side.agreed.set()
        assert set((await writing).values()) == {Outcome.DONE}


async def test_a_block_written_again_while_its_segment_retires_stays(
    tmp_path: Path, opened: Opened
) -> None:
    side = Handshake()
    async with opened(tmp_path, "capacity=128KiB&segment=64KiB", retire=side) as backend:
        first = make_blocks(10, [4096])
        again = dict(list(first.items())[:2])
        await save(backend, first)
        await save(backend, make_blocks(5, [4096], first=100))
        await side.asked.get()
        assert set((await save(backend, again)).values()) == {Outcome.DONE}
        side.agreed.set()
        await happens(lambda: recycled(backend))
        assert await load(backend, sizes(again)) == again
        usage = await backend.usage()
        assert usage.blocks == 7
        assert usage.payload_bytes == 7 * 4096


async def test_a_segment_is_not_used_again_under_a_read(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that began before the agreement ends with the right bytes, however late."""
    side = Handshake()
    async with opened(tmp_path, "capacity=128KiB&segment=64KiB", retire=side) as backend:
        first = full_segment(0)
        await save(backend, first)
        await save(backend, full_segment(1))
        await side.asked.get()
        hold = HeldReads(monkeypatch)
        reading = asyncio.create_task(load(backend, sizes(first)))
        await asyncio.to_thread(hold.entered.wait)
        side.agreed.set()
        await happens(lambda: forgotten(backend, first))
        outcomes = await save(backend, full_segment(2))
        assert Outcome.DECLINED in outcomes.values()  # no room: the read still has it
        hold.go.set()
        assert await reading == first
        await save(backend, full_segment(2))


class HeldReads:
    """Reads stop right before the system call until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        preadv = os.preadv

        def held(fd: int, buffers: Any, offset: int) -> int:
            self.entered.set()
            assert self.go.wait(60)
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", held)


@pytest.mark.every_loop
async def test_a_cancelled_read_ends_only_when_its_thread_is_done(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = full_segment(0)
    async with opened(tmp_path) as backend:
        await save(backend, blocks)
        hold = HeldReads(monkeypatch)
        batch = empty_batch(sizes(blocks))
        reading = asyncio.create_task(backend.read(batch))
        await asyncio.to_thread(hold.entered.wait)
        reading.cancel()
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.sleep(0.02)
        assert not reading.done()
        hold.go.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert bytes(batch.payload(0)) == next(iter(blocks.values()))


class HeldWrites:
    """Payloads stop right before the system call until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        pwritev = os.pwritev

        def held(fd: int, buffers: Any, offset: int) -> int:
            if len(buffers) > 1:
                self.entered.set()
                assert self.go.wait(60)
            return pwritev(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", held)


async def test_a_write_begun_before_a_clear_never_appears_after_it(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as backend:
        hold = HeldWrites(monkeypatch)
        under_way = asyncio.create_task(save(backend, full_segment(0)))
        await asyncio.to_thread(hold.entered.wait)
        waiting = asyncio.create_task(save(backend, full_segment(1)))
        await asyncio.sleep(0)
        clearing = asyncio.create_task(backend.clear())
        await asyncio.sleep(0)
        hold.go.set()
        await clearing
        await under_way
        await waiting
        assert [keys async for keys in backend.scan()] == []
        late = await save(backend, full_segment(2))
        assert set(late.values()) == {Outcome.DONE}


async def test_close_does_not_wait_for_a_write_that_hangs_and_keeps_the_lock(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv_backends.nvme.backend.CLOSE_WAIT_S", 0.01)
    async with opened(tmp_path, "capacity=2MiB&segment=64KiB&threads=1") as backend:
        hold = HeldWrites(monkeypatch)
        hanging = asyncio.create_task(save(backend, full_segment(0)))
        await asyncio.to_thread(hold.entered.wait)
    assert not hanging.done()
    with pytest.raises(StoreBusyError):
        async with opened(tmp_path):
            pass
    hold.go.set()
    assert set((await hanging).values()) == {Outcome.FAILED}


async def test_closing_while_an_agreement_is_out_loses_nothing(
    tmp_path: Path, opened: Opened
) -> None:
    side = Handshake()
    async with opened(tmp_path, "capacity=128KiB&segment=64KiB", retire=side) as backend:
        first = full_segment(0)
        await save(backend, first)
        await save(backend, full_segment(1))
        await side.asked.get()
    async with opened(tmp_path, "capacity=128KiB&segment=64KiB") as backend:
        assert await load(backend, sizes(first)) == first


async def test_an_error_of_the_deciding_side_is_counted_and_the_segment_stays(
    tmp_path: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    async def retire(keys: Keys) -> None:
        raise ConnectionError("the scheduler is gone")

    async with opened(tmp_path, "capacity=128KiB&segment=64KiB", retire=retire) as backend:
        first = full_segment(0)
        await save(backend, first)
        await save(backend, full_segment(1))
        outcomes = await save(backend, full_segment(2))
        assert Outcome.DECLINED in outcomes.values()
        assert await load(backend, sizes(first)) == first
        assert (await backend.usage()).counters["refill_errors"] >= 1
    assert "the scheduler is gone" in caplog.text


async def test_a_block_that_no_segment_holds_is_declined(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path) as backend:
        large, small = make_blocks(1, [SEGMENT]), make_blocks(2, [4096], first=7)
        outcomes = await save(backend, large | small)
        assert list(outcomes.values()) == [Outcome.DECLINED, Outcome.DONE, Outcome.DONE]


@pytest.mark.parametrize("nbytes", [SEGMENT - 6 * 4096 - n for n in (0, 1, 511, 4096)])
async def test_the_largest_block_that_opens_also_fits(
    tmp_path: Path, opened: Opened, nbytes: int
) -> None:
    async with opened(tmp_path, block_bytes=(nbytes,)) as backend:
        blocks = make_blocks(3, [nbytes])
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(blocks)) == blocks


async def test_segments_of_owners_that_are_gone_make_room_coldest_first(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    options = "capacity=256KiB&segment=64KiB"
    for number, name in enumerate((b"a", b"b")):
        async with opened(tmp_path, options, namespace=name * 32) as backend:
            await save(backend, full_segment(0))
        for path in segments(tmp_path):
            if path.parent.name.startswith(name.hex()):
                os.utime(path, (number + 1, number + 1))
    assert len(segments(tmp_path)) == 2
    async with opened(tmp_path, options, namespace=b"c" * 32) as backend:
        for number in range(3):
            await save(backend, full_segment(number))
        names = {path.parent.name[:2] for path in segments(tmp_path)}
        assert names == {b"b".hex(), b"c".hex()}, "a is colder"
        assert not list(tmp_path.glob(f"{b'a'.hex()}*")), "an emptied directory goes too"
        for number in range(3, 9):
            await save(backend, full_segment(number))
            assert physical(tmp_path) <= 256 << 10
        assert len(segments(tmp_path)) == 4


async def test_two_ranks_share_the_quota_and_the_first_gives_back(
    tmp_path: Path, opened: Opened
) -> None:
    options = "capacity=512KiB&segment=64KiB"
    async with opened(tmp_path, options, rank=0) as a:
        for number in range(10):
            await save(a, full_segment(number))
        assert physical(tmp_path) == 512 << 10
        async with opened(tmp_path, options, rank=1) as b:
            for number in range(10, 40):
                await save(a, full_segment(number))
                await save(b, full_segment(number))
                assert physical(tmp_path) <= 512 << 10
            for backend in (a, b):
                found = await load(backend, sizes(full_segment(39)))
                assert found == full_segment(39)
            parts = [sum(f.stat().st_size for f in d.glob("seg-*")) for d in tmp_path.iterdir()
                     if d.is_dir()]  # fmt: skip
            assert parts == [256 << 10, 256 << 10]


async def test_a_smaller_quota_holds_from_the_open_on(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path, "capacity=1MiB&segment=64KiB") as backend:
        for number in range(10):
            await save(backend, full_segment(number))
    async with opened(tmp_path, "capacity=256KiB&segment=64KiB") as backend:
        assert physical(tmp_path) <= 256 << 10
        found = await load(backend, sizes(full_segment(9)))
        assert found == full_segment(9), "the warmest stay"


async def test_a_deleted_segment_is_noticed_under_an_open_descriptor(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    async with opened(tmp_path) as backend:
        blocks = full_segment(0)
        await save(backend, blocks)
        assert await load(backend, sizes(blocks)) == blocks
        segments(tmp_path)[0].unlink()
        assert set((await load(backend, sizes(blocks))).values()) == {Outcome.MISSING}
        assert not (await backend.contains(Keys.of(blocks))).any()
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(blocks)) == blocks


async def test_writing_into_a_deleted_segment_fails_once_and_goes_on_elsewhere(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(2, [4096]))
        segments(tmp_path)[0].unlink()
        blocks = make_blocks(2, [4096], first=10)
        assert set((await save(backend, blocks)).values()) == {Outcome.FAILED}
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(blocks)) == blocks


async def test_descriptors_are_given_back(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv_backends.nvme.files.MAX_DESCRIPTORS", 3)
    before = len(os.listdir("/proc/self/fd"))
    async with opened(tmp_path, "capacity=1MiB&segment=64KiB") as backend:
        for number in range(10):
            await save(backend, full_segment(number))
        everything = {k: v for n in range(10) for k, v in full_segment(n).items()}
        assert await load(backend, sizes(everything)) == everything
        assert len(os.listdir("/proc/self/fd")) <= before + 3 + 6
    assert len(os.listdir("/proc/self/fd")) <= before


def test_files_close_a_descriptor_only_when_its_user_is_done(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    files = Files(DirectMode(enabled=False))
    with files.use_sync(path, direct=False) as fd:
        files.close_sync()
        assert os.pread(fd, 3, 0) == b"abc"
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


async def test_a_segment_file_never_changes_its_size(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    async with opened(tmp_path, "capacity=256KiB&segment=64KiB") as backend:
        for number in range(8):  # each is filled, gets a footer, and is used again
            await save(backend, full_segment(number))
    assert {path.stat().st_size for path in segments(tmp_path)} == {SEGMENT}


async def test_writes_that_overlap_take_lanes_of_their_own_and_all_come_back(
    tmp_path: Path, opened: Opened, segments: Segments
) -> None:
    kept: dict[Key, bytes] = {}
    async with opened(tmp_path, "capacity=2MiB&segment=64KiB") as backend:
        parts = [make_blocks(5, [4096], first=number * 100) for number in range(9)]
        answers = await asyncio.gather(*(save(backend, part) for part in parts))
        for part, outcomes in zip(parts, answers, strict=True):
            assert set(outcomes.values()) == {Outcome.DONE}
            kept |= part
    assert len(segments(tmp_path)) > 5  # one lane would have filled five, one after the other
    async with opened(tmp_path, "capacity=2MiB&segment=64KiB") as backend:
        assert await load(backend, sizes(kept)) == kept
        more = make_blocks(5, [4096], first=5000)
        assert set((await save(backend, more)).values()) == {Outcome.DONE}
        assert await load(backend, sizes(more)) == more


async def test_lanes_wait_for_room_side_by_side_and_none_is_told_that_there_is_none(
    tmp_path: Path, opened: Opened
) -> None:
    async with opened(tmp_path, "capacity=768KiB&segment=64KiB") as backend:
        for round_number in range(6):
            parts = [full_segment(round_number * 10 + number) for number in range(6)]
            for outcomes in await asyncio.gather(*(save(backend, part) for part in parts)):
                assert set(outcomes.values()) == {Outcome.DONE}
