"""Cases of kinds PLAN and GROUP that need the whole deciding half."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.core.simulator import Key, Simulator
from tests.core.tables import full, mamba, swa
from tierkv import planner
from tierkv.blocks import Copied, Keys, MoveDone, Outcome, Recovered
from tierkv.hashing import chain
from tierkv.layout import Group, GroupKind, Layout
from tierkv.ledger import Ledger, Miss


def declined(rank: int, key: Key) -> Outcome:
    return Outcome.DECLINED


def test_case_043_what_found_no_room_is_offered_again_and_nothing_else() -> None:
    layout = Layout((full(16), swa(16, 32)))
    ledger = Ledger(layout, arena_bytes=8 * 4096, boundary_policy="dense", reserve=0.5)
    hashes = chain(range(65), 16).hashes
    tables = [list(range(4))] * 2

    def offer() -> tuple[list[tuple[int, int]], int]:
        """(group, block) offered, and the move's id."""
        move = ledger.begin_save("r", hashes, computed_tokens=65, known_tokens=65, block_ids=tables)
        if move is None:
            return [], 0
        pairs = zip(move.keys.groups.tolist(), move.block_ids.tolist(), strict=True)
        return list(pairs), move.id

    first, move_id = offer()
    assert len(first) == 4 and ledger.declined_blocks("r") == 4
    assert offer() == ([], 0), "nothing has changed"
    ledger.apply(0, Copied(move_id))
    assert offer() == ([], 0), "the slots are still in use"
    ledger.apply(0, MoveDone(move_id, np.zeros(4, np.uint8)))
    second, move_id = offer()
    assert sorted(first + second) == [(g, i) for g in range(2) for i in range(4)]
    ledger.apply(0, Copied(move_id))
    ledger.apply(0, MoveDone(move_id, np.zeros(4, np.uint8)))
    ledger.apply(0, Recovered(Keys.of([])))
    assert offer() == ([], 0)
    assert ledger.lookup("s", hashes, known_tokens=65).tokens == 64


@pytest.mark.parametrize("budget", [1, 4, 16])
def test_case_044_every_block_of_a_prompt_in_small_steps_is_stored(budget: int) -> None:
    layout = Layout((full(16),))
    world = Simulator(layout, slots=300)
    tokens = list(range(217 * 16 + 5))
    hashes = chain(tokens, 16).hashes
    world.run("r", tokens, range(16 * budget, len(tokens), 16 * budget))
    assert len(hashes) == 217
    assert world.stored == {(0, h) for h in hashes}
    index = world.ledger._books.index
    assert all(index.find(0, h) >= 0 for h in hashes)
    assert world.hit(tokens) == 217 * 16


def test_case_047_a_hole_is_neither_promised_nor_left_open() -> None:
    layout = Layout((full(16), swa(16, 32)))
    world = Simulator(layout, slots=64)
    tokens = list(range(16 * 10 + 1))
    hashes = chain(tokens, 16).hashes
    world.run("r", tokens, [])
    again = Simulator(layout, slots=64)
    again.tiers = [set(world.stored)]
    again.ledger.apply(0, Recovered(Keys.of(world.stored)))
    assert again.ledger.lookup("a", hashes, known_tokens=161).tokens == 160
    load = again.ledger.begin_load("a", [list(range(10))] * 2)
    out = np.zeros(len(load), np.uint8)
    lost = (1, hashes[9])
    out[list(load.keys).index(lost)] = Outcome.MISSING
    again.tiers[0].discard(lost)
    again.ledger.apply(0, MoveDone(load.id, out))
    again.ledger.release("a")
    assert again.hit(tokens) == 144, "shorter by what is missing, and it works"
    before = set(again.stored)
    again.run("b", tokens, [])
    assert again.stored - before == {lost}
    assert again.hit(tokens) == 160


def test_case_048_a_resumed_request_with_other_pages_is_saved_whole() -> None:
    layout = Layout((full(16),))
    ledger = Ledger(layout, arena_bytes=64 * 4096, boundary_policy="dense")
    hashes = chain(range(161), 16).hashes
    moves = []

    def step(computed: int, pages: list[int]) -> None:
        move = ledger.begin_save(
            "r", hashes, computed_tokens=computed, known_tokens=161, block_ids=[pages]
        )
        if move is not None:
            moves.append((move, pages))

    for computed in (32, 64, 96):
        step(computed, list(range(computed // 16)))
    for computed in (16, 96, 128, 161):  # preempted, and computed again in other pages
        step(computed, [100 + i for i in range(-(-computed // 16))])
    saved = [h for move, _ in moves for _, h in move.keys]
    assert saved == list(hashes)
    for move, pages in moves:
        assert [pages[hashes.index(h)] for _, h in move.keys] == move.block_ids.tolist()
    ledger.release("r")
    assert ledger.moves_in_flight == len(moves) == 5, "the end of a request drops no save"
    for move, _ in moves:
        ledger.apply(0, Copied(move.id))
        ledger.apply(0, MoveDone(move.id, np.zeros(len(move), np.uint8)))
    assert ledger.lookup("s", hashes, known_tokens=161).tokens == 160


def test_case_067_round_robin_under_pressure_leaves_whole_beginnings_that_hit() -> None:
    layout = Layout((full(64), swa(16, 64)))
    sessions = [[n * 10_000 + i for i in range(64 * 6 + 1)] for n in range(8)]
    size = 6 + 6 * 4
    world = Simulator(layout, slots=4 * size, policy="dense")
    for _ in range(3):
        for n, tokens in enumerate(sessions):
            world.run(f"s{n}", tokens, range(128, 385, 128), fault=declined, patient=True)
    hits = [world.hit(tokens) for tokens in sessions]
    assert sum(hits) >= 0.9 * 4 * 384, "what fits is useful: no room is held by tails without heads"
    assert sorted(hits)[-3:] == [384] * 3
    pinned = world.ledger.stats()["pinned_blocks"]
    assert pinned >= 4 * size - 4


def test_case_068_a_prompt_too_short_to_hit_is_told_so() -> None:
    layout = Layout((full(48), full(64, "b")))
    assert planner.min_known_tokens(layout) == 193
    drafts = Layout((full(16, draft=True), full(64, "b")))
    assert planner.min_known_tokens(drafts) == 64 + 16
    world = Simulator(layout, slots=64)
    tokens = list(range(400))
    world.run("r", tokens, [])
    hashes = chain(tokens, 16).hashes
    short = world.ledger.lookup("a", hashes, known_tokens=192)
    assert (short.tokens, short.miss) == (0, Miss.SHORT)
    assert str(short.miss) == "below minimum unit"
    assert world.ledger.counters["short_lookups"] == 1
    hit = world.ledger.lookup("a", hashes, known_tokens=193)
    assert (hit.tokens, hit.miss) == (192, None)
    other = world.ledger.lookup("b", chain(range(1, 401), 16).hashes, known_tokens=400)
    assert (other.tokens, other.miss) == (0, Miss.ABSENT)


@pytest.mark.parametrize("null_block_id", [None, 10])
def test_case_071_block_id_0_is_a_page_like_any_other(null_block_id: int | None) -> None:
    layout = Layout((full(16), mamba(16)))
    ledger = Ledger(layout, arena_bytes=64 * 4096, boundary_policy="dense")
    hashes = chain(range(33), 16).hashes
    absent = null_block_id
    save = ledger.begin_save(
        "r",
        hashes,
        computed_tokens=33,
        known_tokens=33,
        block_ids=[[3, 0], [absent, 0]],
        null_block_id=null_block_id,
    )
    assert save is not None
    named = {
        (g, hashes.index(h)): b
        for (g, h), b in zip(save.keys, save.block_ids.tolist(), strict=True)
    }
    assert named == {(0, 0): 3, (0, 1): 0, (1, 1): 0}
    ledger.apply(0, Copied(save.id))
    ledger.apply(0, MoveDone(save.id, np.zeros(3, np.uint8)))
    assert ledger.lookup("s", hashes, known_tokens=33).tokens == 32
    load = ledger.begin_load("s", [[7, 0], [9, 0]])
    assert sorted(load.block_ids.tolist()) == [0, 0, 7]


def test_case_130_small_blocks_take_their_own_bytes_and_not_the_largest_groups() -> None:
    small, large = 64 << 10, 14 << 20
    groups = [
        Group(name="large", kind=GroupKind.FULL, block_tokens=256, block_bytes=large),
        *(
            Group(
                name=f"w{n}",
                kind=GroupKind.SLIDING_WINDOW,
                block_tokens=64,
                window_tokens=129,
                block_bytes=small,
            )
            for n in range(8)
        ),
    ]
    world = Simulator(Layout(tuple(groups)), slots=2)
    prompts = [[n * 100_000 + i for i in range(256 * 40 + 1)] for n in range(3)]
    each = 40 * (large + 8 * 2 * small)
    arena = 4 << 30
    world.ledger = Ledger(world.layout, arena_bytes=arena, boundary_policy="dense")
    world.ledger.apply(0, Recovered(Keys.of([])))
    assert 3 * each < arena < 3 * 40 * 17 * large
    for n, tokens in enumerate(prompts):
        world.run(f"r{n}", tokens, [2560, 5120, 7680], fault=declined, patient=True)
    assert world.ledger.stats()["pinned_bytes"] == 3 * each
    assert [world.hit(tokens) for tokens in prompts] == [256 * 40] * 3


def test_case_020_a_miss_answered_before_a_save_does_not_stick() -> None:
    world = Simulator(Layout((full(16),)), slots=64)
    tokens = list(range(65))
    for _, known in itertools.product(range(2), range(1, 66, 16)):
        assert world.hit(tokens[:known]) == 0
    world.run("r", tokens, [])
    assert world.hit(tokens) == 64
