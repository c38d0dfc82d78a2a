"""Blocks that are worth it outlive their segment: never away, never wrong, within the quota."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tierkv.blocks import Keys, Outcome
from tierkv.testing import Key, load, make_blocks, save, sizes
from tierkv_backends.nvme import NvmeBackend
from tierkv_backends.nvme import space as space_module
from tierkv_backends.nvme.space import LEAST_SEGMENTS

Opened = Callable[..., Any]

SEGMENT = 64 << 10
STORE = f"capacity={16 * SEGMENT}&segment={SEGMENT}"
PER_SEGMENT = 11
FULL = 16 * PER_SEGMENT
"""Blocks that fill `STORE`."""


def cold(number: int, n: int = PER_SEGMENT) -> dict[Key, bytes]:
    """Blocks that nobody asks for."""
    return make_blocks(n, [4096], first=1000 + number * 100)


class Side:
    """Stands for the side that decides: `hot` blocks are worth it; notes what it agrees to."""

    def __init__(self, hot: dict[Key, bytes]) -> None:
        self.hot = set(hot)
        self.asked = 0
        self.retired: set[Key] = set()

    async def worth(self, keys: Keys) -> NDArray[np.bool_]:
        self.asked += 1
        return np.array([key in self.hot for key in keys], np.bool_)

    async def retire(self, keys: Keys) -> None:
        self.retired |= set(keys)

    @property
    def context(self) -> dict[str, Any]:
        return {"retire": self.retire, "worth": self.worth}


class Held:
    """A side whose answers wait until `go`."""

    def __init__(self, hot: dict[Key, bytes]) -> None:
        self.hot = set(hot)
        self.asking, self.retiring, self.go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def worth(self, keys: Keys) -> NDArray[np.bool_]:
        answer = np.array([key in self.hot for key in keys], np.bool_)
        if answer.any():
            self.asking.set()
            await self.go.wait()
        return answer


async def churn(backend: NvmeBackend, first: int, segments: int) -> None:
    """Write cold blocks for so many segments, each offered until it is taken."""
    for number in range(first, first + segments):
        left = cold(number)
        while left:
            outcomes = await save(backend, left)
            left = {k: v for k, v in left.items() if outcomes[k] is Outcome.DECLINED}


async def counters(backend: NvmeBackend) -> dict[str, int]:
    counted: dict[str, int] = (await backend.usage()).counters
    return counted


@pytest.mark.every_loop
@pytest.mark.usefixtures("blockbuster")
async def test_hot_blocks_are_readable_all_the_time_while_several_quotas_of_cold_ones_pass(
    tmp_path: Path, opened: Opened
) -> None:
    hot = make_blocks(12, [4096])
    side = Side(hot)
    async with opened(tmp_path, STORE, **side.context) as backend:
        for number in range(4):  # a few in each of four segments
            some = dict(list(hot.items())[number * 3 : number * 3 + 3])
            await save(backend, some | cold(900 + number, 8))
        reads = 0
        done = asyncio.Event()

        async def read() -> None:
            nonlocal reads
            while not done.is_set():
                assert await load(backend, sizes(hot)) == hot
                reads += 1

        reading = asyncio.create_task(read())
        for number in range(0, 48, 8):
            await churn(backend, number, 8)
            assert await asyncio.to_thread(physical, tmp_path) <= 16 * SEGMENT
        done.set()
        await reading
        assert reads > 3
        assert not side.retired & set(hot)
        assert await load(backend, sizes(hot)) == hot
        first = await load(backend, sizes(cold(0) | cold(1)))
        assert set(first.values()) == {Outcome.MISSING}
        usage = await backend.usage()
        assert usage.counters["blocks_reinserted"] >= len(hot)
        assert usage.counters["bytes_reinserted"] == usage.counters["blocks_reinserted"] * 4096
        saved = (48 * PER_SEGMENT + 4 * PER_SEGMENT) * 4096
        assert usage.counters["bytes_saved"] == saved
        assert usage.ratios["write_amplification"] == pytest.approx(
            usage.counters["bytes_written"] / saved, abs=1e-3
        )
        assert usage.blocks == len([key async for keys in backend.scan() for key in keys])


def physical(root: Path) -> int:
    return sum(f.stat().st_size for f in root.glob("*/seg-*"))


async def test_what_is_kept_survives_a_clean_close_and_counts_once(
    tmp_path: Path, opened: Opened
) -> None:
    hot = make_blocks(4, [4096])
    side = Side(hot)
    async with opened(tmp_path, STORE, **side.context) as backend:
        await save(backend, hot)
        await churn(backend, 0, 40)
        blocks = (await backend.usage()).blocks
    async with opened(tmp_path, STORE, **side.context) as backend:
        assert await load(backend, sizes(hot)) == hot
        assert (await backend.usage()).blocks == blocks
        await churn(backend, 40, 40)
        assert await load(backend, sizes(hot)) == hot
        assert not side.retired & set(hot)


async def test_a_kill_between_copy_and_recycling_leaves_one_of_the_two(
    tmp_path: Path, opened: Opened, killed: Callable[[Path], Path]
) -> None:
    hot = make_blocks(4, [4096])
    retiring, agreed = asyncio.Event(), asyncio.Event()

    async def retire(keys: Keys) -> None:
        retiring.set()
        await agreed.wait()

    side = Side(hot)
    async with opened(tmp_path, STORE, retire=retire, worth=side.worth) as backend:
        await save(backend, hot | cold(0, 6))
        writing = asyncio.create_task(churn(backend, 1, 16))
        await retiring.wait()
        assert (await counters(backend))["blocks_reinserted"] == 4
        root = await asyncio.to_thread(killed, tmp_path)
        agreed.set()
        await writing
    async with opened(root, STORE) as backend:
        assert await load(backend, sizes(hot)) == hot
        assert await load(backend, sizes(cold(0, 6))) == cold(0, 6)
        listed = [key async for keys in backend.scan() for key in keys]
        assert len(listed) == len(set(listed)) == (await backend.usage()).blocks


async def test_a_segment_of_which_most_is_worth_keeping_stays_as_it_is(
    tmp_path: Path, opened: Opened
) -> None:
    hot = make_blocks(PER_SEGMENT, [4096])
    side = Side(hot)
    async with opened(tmp_path, STORE, **side.context) as backend:
        await save(backend, hot)
        await churn(backend, 0, 60)
        assert await load(backend, sizes(hot)) == hot
        counted = await counters(backend)
        assert counted["blocks_reinserted"] == 0
        assert counted["segments_recycled"] >= 40


async def test_where_everything_is_worth_keeping_writes_go_on_all_the_same(
    tmp_path: Path, opened: Opened
) -> None:
    everything = {k: v for n in range(60) for k, v in cold(n).items()}
    side = Side(everything)
    async with opened(tmp_path, STORE, **side.context) as backend:
        await churn(backend, 0, 60)
        found = await load(backend, sizes(everything))
        there = {k for k, v in found.items() if v == everything[k]}
        assert set(found.values()) <= {*everything.values(), Outcome.MISSING}
        assert len(there) > FULL // 3
        assert set(everything) - there <= side.retired
        assert (await counters(backend))["blocks_reinserted"] > 0
        assert physical(tmp_path) <= 16 * SEGMENT


async def test_a_block_that_is_not_right_is_not_kept(tmp_path: Path, opened: Opened) -> None:
    hot = make_blocks(4, [4096])
    bad = next(iter(hot))
    side = Side(hot)
    async with opened(tmp_path, f"{STORE}&direct=off", **side.context) as backend:
        await save(backend, hot)
        flipped = 0
        for path in tmp_path.glob("*/seg-*"):
            data = path.read_bytes()
            at = data.find(hot[bad])
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at + 100)
                    file.write(b"\xff" if data[at + 100] != 0xFF else b"\x00")
                flipped += 1
        assert flipped == 1
        await churn(backend, 0, 40)
        found = await load(backend, sizes(hot))
        assert found.pop(bad) is Outcome.MISSING
        assert found == {k: v for k, v in hot.items() if k != bad}
        assert side.retired & set(hot) == {bad}
        assert (await counters(backend))["read_errors"] == 1


async def test_a_small_store_asks_nobody_and_gives_up_what_was_used_least_recently(
    tmp_path: Path, opened: Opened
) -> None:
    hot = make_blocks(PER_SEGMENT, [4096])
    side = Side({})
    options = f"capacity={(LEAST_SEGMENTS - 1) * SEGMENT}&segment={SEGMENT}"
    async with opened(tmp_path, options, **side.context) as backend:
        await save(backend, hot)
        for number in range(30):
            assert await load(backend, sizes(hot)) == hot
            await churn(backend, number, 1)
        assert await load(backend, sizes(hot)) == hot
        assert side.asked == 0


async def test_an_answer_that_does_not_come_delays_writes_and_nothing_else(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "ROOM_WAIT_S", 0.0)
    hot = make_blocks(4, [4096])
    side = Held(hot)
    async with opened(tmp_path, STORE, worth=side.worth) as backend:
        await save(backend, hot)
        declined = 0
        for number in range(20):
            outcomes = await save(backend, cold(number))
            declined += sum(o is Outcome.DECLINED for o in outcomes.values())
        assert declined
        assert side.asking.is_set()
        assert await load(backend, sizes(hot)) == hot
        side.go.set()
        await churn(backend, 100, 30)
        assert await load(backend, sizes(hot)) == hot


async def test_what_is_cleared_while_its_worth_is_asked_never_comes_back(
    tmp_path: Path, opened: Opened
) -> None:
    hot = make_blocks(4, [4096])
    side = Held(hot)
    async with opened(tmp_path, STORE, worth=side.worth) as backend:
        await save(backend, hot)
        writing = asyncio.create_task(churn(backend, 0, 20))
        await side.asking.wait()
        await backend.clear()
        side.go.set()
        await writing
        assert not (await backend.contains(Keys.of(hot))).any()
        assert (await counters(backend))["blocks_reinserted"] == 0
        await churn(backend, 50, 30)
        assert not (await backend.contains(Keys.of(hot))).any()


class HeldCopies:
    """Reads of payload for copying stop before the system call until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        import tierkv_backends.nvme.rewriting as module

        write = module.write_run_sync

        def held(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            assert self.go.wait(60)
            return write(*arguments, **options)

        monkeypatch.setattr(module, "write_run_sync", held)


async def test_what_is_deleted_while_it_is_copied_stays_away(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = make_blocks(4, [4096])
    gone = dict(list(hot.items())[:2])
    hold = HeldCopies(monkeypatch)
    async with opened(tmp_path, STORE, **Side(hot).context) as backend:
        await save(backend, hot)
        writing = asyncio.create_task(churn(backend, 0, 20))
        await asyncio.to_thread(hold.entered.wait)
        assert await load(backend, sizes(hot)) == hot, "readable while it is copied"
        await backend.delete(Keys.of(gone))
        hold.go.set()
        await writing
        assert not (await backend.contains(Keys.of(gone))).any()
        left = {k: v for k, v in hot.items() if k not in gone}
        assert await load(backend, sizes(left)) == left
        usage = await backend.usage()
        assert usage.blocks == len([key async for keys in backend.scan() for key in keys])


async def test_a_clear_waits_for_a_copy_under_way_and_forgets_it(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = make_blocks(4, [4096])
    hold = HeldCopies(monkeypatch)
    async with opened(tmp_path, STORE, **Side(hot).context) as backend:
        await save(backend, hot)
        writing = asyncio.create_task(churn(backend, 0, 20))
        await asyncio.to_thread(hold.entered.wait)
        clearing = asyncio.create_task(backend.clear())
        await asyncio.sleep(0)
        hold.go.set()
        await clearing
        assert not (await backend.contains(Keys.of(hot))).any()
        await writing
        assert not (await backend.contains(Keys.of(hot))).any()
    async with opened(tmp_path, STORE) as backend:
        assert not (await backend.contains(Keys.of(hot))).any()


async def test_closing_while_a_copy_is_under_way_loses_nothing(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = make_blocks(4, [4096])
    hold = HeldCopies(monkeypatch)
    async with opened(tmp_path, STORE, **Side(hot).context) as backend:
        await save(backend, hot)
        writing = asyncio.create_task(churn(backend, 0, 17))
        await asyncio.to_thread(hold.entered.wait)
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(0)
        hold.go.set()
        await closing
        writing.cancel()
        await asyncio.wait([writing])
    async with opened(tmp_path, STORE) as backend:
        assert await load(backend, sizes(hot)) == hot
        listed = [key async for keys in backend.scan() for key in keys]
        assert len(listed) == len(set(listed)) == (await backend.usage()).blocks


async def test_an_error_of_the_side_that_is_asked_is_counted_and_the_segment_stays(
    tmp_path: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    async def worth(keys: Keys) -> NDArray[np.bool_]:
        raise ConnectionError("the scheduler is gone")

    hot = make_blocks(4, [4096])
    async with opened(tmp_path, STORE, worth=worth) as backend:
        await save(backend, hot)
        for number in range(20):
            await save(backend, cold(number))
        assert await load(backend, sizes(hot)) == hot
        assert (await counters(backend))["refill_errors"] >= 1
    assert "the scheduler is gone" in caplog.text
