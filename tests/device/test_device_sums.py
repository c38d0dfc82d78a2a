"""Checksums where the blocks are: the same as the keeper's, and nothing that happens to a staged
extent gets past either algorithm."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv import device_sums, multilinear
from tierkv.backend import BlockBatch
from tierkv.blocks import Keys, slot_bytes
from tierkv.device import Pages, arena_tensor
from tierkv.layout import Group, GroupKind, Layout
from tierkv.pinned import Arena
from tierkv.record import Algorithm, Made, blank, seal_sync, seeds, verify_sync
from tierkv.testing.batches import make_key

CHANGES = 10_000
MARK = 7


def numpy_sums(blocks: torch.Tensor, of: NDArray[np.uint64]) -> list[int]:
    rows = blocks.reshape(len(blocks), -1).view(torch.uint8).numpy()
    return multilinear.checksums([memoryview(row) for row in rows], of).tolist()


def torch_sums(blocks: torch.Tensor, of: NDArray[np.uint64]) -> list[int]:
    return device_sums.checksums(blocks, of).cpu().numpy().view(np.uint64).tolist()


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 4, 7, 8, 1000, 8191, 8192, 8193, 65536, 100_003]),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    st.integers(0, 2**32),
)
def test_torch_and_numpy_give_the_same_checksums(
    n: int, items: int, dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, items * dtype.itemsize), np.uint8)
    blocks = torch.from_numpy(raw).view(dtype)
    of = rng.integers(0, 2**64, n, np.uint64)
    assert torch_sums(blocks, of) == numpy_sums(blocks, of)


@pytest.mark.parametrize("n", [1, 3])
def test_they_agree_on_blocks_of_three_levels_and_of_any_tile(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = torch.arange(n * (9 << 17), dtype=torch.int64).mul_(0x9E3779B97F4A7C15 >> 1)
    blocks = blocks.reshape(n, -1)  # 9 MiB a block
    of = np.arange(n, dtype=np.uint64)
    expected = numpy_sums(blocks, of)
    assert torch_sums(blocks, of) == expected
    monkeypatch.setitem(device_sums.TILE_BYTES, "cpu", 3 * 8192)
    assert torch_sums(blocks, of) == expected


def test_a_tensor_that_starts_at_an_odd_byte_is_fine() -> None:
    whole = torch.arange(2 * 8192 + 1, dtype=torch.int64).to(torch.uint8)
    shifted = whole[1:].reshape(2, 8192)
    of = np.zeros(2, np.uint64)
    assert torch_sums(shifted, of) == numpy_sums(shifted.clone(), of)


def test_no_blocks_have_no_checksums() -> None:
    blocks = torch.zeros(0, 4096, dtype=torch.uint8)
    assert torch_sums(blocks, np.zeros(0, np.uint64)) == []


def test_what_is_not_one_row_a_seed_is_refused() -> None:
    blocks = torch.zeros(4, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="4 seeds"):
        device_sums.checksums(blocks[:, ::2], np.zeros(4, np.uint64))
    with pytest.raises(ValueError, match="3 seeds"):
        device_sums.checksums(blocks, np.zeros(3, np.uint64))


class Staged:
    """Six blocks of two groups, gathered from pages into an arena; each path seals them."""

    def __init__(self, arena: Arena) -> None:
        layout = Layout(
            (
                Group(name="kv", kind=GroupKind.FULL, block_tokens=16, block_bytes=3 * 8192),
                Group(name="odd", kind=GroupKind.FULL, block_tokens=16, block_bytes=10_006),
            )
        )
        torch.manual_seed(1)
        kv = torch.randn(8, 2, 3 * 2048).to(torch.bfloat16)
        odd = torch.randint(-1, 2, (8, 5003), dtype=torch.int16)  # long runs of equal words
        self.groups = np.array([0, 0, 0, 1, 1, 1], np.uint16)
        self.keys = Keys.of([make_key(i, int(g)) for i, g in enumerate(self.groups)])
        nbytes = np.array(layout.block_bytes, np.int64)[self.groups]
        ends = np.cumsum([slot_bytes(n) for n in nbytes.tolist()])
        offsets = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        block_ids = np.array([5, 0, 3, 7, 2, 1], np.int32)
        pages = Pages(layout, {"kv": [kv], "odd": [odd]})
        pages.gather(self.groups, block_ids, arena_tensor(arena.view), offsets)
        self.batch = BlockBatch(self.keys, blank(6), arena.view, offsets, nbytes)
        self.pages = (kv[block_ids[:3]], odd[block_ids[3:]])

    def seal(self, algorithm: Algorithm) -> None:
        made = None
        if algorithm is Algorithm.MULTILINEAR_64:  # from the pages, before they were gathered
            of = seeds(self.keys)
            sums = [torch_sums(self.pages[0], of[:3]), torch_sums(self.pages[1], of[3:])]
            columns = np.full(6, algorithm, np.uint8), np.array(sums, np.uint64).reshape(6)
            made = Made(*columns)
        self.batch.records[:] = seal_sync(self.keys, self.batch.payloads(), MARK, made=made)

    def verified(self) -> list[bool]:
        good = verify_sync(self.keys, self.batch.records, self.batch.payloads(), MARK)
        found: list[bool] = good.tolist()
        return found


@pytest.fixture
def staged() -> Iterator[Staged]:
    with Arena.create(1 << 20) as arena:
        yield Staged(arena)


def damage(rng: random.Random, block: memoryview) -> str:
    """Change a block in one of the ways that hardware and bugs do."""
    n = len(block)
    kind = rng.choice(["bit", "bits", "word", "swap", "top bits", "shift", "zeros", "stuck"])
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else rng.randint(2, 9)):
            block[rng.randrange(n)] ^= 1 << rng.randrange(8)
    elif kind == "word":
        at = rng.randrange(n // 8) * 8
        block[at : at + 8] = rng.randbytes(8)
    elif kind == "swap":
        width = rng.choice([1, 2, 4, 8, 64, 512, 4096])
        a, b = (rng.randrange(n // width) * width for _ in range(2))
        block[a : a + width], block[b : b + width] = (
            bytes(block[b : b + width]),
            bytes(block[a : a + width]),
        )
    elif kind == "top bits":  # an even number of top bits: what a plain dot product misses
        for word in rng.sample(range(n // 8), 2):
            block[word * 8 + 7] ^= 0x80
    elif kind == "shift":
        by = rng.choice([1, 2, 4, 8, 16, 512, 4096])
        block[by:] = bytes(block[:-by])
    else:
        at = rng.randrange(n)
        length = rng.choice([n, 512, 4096])
        part = block[at : at + length]
        part[:] = bytes([0 if kind == "zeros" else rng.randrange(256)]) * len(part)
    return kind


@pytest.mark.parametrize("algorithm", Algorithm)
def test_every_change_of_a_staged_extent_is_caught(staged: Staged, algorithm: Algorithm) -> None:
    staged.seal(algorithm)
    assert (staged.batch.records["algorithm"] == algorithm).all()
    assert staged.verified() == [True] * 6
    rng = random.Random(int(algorithm))
    payloads = staged.batch.payloads()
    whole = [bytes(p) for p in payloads]
    caught = 0
    while caught < CHANGES:
        row = rng.randrange(6)
        kind = damage(rng, payloads[row])
        if bytes(payloads[row]) == whole[row]:
            continue  # two equal words were swapped: nothing has changed
        assert staged.verified() == [i != row for i in range(6)], (kind, row)
        payloads[row][:] = whole[row]
        caught += 1
    assert staged.verified() == [True] * 6


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_block_in_anothers_slot_is_caught(staged: Staged, algorithm: Algorithm) -> None:
    staged.seal(algorithm)
    payloads = staged.batch.payloads()
    payloads[0][:], payloads[2][:] = bytes(payloads[2]), bytes(payloads[0])
    payloads[4][:] = bytes(payloads[3])
    assert staged.verified() == [False, True, False, True, False, True]


def test_rows_of_both_algorithms_stand_side_by_side(staged: Staged) -> None:
    staged.seal(Algorithm.MULTILINEAR_64)
    by_device = staged.batch.records.copy()
    some = np.where(np.arange(6) % 2, by_device["algorithm"], 0).astype(np.uint8)
    made = Made(some, by_device["checksum"])
    mixed = seal_sync(staged.keys, staged.batch.payloads(), MARK, made=made)
    assert mixed["algorithm"].tolist() == [1, 2, 1, 2, 1, 2]
    staged.batch.records[:] = mixed
    assert staged.verified() == [True] * 6
    staged.batch.payload(2)[5] ^= 1
    staged.batch.payload(3)[5] ^= 1
    assert staged.verified() == [True, True, False, False, True, True]
