"""A prompt larger than the arena still hits: as far as there is room for what the hit needs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulator import Simulator
from tests.core.tables import full, mamba, swa
from tierkv.blocks import ARENA_ALIGN, Keys, Recovered, TierDown, slot_bytes
from tierkv.hashing import chain
from tierkv.layout import Group, GroupKind, Layout

LOADS = 7 / 8
"""Share of the arena that a load may fill."""


def saved(layout: Layout, blocks: int, slots: int, *, policy: str = "dense") -> Simulator:
    """A simulator that has computed and stored one prompt of so many steps of the alignment."""
    world = Simulator(layout, slots=slots, policy=policy)
    tokens = prompt(layout, blocks)
    world.run("save", tokens, range(0, len(tokens), layout.alignment_tokens), patient=True)
    world.answer_waiting()
    return world


def prompt(layout: Layout, blocks: int) -> list[int]:
    return list(range(blocks * layout.alignment_tokens + 1))


def load(world: Simulator, tokens: list[int]) -> int:
    """The hit, loaded: every rank has what was promised, and no two blocks share a slot."""
    hashes = chain(tokens, world.layout.hash_block_tokens).hashes
    hit = world.ledger.lookup("load", hashes, known_tokens=len(tokens))
    assert not hit.pending
    if hit.tokens:
        tables = [list(range(len(tokens)))] * len(world.layout.groups)
        move = world.ledger.begin_load("load", tables)
        sizes = [slot_bytes(world.layout.block_bytes[g]) for g, _ in move.keys]
        at = sorted(zip(move.offsets.tolist(), sizes, strict=True))
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(at))
        assert at[0][0] >= 0
        need = {world.key(hashes, b) for b in world.oracle.need(hit.tokens)}
        assert set(move.keys) == need, "a load brings what the hit reads, and nothing else"
        world.answer(move)
    world.ledger.release("load")
    world.obey()
    world.assert_settled()
    return hit.tokens


def restart(world: Simulator) -> None:
    """Nothing is pinned any more; the tier has what it had."""
    world.ledger.apply(0, TierDown("test"))
    world.ledger.rotate()
    world.ledger.take_commands()
    world.ledger.apply(0, Recovered(Keys.of(world.tiers[0]), world.ledger.epoch))


@pytest.mark.parametrize(("blocks", "slots"), [(300, 256), (500, 256), (257, 256), (12, 3)])
def test_a_prompt_larger_than_the_arena_hits_as_far_as_it_fits_every_time(
    blocks: int, slots: int
) -> None:
    layout = Layout((full(4),))
    world = saved(layout, blocks, slots)
    hits = [load(world, prompt(layout, blocks)) // 4 for _ in range(4)]
    assert all(hit >= math.floor(slots * LOADS) for hit in hits), hits
    restart(world)
    assert load(world, prompt(layout, blocks)) // 4 == math.floor(slots * LOADS)


def test_with_windows_and_states_the_hit_ends_where_all_of_them_fit() -> None:
    layout = Layout((full(4), swa(4, 16), mamba(4)))
    world = saved(layout, 100, 64)
    hits = [load(world, prompt(layout, 100)) // 4 for _ in range(3)]
    assert all(56 - 5 <= hit <= 64 - 5 for hit in hits), hits  # 4 blocks of the window and a state


def test_where_a_window_deep_in_the_prompt_does_not_fit_the_hit_ends_near_its_start() -> None:
    layout = Layout((full(4), swa(4, 400)))
    world = saved(layout, 200, 16)
    assert load(world, prompt(layout, 200)) // 4 == 8


def test_where_few_boundaries_are_kept_the_last_that_fits_is_found() -> None:
    layout = Layout((full(4), swa(4, 8)))
    world = Simulator(layout, slots=64, policy="end")
    whole = prompt(layout, 200)
    for blocks in (10, 200):
        tokens = whole[: blocks * 4 + 1]
        world.run(f"save{blocks}", tokens, range(0, len(tokens), 4), patient=True)
        world.answer_waiting()
    assert load(world, whole) == 40


def test_others_leases_are_not_counted_as_room() -> None:
    layout = Layout((full(4),))
    world = saved(layout, 20, 16)
    other = list(range(1000, 1033))
    world.run("other", other, range(0, 33, 4), patient=True)
    hashes = chain(other, 4).hashes
    held = world.ledger.lookup("other", hashes, known_tokens=len(other))
    assert held.tokens == 32
    world.ledger.begin_load("other", [list(range(99))])
    hit = world.ledger.lookup("me", chain(prompt(layout, 20), 4).hashes, known_tokens=81)
    assert hit.pending or hit.tokens == 4 * (16 - 8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """One full group and others, with blocks of one to five pages."""
    pages = st.integers(1, 5)

    def group(kind: GroupKind, name: str, tokens: int, window: int = 0) -> Group:
        return Group(
            name=name,
            kind=kind,
            block_tokens=tokens,
            block_bytes=draw(pages) * ARENA_ALIGN,
            window_tokens=window,
        )

    groups = [group(GroupKind.FULL, "full", draw(st.sampled_from([4, 8])))]
    if draw(st.booleans()):
        window = draw(st.integers(2, 40))
        groups.append(group(GroupKind.SLIDING_WINDOW, "window", 4, window))
    if draw(st.booleans()):
        groups.append(group(GroupKind.RECURRENT, "state", 8))
    if draw(st.booleans()):
        groups.append(group(GroupKind.FULL, "more", 4))
    return Layout(tuple(groups))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(1, 40), st.integers(1, 60), st.booleans())
def test_whatever_room_there_is_for_one_step_a_lookup_after_a_save_hits(
    layout: Layout, blocks: int, slots: int, fresh: bool
) -> None:
    world_tokens = prompt(layout, blocks)
    largest = max(map(slot_bytes, layout.block_bytes))
    world = Simulator(layout, slots=max(slots, 2))
    first = world.oracle.need(layout.alignment_tokens)
    need = sum(slot_bytes(layout.block_bytes[g]) for g, _ in first)
    if need > max(slots, 2) * largest * LOADS:
        return
    cuts = range(0, len(world_tokens), layout.alignment_tokens)
    world.run("save", world_tokens, cuts, patient=True)
    world.answer_waiting()
    if fresh:
        restart(world)
    hits = [load(world, world_tokens) for _ in range(3)]
    assert min(hits) > 0
    room = slots * largest * LOADS
    best = world.best(world_tokens, world.stored)
    if sum(slot_bytes(layout.block_bytes[g]) for g, _ in world.oracle.need(best)) <= room:
        assert hits[0] == best, "all of it fits"


def test_where_room_lies_in_pieces_the_prompts_own_blocks_are_read_once_more() -> None:
    page = ARENA_ALIGN
    sizes = ((GroupKind.FULL, 8, 3, 0), (GroupKind.SLIDING_WINDOW, 4, 1, 2))
    groups = [
        Group(name=str(kind), kind=kind, block_tokens=n, block_bytes=b * page, window_tokens=w)
        for kind, n, b, w in (*sizes, (GroupKind.RECURRENT, 8, 4, 0))
    ]
    layout = Layout(tuple(groups))
    world = saved(layout, 19, 18)
    assert [load(world, prompt(layout, 19)) for _ in range(3)] == [19 * 8] * 3
