"""The allocator of arena slots, against a map of every 4096 bytes."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.blocks import ARENA_ALIGN, slot_bytes
from tierkv.slots import SlotAllocator

UNITS = 24
SIZES = st.integers(1, 6 * ARENA_ALIGN)


class Checked:
    """An allocator beside a plain list that says of every unit of the arena whether it is taken."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.slots = SlotAllocator(units * ARENA_ALIGN)
        self.taken = [False] * units
        self.held: list[tuple[int, int]] = []

    def mark(self, offset: int, nbytes: int, *, taken: bool) -> None:
        assert offset % ARENA_ALIGN == 0
        first = offset // ARENA_ALIGN
        end = first + slot_bytes(nbytes) // ARENA_ALIGN
        assert 0 <= first < end <= self.units, "a slot leaves the arena"
        assert set(self.taken[first:end]) == {not taken}, "two slots overlap"
        self.taken[first:end] = [taken] * (end - first)

    def take(self, offset: int, nbytes: int) -> None:
        self.mark(offset, nbytes, taken=True)
        self.held.append((offset, nbytes))

    def free(self, at: int) -> None:
        offset, nbytes = self.held.pop(at % len(self.held))
        self.slots.free(offset, nbytes)
        self.mark(offset, nbytes, taken=False)

    def holes(self) -> list[int]:
        """Lengths of the free stretches, in units."""
        runs = itertools.groupby(self.taken)
        return [len(list(run)) for taken, run in runs if not taken]

    def check(self) -> None:
        assert self.slots.free_bytes == self.taken.count(False) * ARENA_ALIGN
        largest = max(self.holes(), default=0)
        if largest:  # neighbors have merged: the whole stretch can be had, and no more than that
            offset = self.slots.allocate(largest * ARENA_ALIGN)
            assert offset is not None
            self.slots.free(offset, largest * ARENA_ALIGN)
        assert self.slots.allocate((largest + 1) * ARENA_ALIGN) is None


STEPS = st.one_of(
    st.tuples(st.just("one"), SIZES),
    st.tuples(st.just("run"), st.lists(SIZES, max_size=5)),
    st.tuples(st.just("free"), st.integers(0, 99)),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, UNITS), st.lists(STEPS, max_size=40))
def test_slots_never_overlap_and_what_is_freed_merges(
    units: int, steps: list[tuple[str, object]]
) -> None:
    arena = Checked(units)
    for step in steps:
        before = arena.holes()
        match step:
            case ("one", int(nbytes)):
                offset = arena.slots.allocate(nbytes)
                fits = slot_bytes(nbytes) <= max(before, default=0) * ARENA_ALIGN
                assert (offset is not None) == fits
                if offset is not None:
                    arena.take(offset, nbytes)
            case ("run", list(sizes)):
                lengths = np.array([slot_bytes(n) for n in sizes], np.int64)
                offsets = arena.slots.allocate_run(lengths).tolist()
                for offset, nbytes in zip(offsets, sizes, strict=False):
                    arena.take(offset, nbytes)
                if sum(map(slot_bytes, sizes)) <= max(before, default=0) * ARENA_ALIGN:
                    ends = [o + slot_bytes(n) for o, n in zip(offsets, sizes, strict=True)]
                    assert offsets[1:] == ends[:-1], "one hole took them all: side by side"
                elif len(offsets) < len(sizes):
                    refused = slot_bytes(sizes[len(offsets)])
                    assert refused > max(arena.holes(), default=0) * ARENA_ALIGN
            case ("free", int(at)) if arena.held:
                arena.free(at)
        arena.check()
    while arena.held:
        arena.free(0)
    assert arena.holes() == ([units] if units else [])
    arena.check()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=100, max_size=200), st.integers(0, 10), st.randoms())
def test_many_slots_given_back_at_once_merge_as_well(
    lengths: list[int], free_first: int, random: Random
) -> None:
    arena = Checked(sum(lengths) + 5)
    for length in lengths:
        offset = arena.slots.allocate(length * ARENA_ALIGN)
        assert offset is not None
        arena.take(offset, length * ARENA_ALIGN)
    random.shuffle(arena.held)
    for _ in range(free_first):
        arena.free(0)
    some, arena.held = arena.held[:80], arena.held[80:]
    offsets, sizes = np.array(some, np.int64).T
    arena.slots.free_all(offsets, sizes)
    for offset, nbytes in some:
        arena.mark(offset, nbytes, taken=False)
    arena.check()
    while arena.held:
        arena.free(0)
    arena.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 5))
def test_the_smallest_hole_that_fits_is_taken(holes: list[int], wanted: int) -> None:
    slots = SlotAllocator((sum(holes) + len(holes)) * ARENA_ALIGN)
    starts = []
    for length in holes:
        start = slots.allocate(length * ARENA_ALIGN)
        wall = slots.allocate(1)
        assert start is not None and wall is not None
        starts.append(start)
    for start, length in zip(starts, holes, strict=True):
        slots.free(start, length * ARENA_ALIGN)
    fitting = [n for n in holes if n >= wanted]
    got = slots.allocate(wanted * ARENA_ALIGN)
    if not fitting:
        assert got is None
    else:
        assert got is not None
        assert holes[starts.index(got)] == min(fitting)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * 4096])
def test_a_slot_is_as_long_as_its_block_rounded_up_to_a_page(nbytes: int) -> None:
    slots = SlotAllocator(10 * ARENA_ALIGN)
    assert slots.allocate(nbytes) == 0
    assert slots.capacity_bytes - slots.free_bytes == slot_bytes(nbytes)
    assert slots.allocate(1) == slot_bytes(nbytes)
