"""Pages on a GPU: what comes back is what went out, in the order of the engine's stream."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from bench.gpu import use_this_checkout
from tierkv import Group, GroupKind, Layout
from tierkv.blocks import slot_bytes
from tierkv.copier import Copier
from tierkv.device import Pages
from tierkv.host import HostArena
from tierkv.multilinear import checksums
from tierkv.pinned import Arena
from tierkv.streams import CudaRegistrar, device_for

if os.environ.get("TIERKV_GPU") == "cuda" and not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device here: none of these tests ran", allow_module_level=True)

MIB = 1 << 20
BLOCKS = 32
LAYERS = 5


def group(name: str, nbytes: int) -> Group:
    return Group(name=name, kind=GroupKind.FULL, block_tokens=16, block_bytes=nbytes)


def made(kind: str, device: torch.device) -> tuple[Layout, dict[str, list[torch.Tensor]]]:
    """Pages as engines lay them out, filled with noise."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)

    match kind:
        case "by layer":  # GQA: K and V of a layer in one tensor
            layers = [noise(BLOCKS, 2 * 16 * 2 * 64) for _ in range(LAYERS)]
            return Layout((group("g", LAYERS * 4096),)), {"g": layers}
        case "one allocation":
            store = noise(LAYERS, BLOCKS, 4096)
            return Layout((group("g", LAYERS * 4096),)), {"g": list(store)}
        case "packed":  # MLA and states over one padded allocation, of odd sizes
            store = noise(BLOCKS, 1_002_240)
            a, b = store[:, :985_664], store[: BLOCKS // 2, :655_360]
            layout = Layout((group("mla", 985_664), group("state", 655_360)))
            return layout, {"mla": [a], "state": [b]}
        case "heads first":
            store = noise(BLOCKS, 4, 16, 128).transpose(1, 2)
            return Layout((group("g", 4 * 16 * 128),)), {"g": [store]}
        case "odd":
            padded, plain = noise(BLOCKS, 1200)[:, 100:1101], noise(2, BLOCKS, 1001)
            return Layout((group("g", 3 * 1001),)), {"g": [padded, *plain]}
    raise AssertionError(kind)


KINDS = ["by layer", "one allocation", "packed", "heads first", "odd"]


class Rig:
    """Pages, a registered arena, a copier."""

    def __init__(self, kind: str, device: torch.device, arena: Arena) -> None:
        self.layout, self.tensors = made(kind, device)
        self.pages = Pages(self.layout, self.tensors)
        self.host = HostArena(arena, self.layout.block_bytes)
        cuts = self.host.register_sync(device)
        self.copier = Copier(self.host.memory, device_for(device), cuts=cuts)

    def rows(self, ids: list[int], gap: int = 0) -> tuple[Any, Any, Any]:
        """One group's blocks in slots of its own, every third one apart."""
        step = slot_bytes(self.layout.groups[0].block_bytes)
        offsets = [n * step + n // 3 * gap for n in range(len(ids))]
        return (
            np.zeros(len(ids), np.uint16),
            np.array(ids, np.int32),
            np.array(offsets, np.int64),
        )

    def block(self, block: int) -> bytes:
        pages = [t[block] for t in self.tensors[self.layout.groups[0].name]]
        return b"".join(p.contiguous().cpu().numpy().tobytes() for p in pages)


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Rig]:
    with Arena.create(64 * MIB) as arena:
        found = Rig(request.param, device, arena)
        yield found
        found.copier.close()
        found.host.unregister_sync()


def test_blocks_go_out_and_come_back_into_other_pages(rig: Rig) -> None:
    ids, others = list(range(0, BLOCKS, 3)), list(range(1, BLOCKS, 3))
    before = {b: rig.block(b) for b in range(BLOCKS)}
    groups, out, offsets = rig.rows(ids, gap=8192)
    rig.copier.save(rig.pages, groups, out, offsets, after=rig.copier.mark()).end.wait()
    back = np.array(others[: len(ids)], np.int32)
    n = len(back)
    load = rig.copier.load(rig.pages, groups[:n], back, offsets[:n], after=rig.copier.mark())
    load.end.wait()
    assert load.done()
    for mine, other in zip(ids, others, strict=False):
        assert rig.block(other) == before[mine]
        assert rig.block(mine) == before[mine]


def test_blocks_are_summed_where_they_are(rig: Rig) -> None:
    ids = list(range(0, BLOCKS, 2))[::-1]
    groups, out, offsets = rig.rows(ids, gap=8192)
    seeds = np.arange(len(ids), dtype=np.uint64) << np.uint64(40)
    copy = rig.copier.save(rig.pages, groups, out, offsets, after=rig.copier.mark(), seeds=seeds)
    for ts in rig.tensors.values():
        rig.copier.protect(copy)
        for t in ts:
            t.fill_(9)  # the next step
    copy.end.wait()
    assert copy.sums is not None
    nbytes, memory = rig.layout.groups[0].block_bytes, rig.host.memory.numpy()
    there = [memory[at : at + nbytes] for at in offsets.tolist()]
    assert copy.sums.checksums().tolist() == checksums(there, seeds).tolist()
    assert not any((block == 9).all() for block in there)


def test_case_082_and_084_a_save_is_of_the_step_before_it_and_not_of_the_one_after(
    rig: Rig,
) -> None:
    ids = list(range(BLOCKS))
    groups, out, offsets = rig.rows(ids)
    tensors = [t for ts in rig.tensors.values() for t in ts]
    for _ in range(5):
        for t in tensors:
            t.fill_(7)  # the step: it may still run when the save is launched
        copy = rig.copier.save(rig.pages, groups, out, offsets, after=rig.copier.mark())
        rig.copier.protect(copy)
        for t in tensors:
            t.fill_(9)  # the next one
        copy.end.wait()
        nbytes = rig.layout.groups[0].block_bytes
        for at in offsets.tolist():
            assert (rig.host.memory[at : at + nbytes] == 7).all()


def test_case_083_a_load_outlives_a_zeroing_that_was_launched_before_it(rig: Rig) -> None:
    ids = list(range(BLOCKS))
    groups, out, offsets = rig.rows(ids)
    before = {b: rig.block(b) for b in ids}
    rig.copier.save(rig.pages, groups, out, offsets, after=rig.copier.mark()).end.wait()
    for _ in range(5):
        for ts in rig.tensors.values():
            for t in ts:
                t.zero_()
        load = rig.copier.load(rig.pages, groups, out, offsets, after=rig.copier.mark())
        load.end.wait()
        assert {b: rig.block(b) for b in ids} == before


def test_the_arena_is_registered_and_copies_across_pieces_are_whole(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a dry run has no driver")
    from tierkv.registration import Registration

    with Arena.create(8 * MIB) as arena:
        host = HostArena(arena, [985_664, 822_272])
        done = Registration(arena.view, CudaRegistrar(device), [985_664, 822_272], piece_bytes=MIB)
        assert done.pinned, done.reason
        assert len(done.cuts) == 7
        copier = Copier(host.memory, device_for(device), cuts=done.cuts)
        layout, tensors = made("packed", device)
        pages = Pages(layout, tensors)
        ids = np.arange(8, dtype=np.int32)
        offsets = np.arange(8, dtype=np.int64) * slot_bytes(985_664)
        groups = np.zeros(8, np.uint16)
        copier.save(pages, groups, ids, offsets, after=copier.mark()).end.wait()
        for n, at in enumerate(offsets.tolist()):
            page = tensors["mla"][0][n].cpu()
            assert torch.equal(host.memory[at : at + 985_664], page)
        done.close()


def test_a_refused_registration_leaves_no_error_for_the_next_launch(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a dry run has no driver")
    registrar = CudaRegistrar(device)
    assert registrar.register(4096, 4096), "nothing is mapped there"
    registrar.clear_error()
    assert int(torch.ones(1, device=device).add_(1).item()) == 2


@pytest.mark.parametrize("kind", ["by layer", "packed"])
def test_the_cache_saves_and_loads_pages_on_the_device(
    kind: str, device: torch.device, tmp_path: Path
) -> None:
    use_this_checkout(tmp_path)
    layout, tensors = made(kind, device)
    layout = Layout(layout.groups[:1])
    name = layout.groups[0].name
    pages = Pages(layout, {name: tensors[name]})
    tokens = list(range(16 * 8 + 1))
    out, back = list(range(9)), list(range(31, 22, -1))
    expected = [tensors[name][-1][b].cpu().clone() for b in out[:8]]

    async def work() -> dict[str, Any]:
        async with tierkv.open(
            "", layout=layout, namespace="gpu@1", pinned="64MiB", policy="dense"
        ) as cache:
            await cache.save(tokens, pages, {name: out})
            loaded = await cache.load(await cache.lookup(tokens), pages, {name: back})
            assert loaded.tokens == 16 * 8
            return cache.stats()

    stats = asyncio.run(work())
    assert stats["pinned"] == (device.type == "cuda")
    for block, page in zip(back, expected, strict=False):
        assert torch.equal(tensors[name][-1][block].cpu(), page)
