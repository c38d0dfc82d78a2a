"""Blocks may be sealed and proven where they are moved; whoever moves them is not believed."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from tests.storage.desk import Desk
from tierkv.backend import BlockBatch, Outcomes, Prove, Seal
from tierkv.blocks import MoveKind, Outcome
from tierkv_backends.memory import MemoryBackend


class Inline(MemoryBackend):
    """Proves as it should."""

    def __init__(self) -> None:
        super().__init__(0)
        self.threads: set[int] = set()

    async def write_sealing(self, batch: BlockBatch, seal: Seal) -> Outcomes:
        await asyncio.to_thread(self._in_thread, seal, batch)
        return await self.write(batch)

    async def read_proving(self, batch: BlockBatch, prove: Prove) -> Outcomes:
        outcomes = await self.read(batch)
        self.spoil(batch)
        read = np.flatnonzero(outcomes == Outcome.DONE)
        good = await asyncio.to_thread(prove, batch.take(read))
        outcomes[read[~good]] = Outcome.CORRUPT
        return outcomes

    def spoil(self, batch: BlockBatch) -> None:
        """Nothing."""

    def _in_thread(self, seal: Seal, batch: BlockBatch) -> None:
        self.threads.add(threading.get_ident())
        seal(batch)


class Spoils(Inline):
    """The second block is wrong."""

    def spoil(self, batch: BlockBatch) -> None:
        batch.payload(1)[7] ^= 1


class Lies(Spoils):
    """And is said to be read, without any proof."""

    async def read_proving(self, batch: BlockBatch, prove: Prove) -> Outcomes:
        outcomes = await self.read(batch)
        self.spoil(batch)
        return outcomes


class ProvesSome(Spoils):
    """Proves the first block twice, as if that were a proof of the second."""

    async def read_proving(self, batch: BlockBatch, prove: Prove) -> Outcomes:
        outcomes = await self.read(batch)
        self.spoil(batch)
        await asyncio.to_thread(prove, batch.take(np.array([0])))
        return outcomes


async def test_blocks_are_sealed_and_proven_by_the_backends_threads() -> None:
    backend = Inline()
    async with Desk.opened(backend) as desk:
        assert await desk.run(MoveKind.SAVE, [0, 1, 2]) == [Outcome.DONE] * 3
        desk.arena.view[:] = bytes(len(desk.arena))
        assert await desk.run(MoveKind.LOAD, [0, 1, 2]) == [Outcome.DONE] * 3
        assert all(desk.holds(i, i) for i in range(3))
    assert backend.threads
    assert threading.get_ident() not in backend.threads


@pytest.mark.parametrize("kind", [Spoils, Lies, ProvesSome])
async def test_a_wrong_byte_is_corrupt_whatever_the_backend_says(kind: type[Inline]) -> None:
    async with Desk.opened(kind()) as desk:
        assert await desk.run(MoveKind.SAVE, [0, 1, 2]) == [Outcome.DONE] * 3
        done, corrupt = Outcome.DONE, Outcome.CORRUPT
        assert await desk.run(MoveKind.LOAD, [0, 1, 2]) == [done, corrupt, done]
        unproven = int(kind is not Spoils)
        assert desk.mover.stats()["unforeseen_errors"] == unproven
