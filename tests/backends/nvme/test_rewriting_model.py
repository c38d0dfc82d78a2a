"""Any history of a store that writes hot blocks again, against a set of what it must serve."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES, Keys, Outcome
from tierkv.testing import Key, load, make_context, make_key, make_payload, save
from tierkv.urls import TierURL
from tierkv_backends.nvme import NvmeBackend

SEGMENT = 64 << 10
CAPACITY = 9 * SEGMENT
BLOCK_BYTES = (4096, 700, 9000)
NUMBERS = 180
"""Blocks that there are: about half as many again as fit."""

numbers = st.integers(0, NUMBERS - 1)
some = st.lists(numbers, min_size=1, max_size=6, unique=True)
runs = st.tuples(numbers, st.integers(1, 60)).map(lambda run: [*range(run[0], run[0] + run[1])])
steps = st.one_of(
    st.tuples(st.just("save"), runs),
    st.tuples(st.just("save"), runs),
    st.tuples(st.just("save"), runs),
    st.tuples(st.just("fill"), numbers),
    st.tuples(st.just("fill"), numbers),
    st.tuples(st.just("together"), some),
    st.tuples(st.just("delete"), some),
    st.tuples(st.just("heat"), st.integers(0, 255)),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("reopen"), st.none()),
    st.tuples(st.just("kill"), st.none()),
    st.tuples(st.just("kill during"), runs),
)


def key_of(number: int) -> Key:
    return make_key(number % NUMBERS, number % len(BLOCK_BYTES))


def data_of(key: Key) -> bytes:
    return make_payload(key, BLOCK_BYTES[key[0]])


class World:
    """A store, and what follows from what was asked of it.

    must: blocks that it has to serve. gone: blocks that must not come back, by no kill. heat: which
    part of all blocks is worth writing again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.must: set[Key] = set()
        self.gone: set[Key] = set()
        self.retired: set[Key] = set()
        self.heat = 100
        self.lives = 0
        self.backend: NvmeBackend

    async def open(self) -> None:
        url = f"nvme://{self.root / str(self.lives)}?capacity={CAPACITY}&segment={SEGMENT}"
        self.backend = NvmeBackend.from_url(TierURL.parse(url))
        await self.backend.open(make_context(BLOCK_BYTES, retire=self.retire, worth=self.worth))

    async def retire(self, keys: Keys) -> None:
        self.retired |= set(keys)
        self.must -= set(keys)

    async def worth(self, keys: Keys) -> NDArray[np.bool_]:
        hot: NDArray[np.bool_] = np.frombuffer(keys.hashes, np.uint8)[::HASH_BYTES] < self.heat
        return hot

    async def save(self, chosen: Iterable[int]) -> None:
        blocks = {key: data_of(key) for key in map(key_of, chosen)}
        self.gone -= set(blocks)
        self.retired -= set(blocks)
        outcomes = await save(self.backend, blocks)
        assert set(outcomes.values()) <= {Outcome.DONE, Outcome.DECLINED}
        self.must |= {k for k, o in outcomes.items() if o is Outcome.DONE} - self.retired

    async def step(self, what: str, given: object) -> None:
        match what, given:
            case "save", list(chosen):
                await self.save(chosen)
            case "fill", int(first):
                for at in range(first, first + NUMBERS, 25):
                    await self.save(range(at, at + 25))
            case "together", list(firsts):
                await asyncio.gather(*(self.save(range(n, n + 9)) for n in firsts))
            case "delete", list(chosen):
                keys = Keys.of(map(key_of, chosen))
                self.must -= set(keys)
                await self.backend.delete(keys)
            case "heat", int(heat):
                self.heat = heat
            case "clear", None:
                self.gone |= set(map(key_of, range(NUMBERS)))
                self.must.clear()
                await self.backend.clear()
            case "reopen", None:
                await self.backend.close()
                await self.open()
            case "kill", None:
                await self.kill()
            case "kill during", list(chosen):
                saving = asyncio.create_task(self.save(chosen))
                await asyncio.sleep(0.002)
                await self.kill(saving)

    async def kill(self, saving: asyncio.Task[None] | None = None) -> None:
        """Go on with a copy of the files as they are now."""
        must = set(self.must)
        source, self.lives = self.root / str(self.lives), self.lives + 1
        shutil.copytree(source, self.root / str(self.lives))
        if saving is not None:
            await saving
        await self.backend.close()
        self.must = must
        await self.open()

    async def check(self) -> None:
        before = set(self.must)
        found = await load(self.backend, {k: BLOCK_BYTES[k[0]] for k in EVERYTHING})
        for key, data in found.items():
            assert data in (data_of(key), Outcome.MISSING)
            assert data is Outcome.MISSING or key not in self.gone
        lost = {k for k in before & self.must if found[k] is Outcome.MISSING}
        assert not lost, f"{len(lost)} of {len(before)} blocks are away"
        listed = [key async for keys in self.backend.scan() for key in keys]
        usage = await self.backend.usage()
        assert usage.physical_bytes <= CAPACITY
        assert len(listed) == len(set(listed))
        counted = usage.counters
        assert counted["refill_errors"] == counted["write_errors"] == counted["read_errors"] == 0


EVERYTHING = [key_of(n) for n in range(NUMBERS)]


async def play(root: Path, history: list[tuple[str, object]]) -> None:
    world = World(root)
    await world.open()
    try:
        for what, given in history:
            await world.step(what, given)
            await world.check()
    finally:
        segments = list(world.backend._table.segments.values())
        await world.backend.close()  # what is being written again is read until then
    assert [s.path for s in segments if s.readers] == []


@settings(max_examples=8, deadline=None)
@given(st.lists(steps, min_size=3, max_size=8))
def test_what_was_saved_and_not_given_up_is_served_whatever_happens(
    history: list[tuple[str, object]],
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(play(Path(root), [("fill", 0), *history]))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
