"""Who leaves the arena: deepest of the least recently used prompt first, never a leased block."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv import policy
from tierkv.blocks import slot_bytes
from tierkv.index import NO_SLOT, Index, Pinned, Tier
from tierkv.room import Room

BLOCK_BYTES = (3 * 4096, 4096)


def filled(room: Room, index: Index, blocks: list[tuple[int, int, int]]) -> list[int]:
    """Pin (group, depth, tick) blocks; their rows."""
    rows = []
    for n, (group, depth, tick) in enumerate(blocks):
        (offset,) = room.claim(room.slot_table[[group]])
        row = index.add(group, bytes([n]), depth=depth)
        index.offset[row], index.pinned[row], index.tick[row] = offset, Pinned.RESIDENT, tick
        rows.append(row)
    return rows


BLOCKS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=20
)


@settings(max_examples=200, deadline=None)
@given(BLOCKS, st.data())
def test_victims_are_the_deepest_of_the_least_recently_used(
    blocks: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    index = Index(2)
    room = Room(index, BLOCK_BYTES, 80 * 4096)
    rows = filled(room, index, blocks)
    leased = data.draw(st.sets(st.sampled_from(rows)))
    index.leases[list(leased)] = 1
    free = [(tick, -depth) for row, (_, depth, tick) in zip(rows, blocks, strict=True)]
    rank = dict(zip(rows, free, strict=True))
    need = data.draw(st.integers(1, 200 * 4096))
    victims = policy.victims(index, room.slot_table, need).tolist()
    assert not leased & set(victims)
    assert [rank[r] for r in victims] == sorted(rank[r] for r in rows if r not in leased)[
        : len(victims)
    ]
    sizes = [int(room.slot_table[index.group[r]]) for r in victims]
    everyone = len(victims) == len(rows) - len(leased)
    assert everyone or sum(sizes) >= need
    assert sum(sizes[:-1]) < need, "more than was needed"


@settings(max_examples=100, deadline=None)
@given(BLOCKS, st.data())
def test_claims_evict_in_that_order_and_stop_at_leases(
    blocks: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    index = Index(2)
    total = sum(slot_bytes(BLOCK_BYTES[g]) for g, _, _ in blocks)
    room = Room(index, BLOCK_BYTES, total)
    rows = filled(room, index, blocks)
    assert room.slots.free_bytes == 0
    leased = data.draw(st.sets(st.sampled_from(rows)))
    index.leases[list(leased)] = 1
    order = sorted(
        (r for r in rows if r not in leased),
        key=lambda r: (int(index.tick[r]), -int(index.depth[r])),
    )
    last = (0, 0)
    while True:
        there = {r for r in rows if index.pinned[r]}
        got = room.claim(np.array([4096]))
        gone = [r for r in order if r in there and not index.pinned[r]]
        for row in gone:
            _, depth, tick = blocks[rows.index(row)]
            assert (tick, -depth) >= last
            last = (tick, -depth)
            assert index.offset[row] == NO_SLOT
        if not len(got):
            break
    assert {r for r in rows if index.pinned[r]} == leased
    held = room.slot_bytes(np.array(sorted(leased), np.int64))
    assert room.slots.capacity_bytes - held >= 0
    assert sum(room.evicted_by_group) == len(rows) - len(leased)


def test_a_block_used_since_it_was_chosen_stays() -> None:
    index = Index(2)
    room = Room(index, BLOCK_BYTES, 20 * 4096)
    rows = filled(room, index, [(1, n, 1) for n in range(20)])
    assert len(room.claim(np.array([4096]))) == 1, "victims are chosen for more than this claim"
    gone = [r for r in rows if not index.pinned[r]]
    assert gone == rows[-1:]
    index.tick[rows[-2]] = 9
    room.claim(np.array([4096]))
    assert index.pinned[rows[-2]] == Pinned.RESIDENT
    assert not index.pinned[rows[-3]]


def test_an_evicted_block_that_the_tier_has_stays_known() -> None:
    index = Index(2)
    room = Room(index, BLOCK_BYTES, 2 * 4096)
    first, second = filled(room, index, [(1, 1, 1), (1, 0, 1)])
    index.tier[first] = Tier.RESIDENT
    room.claim(np.array([2 * 4096]))
    assert index.find(1, bytes([0])) == first
    assert index.find(1, bytes([1])) == -1
    assert index.offset[[first, second]].tolist() == [NO_SLOT, NO_SLOT]


def test_as_many_as_fit_are_claimed_in_order_and_the_rest_can_be_given_back() -> None:
    index = Index(2)
    room = Room(index, BLOCK_BYTES, 5 * 4096)
    rows = np.array([index.add(0, b"a"), index.add(1, b"b"), index.add(0, b"c")], np.int64)
    offsets = room.claim(room.sizes(rows))
    assert offsets.tolist() == [0, 3 * 4096]
    room.give_back(rows, offsets)
    assert room.slots.free_bytes == 5 * 4096


def test_scattered_free_bytes_are_joined_by_evicting_more() -> None:
    index = Index(2)
    room = Room(index, BLOCK_BYTES, 8 * 4096)
    rows = filled(room, index, [(1, n, 1) for n in range(8)])
    for row in rows[::2]:
        room.empty(np.array([row], np.int64))
    assert room.slots.free_bytes == 4 * 4096
    assert len(room.claim(np.array([3 * 4096]))) == 1
