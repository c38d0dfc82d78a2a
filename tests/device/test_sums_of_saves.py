"""Checksums that a save brings along from where its pages are, through both homes, to a tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cache.engine import PROMPT, Engine, assert_loaded, open_cache, tables
from tierkv import Group, GroupKind, Layout, multilinear
from tierkv.blocks import Move, MoveKind, slot_bytes
from tierkv.copier import Copier, Copy
from tierkv.device import Pages
from tierkv.record import Algorithm, seeds
from tierkv.streams import CpuDevice
from tierkv.testing import make_key, make_move
from tierkv.testing.fake_device import FakeDevice

LAYOUT = Layout(
    tuple(
        Group(name=name, kind=GroupKind.FULL, block_tokens=16, block_bytes=nbytes)
        for name, nbytes in (("chunks", 2 * 8192), ("padded", 9000), ("odd", 5003))
    )
)
BLOCKS = 6
STEP = slot_bytes(2 * 8192)

DEVICES = {
    "direct": CpuDevice,
    "staged": lambda: CpuDevice(2 * STEP),  # several parts to a group
    "queued": lambda: FakeDevice(2 * STEP),
}


def saved(device: CpuDevice) -> tuple[Copy, Move, torch.Tensor, list[bytes]]:
    """A save of every block in an order that no group and no slot follows; its payloads."""
    noise = torch.Generator().manual_seed(3)
    tensors = {
        g.name: [torch.randint(0, 256, (BLOCKS, g.block_bytes), dtype=torch.uint8, generator=noise)]
        for g in LAYOUT.groups
    }
    n = BLOCKS * len(LAYOUT.groups)
    order = np.random.default_rng(5).permutation(n)
    groups, ids = (order % 3).astype(np.uint16), (order // 3).astype(np.int32)
    offsets = np.random.default_rng(6).permutation(n) * STEP
    keys = [make_key(int(i), int(g)) for i, g in zip(ids, groups, strict=True)]
    move = make_move(MoveKind.SAVE, keys, offsets=offsets.tolist(), block_ids=ids.tolist())
    arena = torch.zeros(n * STEP, dtype=torch.uint8)
    copier = Copier(arena, device)
    copy = copier.save(
        Pages(LAYOUT, tensors), groups, ids, offsets, after=copier.mark(), seeds=seeds(move.keys)
    )
    names = [g.name for g in LAYOUT.groups]
    blocks = [
        tensors[names[g]][0][i].numpy().tobytes()
        for g, i in zip(groups.tolist(), ids.tolist(), strict=True)
    ]
    return copy, move, arena, blocks


@pytest.mark.parametrize("kind", DEVICES)
def test_each_block_is_summed_in_its_place_of_the_batch(kind: str) -> None:
    device = DEVICES[kind]()
    copy, move, arena, blocks = saved(device)
    if isinstance(device, FakeDevice):
        device.finish()
    assert copy.done()
    for at, block in zip(move.offsets.tolist(), blocks, strict=True):
        assert arena[at : at + len(block)].numpy().tobytes() == block
    summed = copy.with_sums(move)
    assert set(summed.algorithms.tolist()) == {Algorithm.MULTILINEAR_64}
    assert summed.checksums.tolist() == multilinear.checksums(blocks, seeds(move.keys)).tolist()


def test_a_move_keeps_its_checksums_on_a_wire() -> None:
    move = make_move(MoveKind.SAVE, [make_key(1), make_key(2)], offsets=[0, 4096])
    assert not len(Move.unpack(move.pack()).checksums)
    summed = move.summed(Algorithm.MULTILINEAR_64, np.array([7, 2**64 - 1], np.uint64))
    there = Move.unpack(summed.pack())
    assert there.algorithms.tolist() == [2, 2]
    assert there.checksums.tolist() == [7, 2**64 - 1]


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_tier_keeps_the_checksums_that_it_is_given_and_verifies_them(
    tmp_path: Path, isolation: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"nvme://{tmp_path}/kv?capacity=64MiB&segment=1MiB"
    how = {"isolation": isolation, "codec": codec}
    other = [*range(1000, 1070)]
    right, wrong = Engine(1), Engine(2)
    async with open_cache(url, device_checksums=True, **how) as cache:
        await cache.save(PROMPT, right.pages, tables())
        await cache.flush(deadline_s=30)
        real = Copy.with_sums

        def of_something_else(copy: Copy, move: Move) -> Move:
            return real(copy, move).summed(2, np.zeros(len(move), np.uint64))

        monkeypatch.setattr(Copy, "with_sums", of_something_else)
        await cache.save(other, wrong.pages, tables())
        await cache.flush(deadline_s=30)
    async with open_cache(url, **how) as cache:
        back = Engine(3)
        hit = await cache.lookup(PROMPT)
        loaded = await cache.load(hit, back.pages, tables())
        assert loaded.tokens == hit.tokens == 64
        assert_loaded(right, back, hit, tables(), tables())
        hit = await cache.lookup(other)
        loaded = await cache.load(hit, back.pages, tables())
        assert loaded.tokens == 0
        assert cache.stats()["load_corrupt_blocks"] == sum(map(len, hit.blocks.values()))
