"""The memory backend keeps every promise of the kit, while it is open."""

from __future__ import annotations

import asyncio
import pathlib
import sys

import pytest

from tierkv.backend import Backend
from tierkv.blocks import Keys, Outcome
from tierkv.errors import ConfigError
from tierkv.registry import make_backend
from tierkv.testing import (
    BackendContract,
    BackendMachine,
    assert_same,
    load,
    make_blocks,
    make_context,
    save,
    sizes,
)
from tierkv_backends.memory import MemoryBackend


class TestMemoryBackend(BackendContract):
    survives_reopen = False
    exclusive = False

    def url(self, directory: pathlib.Path) -> str:
        return "memory://"

    def small_url(self, directory: pathlib.Path) -> str:
        return "memory://?capacity=16MiB"


class SmallMachine(BackendMachine):
    """Room for three of the largest blocks: most writes have to make room."""

    survives_reopen = False

    def make_backend(self, directory: pathlib.Path) -> Backend:
        return MemoryBackend(60_000)


def test_random_histories_agree_with_a_dict_while_room_is_made() -> None:
    SmallMachine.check()


async def test_a_block_written_again_while_it_retires_stays() -> None:
    blocks = make_blocks(2, [100])
    asked: asyncio.Queue[Keys] = asyncio.Queue()
    agreed = asyncio.Event()

    async def retire(keys: Keys) -> None:
        asked.put_nowait(keys)
        await agreed.wait()

    backend = MemoryBackend(200)
    await backend.open(make_context([100], retire=retire))
    await save(backend, blocks)
    writing = asyncio.create_task(save(backend, make_blocks(1, [100], first=9)))
    wanted = {key: blocks[key] for key in await asked.get()}
    assert set((await save(backend, wanted)).values()) == {Outcome.DONE}
    agreed.set()
    await writing
    assert_same(await load(backend, sizes(wanted)), wanted)


async def test_a_block_larger_than_the_capacity_is_declined_and_costs_nobody_else() -> None:
    small, large = make_blocks(2, [100]), make_blocks(1, [201], first=9)
    backend = MemoryBackend(200)
    await backend.open(make_context([100]))
    await save(backend, small)
    assert set((await save(backend, large)).values()) == {Outcome.DECLINED}
    assert_same(await load(backend, sizes(small)), small)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'capacity'"):
        make_backend("memory://?capcity=1GiB")


def test_the_example_is_short_enough_to_copy() -> None:
    source = sys.modules[MemoryBackend.__module__].__file__
    assert source is not None
    assert len(pathlib.Path(source).read_text().splitlines()) <= 150
