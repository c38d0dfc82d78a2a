"""The storage half on the caller's loop: a port like the keeper's, without the process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tierkv.blocks import Move, MoveDone, MoveKind, Outcome, Recovered
from tierkv.errors import BackendNotFoundError, ConfigError, StoreError
from tierkv.local import LocalStorage
from tierkv.pinned import Arena
from tierkv.storage import StorageConfig, StoragePort
from tierkv.testing import make_key, make_move

pytestmark = pytest.mark.every_loop

CONFIG = StorageConfig(
    url="memory://",
    namespace=b"\x01" * 32,
    namespace_text="test",
    arena_bytes=16 * 8192,
    block_bytes=(5000,),
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(CONFIG.arena_bytes) as made:
        yield made


def move(kind: MoveKind, move_id: int, numbers: range, *, epoch: int = 0) -> Move:
    offsets = [8192 * i for i in range(len(numbers))]
    keys = [make_key(n) for n in numbers]
    return make_move(kind, keys, move_id=move_id, offsets=offsets, epoch=epoch)


async def next_events(storage: LocalStorage, awake: asyncio.Event) -> list[object]:
    await asyncio.wait_for(awake.wait(), 30)
    awake.clear()
    return list(storage.poll())


async def test_a_close_that_cuts_a_rotation_short_forgets_all_the_same(
    arena: Arena, tmp_path: Path
) -> None:
    config = dataclasses.replace(CONFIG, url=f"file://{tmp_path}/kv")
    async with await LocalStorage.open(config, arena) as storage:
        storage.submit(move(MoveKind.SAVE, 1, range(5)))
    storage = await LocalStorage.open(config, arena)
    storage.submit(move(MoveKind.LOAD, 2, range(5)))  # the rotation waits for its end
    storage.rotate(1)
    assert await storage.aclose(deadline_s=0)
    async with await LocalStorage.open(config, arena, epoch=1) as again:
        (recovered,) = again.poll()
        assert isinstance(recovered, Recovered)
        assert len(recovered.keys) == 0


async def test_the_first_event_is_what_was_recovered(arena: Arena, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, url=f"file://{tmp_path}/kv")
    async with await LocalStorage.open(config, arena) as storage:
        (recovered,) = storage.poll()
        assert isinstance(recovered, Recovered)
        assert len(recovered.keys) == 0
        storage.submit(move(MoveKind.SAVE, 1, range(5)))
    (done,) = storage.poll()  # leaving the context lets saves end
    assert isinstance(done, MoveDone)
    assert done.outcomes.tolist() == [Outcome.DONE] * 5
    async with await LocalStorage.open(config, arena, epoch=3) as again:
        (recovered,) = again.poll()
        assert isinstance(recovered, Recovered)
        assert sorted(recovered.keys) == sorted(make_key(n) for n in range(5))
        assert recovered.epoch == 3


async def test_events_wake_the_caller_once_a_batch(arena: Arena) -> None:
    async with await LocalStorage.open(CONFIG, arena) as storage:
        calls: list[int] = []
        awake = asyncio.Event()

        def wake() -> None:
            calls.append(1)
            awake.set()

        storage.on_event(wake)
        assert len(await next_events(storage, awake)) == 1  # what was there before counts too
        arena.view[:5] = b"bytes"
        storage.submit(move(MoveKind.SAVE, 1, range(1)))
        (saved,) = await next_events(storage, awake)
        arena.view[:5] = bytes(5)
        storage.submit(move(MoveKind.LOAD, 2, range(1)))
        (loaded,) = await next_events(storage, awake)
        assert isinstance(saved, MoveDone)
        assert isinstance(loaded, MoveDone)
        assert np.concatenate([saved.outcomes, loaded.outcomes]).tolist() == [Outcome.DONE] * 2
        assert arena.view[:5] == b"bytes"
        assert len(calls) == 3
        storage.on_event(None)
        storage.rotate(1)
        storage.submit(move(MoveKind.LOAD, 3, range(1)))
        assert len(calls) == 3


async def test_rotation_and_agreement_reach_the_mover(arena: Arena) -> None:
    async with await LocalStorage.open(CONFIG, arena) as storage:
        awake = asyncio.Event()
        storage.on_event(awake.set)
        await next_events(storage, awake)
        storage.agree(17)  # unknown: nothing
        storage.rotate(1)
        (recovered,) = await next_events(storage, awake)
        assert isinstance(recovered, Recovered)
        assert recovered.epoch == 1


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("nvm://x", BackendNotFoundError),
        ("memory://?size=1", ConfigError),
        ("file:///proc/nothing", StoreError),
    ],
)
async def test_what_is_wrong_is_raised_by_open(
    arena: Arena, url: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        await LocalStorage.open(dataclasses.replace(CONFIG, url=url), arena)


async def test_without_a_tier_nothing_is_kept(arena: Arena) -> None:
    async with await LocalStorage.open(dataclasses.replace(CONFIG, url=""), arena) as storage:
        storage.poll()
        storage.submit(move(MoveKind.SAVE, 1, range(1)))
        storage.submit(move(MoveKind.LOAD, 2, range(1)))
        outcomes = [e.outcomes.tolist() for e in storage.poll() if isinstance(e, MoveDone)]
        assert outcomes == [[Outcome.DECLINED], [Outcome.MISSING]]
        assert storage.stats()["tier"] == "none"


async def test_stats_are_json_and_a_port_is_a_port(arena: Arena) -> None:
    async with await LocalStorage.open(CONFIG, arena) as storage:
        port: StoragePort = storage
        stats = json.loads(json.dumps(port.stats()))
        assert stats["tier"] == "memory"
        assert stats["done_save_blocks"] == 0


async def test_stats_after_closing_ask_nobody(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    async with await LocalStorage.open(CONFIG, arena) as storage:
        storage.submit(move(MoveKind.SAVE, 1, range(2)))
    tasks = asyncio.all_tasks()
    assert storage.stats()["done_save_blocks"] == 2
    assert asyncio.all_tasks() == tasks
    assert caplog.records == []


async def test_its_loop_is_never_blocked(arena: Arena, blockbuster: None) -> None:
    async with await LocalStorage.open(CONFIG, arena) as storage:
        awake = asyncio.Event()
        storage.on_event(awake.set)
        await next_events(storage, awake)
        storage.submit(move(MoveKind.SAVE, 1, range(10)))
        await next_events(storage, awake)
        storage.stats()
