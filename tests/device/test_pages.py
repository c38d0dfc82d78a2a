"""`tierkv.device`: what lies in a slot, and that nothing else is touched."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.blocks import ARENA_ALIGN, slot_bytes
from tierkv.device import Pages, arena_tensor
from tierkv.errors import LayoutError
from tierkv.layout import Group, GroupKind, Layout


def full(name: str, nbytes: int) -> Group:
    return Group(name=name, kind=GroupKind.FULL, block_tokens=16, block_bytes=nbytes)


def page_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t[0].numel() * t.element_size() for t in tensors)


def addresses(tensor: torch.Tensor, block: int) -> list[int]:
    """Byte addresses (within the storage) of one page, by walking every element."""
    item = tensor.element_size()
    found = []
    for index in itertools.product(*(range(n) for n in tensor.shape[1:])):
        element = tensor.storage_offset() + block * tensor.stride(0)
        element += sum(i * s for i, s in zip(index, tensor.stride()[1:], strict=True))
        found += [element * item + b for b in range(item)]
    return found


def naive_slot(tensors: Sequence[torch.Tensor], block: int) -> bytes:
    """One block's bytes, one by one: by allocation in the order given, then by address."""
    order: list[int] = []
    cells: list[tuple[int, int, int]] = []
    for tensor in tensors:
        raw = tensor.untyped_storage()
        if raw.data_ptr() not in order:
            order.append(raw.data_ptr())
        for address in addresses(tensor, block):
            cells.append((order.index(raw.data_ptr()), address, raw[address]))
    return bytes(value for _, _, value in sorted(cells))


@dataclass
class Case:
    groups: dict[str, list[torch.Tensor]]
    storages: list[torch.Tensor]
    blocks: int

    def layout(self) -> Layout:
        return Layout(tuple(full(name, page_bytes(t)) for name, t in self.groups.items()))


@st.composite
def strided_layouts(draw: st.DrawFn) -> Case:
    """Groups that overlay one allocation, pages padded and interleaved, dims in any memory order,
    packed by block or by layer; sometimes a group with an allocation of its own."""
    blocks = draw(st.integers(1, 5))
    storages, groups = [], {}
    common = torch.zeros(0, dtype=torch.uint8)
    plans = []
    for g in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        order = draw(st.permutations(range(len(shape))))
        layers, pad = draw(st.integers(1, 3)), draw(st.integers(0, 3))
        by_layer, own = draw(st.booleans()), draw(st.booleans())
        plans.append((f"g{g}", dtype, shape, order, layers, pad, by_layer, own))
    page = {p[0]: int(np.prod(p[2])) * p[1].itemsize + p[5] * p[1].itemsize for p in plans}
    total = max(page[p[0]] * p[4] for p in plans) * blocks + 16
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    common = torch.from_numpy(rng.integers(0, 256, -(-total // 8) * 8, dtype=np.uint8))
    storages.append(common)
    for name, dtype, shape, order, layers, _pad, by_layer, own in plans:
        base = common
        if own:
            base = torch.from_numpy(rng.integers(0, 256, len(common), dtype=np.uint8))
            storages.append(base)
        words, item = page[name] // dtype.itemsize, dtype.itemsize
        inner, step = [0] * len(shape), 1
        for dim in reversed(order):
            inner[dim], step = step, step * shape[dim]
        stride, hop = (words, words * blocks) if by_layer else (words * layers, words)
        typed = base.view(dtype)
        groups[name] = [
            torch.as_strided(typed, (blocks, *shape), (stride, *inner), layer * hop)
            for layer in range(layers)
        ]
        assert typed.element_size() == item
    return Case(groups, storages, blocks)


def batch(
    case: Case, draw: st.DrawFn, names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Rows over some (group, block) pairs, no group overlaid by another, slots in random places."""
    layout = case.layout()
    rows = [(layout.index_of(n), b) for n in names for b in range(case.blocks)]
    rows = draw(st.permutations(rows))[: draw(st.integers(0, len(rows)))]
    offsets, end = [], 0
    for group, _ in rows:
        end += ARENA_ALIGN * draw(st.integers(0, 1))
        offsets.append(end)
        end += slot_bytes(layout.groups[group].block_bytes)
    return (
        np.array([g for g, _ in rows], np.uint16),
        np.array([b for _, b in rows], np.int32),
        np.array(offsets, np.int64),
        max(end, ARENA_ALIGN),
    )


def compiled(case: Case, data: st.DataObject) -> Pages:
    """Pages whose combs are copied by torch, as short ones are, or by numpy, a block at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierkv.runs.STRIP_BYTES", data.draw(st.sampled_from([1, 24, 1 << 20])))
        return Pages(case.layout(), case.groups)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_gather_puts_exactly_the_real_bytes_of_each_block_into_its_slot(
    data: st.DataObject,
) -> None:
    case = data.draw(strided_layouts())
    layout = case.layout()
    groups, ids, offsets, nbytes = batch(case, data.draw, list(case.groups))
    arena = bytearray(b"\xa5" * nbytes)
    expected = bytearray(arena)
    for g, b, o in zip(groups.tolist(), ids.tolist(), offsets.tolist(), strict=True):
        slot = naive_slot(case.groups[layout.groups[g].name], b)
        expected[o : o + len(slot)] = slot
    compiled(case, data).gather(groups, ids, arena_tensor(memoryview(arena)), offsets)
    assert arena == expected


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_scatter_writes_the_pages_of_its_blocks_and_no_other_byte(data: st.DataObject) -> None:
    case = data.draw(strided_layouts())
    layout = case.layout()
    name = data.draw(st.sampled_from(sorted(case.groups)))
    groups, ids, offsets, nbytes = batch(case, data.draw, [name])
    rng = np.random.default_rng(7)
    arena = bytearray(rng.integers(0, 256, nbytes, dtype=np.uint8).tobytes())
    before = [s.clone() for s in case.storages]
    compiled(case, data).scatter(groups, ids, arena_tensor(memoryview(arena)), offsets)
    tensors = case.groups[name]
    for b, o in zip(ids.tolist(), offsets.tolist(), strict=True):
        size = layout.groups[layout.index_of(name)].block_bytes
        assert naive_slot(tensors, b) == bytes(arena[o : o + size])
    mine = {
        (t.untyped_storage().data_ptr(), a)
        for t in tensors
        for b in ids.tolist()
        for a in addresses(t, b)
    }
    for storage, old in zip(case.storages, before, strict=True):
        changed = torch.nonzero(storage != old).flatten().tolist()
        assert all((storage.untyped_storage().data_ptr(), a) in mine for a in changed)


def test_neighboring_pages_of_a_packed_block_become_one_run() -> None:
    store = torch.zeros(4, 3, 2, 8)
    pages = Pages(
        Layout((full("packed", 3 * 2 * 8 * 4),)),
        {"packed": [store[:, 2], store[:, 0], store[:, 1]]},
    )
    assert pages.runs == (1,)


def test_pages_of_separate_layers_stay_one_run_a_layer() -> None:
    store = torch.zeros(3, 4, 2, 8)
    pages = Pages(Layout((full("g", 3 * 2 * 8 * 4),)), {"g": list(store)})
    assert pages.runs == (3,)


def test_layers_that_are_equally_far_apart_are_copied_in_one_call() -> None:
    store = torch.zeros(5, 4, 2, 8)  # five layers of four blocks
    apart = [torch.zeros(4, 2, 8) for _ in range(3)]
    layout = Layout((full("together", 5 * 2 * 8 * 4), full("apart", 3 * 2 * 8 * 4)))
    pages = Pages(layout, {"together": list(store), "apart": apart})
    assert pages.runs == (5, 3)
    assert pages.launches == (1, 3)


@pytest.mark.parametrize(("layers", "apart"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("nbytes", [16, 24, 16 << 10, 4 << 20])
def test_blocks_of_any_size_go_out_and_come_back_whole(
    nbytes: int, layers: int, apart: bool
) -> None:
    pools = list(torch.randint(0, 256, (layers, 3, nbytes), dtype=torch.uint8))
    pools = [p.clone() for p in pools] if apart else pools
    kept = [p.clone() for p in pools]
    pages = Pages(Layout((full("g", nbytes * layers),)), {"g": pools})
    slot = slot_bytes(nbytes * layers)
    arena = torch.zeros(4 * slot, dtype=torch.uint8)
    rows = np.zeros(3, np.uint16), np.array([2, 0, 1], np.int32), np.array([3, 0, 1]) * slot
    pages.gather(rows[0], rows[1], arena, rows[2])
    for pool in pools:
        pool.zero_()
    pages.scatter(rows[0], rows[1], arena, rows[2])
    assert all(torch.equal(pool, old) for pool, old in zip(pools, kept, strict=True))
    slots = [torch.cat([p[b] for p in kept]) for b in (2, 0, 1)]
    at = [int(o) for o in rows[2]]
    assert all(torch.equal(arena[o : o + len(s)], s) for o, s in zip(at, slots, strict=True))


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_pages_at_odd_addresses_are_copied_in_words_that_fit(shift: int) -> None:
    buffer = torch.from_numpy(np.random.default_rng(3).integers(0, 256, 4096 + 16, np.uint8))
    shift += -buffer.data_ptr() % 16
    pool = torch.from_numpy(buffer.numpy()[shift : shift + 4096].reshape(16, 256))
    assert pool.untyped_storage().data_ptr() % 16
    kept, pages = pool.clone(), Pages(Layout((full("g", 256),)), {"g": [pool]})
    arena = torch.zeros(16 * 4096, dtype=torch.uint8)
    rows = np.zeros(16, np.uint16), np.arange(16, dtype=np.int32), np.arange(16) * 4096
    pages.gather(rows[0], rows[1], arena, rows[2])
    assert torch.equal(arena.view(16, 4096)[:, :256], kept)


def test_groups_on_two_devices_are_refused() -> None:
    layout = Layout((full("g", 64), full("h", 64)))
    with pytest.raises(LayoutError, match=r"'h'.*on meta.*before on cpu.*one device"):
        Pages(layout, {"g": [torch.zeros(2, 16)], "h": [torch.zeros(2, 16, device="meta")]})


def test_wrong_block_bytes_are_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match=r"hold 64 bytes per block.*block_bytes 63"):
        Pages(Layout((full("g", 63),)), {"g": [torch.zeros(2, 16)]})


def test_a_group_without_tensors_and_an_unknown_group_are_refused() -> None:
    layout = Layout((full("g", 64),))
    with pytest.raises(LayoutError, match="no tensor holds"):
        Pages(layout, {})
    with pytest.raises(LayoutError, match="did you mean 'g'"):
        Pages(layout, {"g": [torch.zeros(2, 16)], "gg": [torch.zeros(2, 16)]})


def test_scratch_groups_need_no_tensors() -> None:
    scratch = Group(name="s", kind=GroupKind.SCRATCH, block_tokens=1, block_bytes=8)
    pages = Pages(Layout((full("g", 64), scratch)), {"g": [torch.zeros(2, 16)]})
    with pytest.raises(ValueError, match="group 1 has no pages"):
        pages.gather(
            np.array([1], np.uint16), np.array([0], np.int32),
            torch.zeros(4096, dtype=torch.uint8), np.array([0], np.int64),
        )  # fmt: skip


def test_pages_that_share_bytes_are_refused() -> None:
    same = torch.zeros(2, 16)
    with pytest.raises(LayoutError, match="share bytes"):
        Pages(Layout((full("g", 128),)), {"g": [same, same]})
    with pytest.raises(LayoutError, match="dim 0 of each tensor must be the block id"):
        Pages(Layout((full("g", 64),)), {"g": [torch.zeros(16).expand(4, 16)]})


@pytest.mark.parametrize(
    ("block", "offset"), [(4, 0), (-1, 0), (0, 1), (0, -4096), (0, 8192), (0, 8192 - 4096 + 1)]
)
def test_block_ids_and_offsets_out_of_range_are_refused(block: int, offset: int) -> None:
    tensor = torch.arange(4 * 16, dtype=torch.float32).reshape(4, 16)
    pages = Pages(Layout((full("g", 64),)), {"g": [tensor]})
    arena = torch.zeros(8192, dtype=torch.uint8)
    args = (np.array([0], np.uint16), np.array([block], np.int32), arena)
    with pytest.raises(ValueError, match=r"outside|offsets must be"):
        pages.gather(*args, np.array([offset], np.int64))
    with pytest.raises(ValueError, match=r"outside|offsets must be"):
        pages.scatter(*args, np.array([offset], np.int64))
    assert not arena.any()
    assert torch.equal(tensor, torch.arange(64, dtype=torch.float32).reshape(4, 16))


def test_batches_larger_than_the_staging_buffer_arrive_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierkv.device.STAGING_BYTES", 3 * 4096)
    tensor = torch.arange(10 * 16, dtype=torch.float32).reshape(10, 16)
    pages = Pages(Layout((full("g", 64),)), {"g": [tensor]})
    arena = torch.zeros(10 * 4096, dtype=torch.uint8)
    rows = np.zeros(10, np.uint16), np.arange(10, dtype=np.int32), np.arange(10) * 4096
    pages.gather(rows[0], rows[1], arena, rows[2])
    expected = tensor.clone()
    tensor.zero_()
    pages.scatter(rows[0], rows[1], arena, rows[2])
    assert torch.equal(tensor, expected)


def test_the_signature_tells_memory_orders_apart_but_not_pool_sizes() -> None:
    layout = Layout((full("g", 2 * 3 * 4),))

    def signature(tensor: torch.Tensor) -> object:
        return Pages(layout, {"g": [tensor]}).signature

    rows = signature(torch.zeros(4, 2, 3))
    assert rows == signature(torch.zeros(9, 2, 3))
    assert rows != signature(torch.zeros(4, 3, 2).transpose(1, 2))
    assert rows != signature(torch.zeros(4, 2, 3, dtype=torch.int32))
