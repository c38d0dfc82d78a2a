"""How the ledger counts uses, and what it answers a tier that asks what is worth keeping."""

from __future__ import annotations

import numpy as np

from tests.core.simulator import Simulator
from tests.core.tables import full, swa
from tierkv.blocks import Appraise, Keys, Retire
from tierkv.hashing import chain
from tierkv.index import Rows, Tier
from tierkv.layout import Layout
from tierkv.ledger import Agree, Appraised
from tierkv.policy import worth_keeping

FULL = Layout((full(16),))


def prompt(number: int, blocks: int) -> list[int]:
    """Whole blocks of 16 tokens and one token more, so that all of them can be hit."""
    return [number * 10_000 + i for i in range(16 * blocks + 1)]


def rows_of(world: Simulator, tokens: list[int]) -> Rows:
    unit = world.layout.hash_block_tokens
    hashes = chain(tokens, unit).hashes[16 // unit - 1 :: 16 // unit]
    return world.ledger._books.index.rows_of(0, hashes)


def test_a_block_is_used_once_by_each_prompt_that_hits_it() -> None:
    world = Simulator(FULL, slots=64)
    index = world.ledger._books.index
    tokens = prompt(1, 6)
    world.run("a", tokens, [32, 64])
    rows = rows_of(world, tokens)
    assert index.uses[rows].tolist() == [0] * 6
    assert index.gap[rows].tolist() == [0] * 6
    born = index.tick[rows].copy()
    world.run("b", tokens[:65], [])  # looks up, loads, and meets what it loaded when it saves
    assert index.uses[rows].tolist() == [1] * 4 + [0] * 2
    used = index.gap[rows[:4]]
    assert (used > 0).all()
    assert (used <= index.tick[rows[:4]] - born[:4]).all()
    world.run("c", tokens, [])
    assert index.uses[rows].tolist() == [2] * 4 + [1] * 2


def test_what_an_engine_holds_itself_is_used_as_well() -> None:
    world = Simulator(FULL, slots=64)
    index = world.ledger._books.index
    tokens = prompt(1, 6)
    world.run("a", tokens, [])
    world.run("b", tokens, [], local=64)
    assert index.uses[rows_of(world, tokens)].tolist() == [1] * 6


def test_a_lookup_that_is_asked_again_counts_once() -> None:
    world = Simulator(FULL, slots=64)
    tokens = prompt(1, 4)
    world.run("a", tokens, [])
    hashes = chain(tokens, 16).hashes
    for _ in range(5):
        world.ledger.lookup("b", hashes, known_tokens=len(tokens))
    rows = rows_of(world, tokens)
    assert world.ledger._books.index.uses[rows].tolist() == [1] * 4


def test_uses_end_at_255_and_a_gap_at_what_its_column_holds() -> None:
    world = Simulator(FULL, slots=64)
    books = world.ledger._books
    world.run("a", prompt(1, 1), [])
    rows = rows_of(world, prompt(1, 1))
    books.index.uses[rows] = 254
    books._tick = 1 << 40
    for _ in range(3):
        books.use(rows, books.next_tick)
    assert books.index.uses[rows].tolist() == [255]
    books.index.uses[rows], books._tick = 0, 1 << 50
    books.use(rows, books.next_tick)
    assert books.index.gap[rows].tolist() == [np.iinfo(np.int32).max]


def test_a_tier_is_told_what_the_policy_says_of_what_every_rank_holds() -> None:
    world = Simulator(FULL, slots=64, ranks=2)
    index = world.ledger._books.index
    cold, hot = prompt(1, 8), prompt(2, 8)
    world.run("a", cold, [])
    world.run("b", hot, [])
    for n in range(4):
        world.run(f"c{n}", hot, [])
    rows = np.concatenate([rows_of(world, cold), rows_of(world, hot)])
    keys = Keys.concat([index.keys_of(rows[::-1]), Keys.of([(0, bytes(32))])])
    index.tier[rows[-1]] = Tier.WRITING
    expected = worth_keeping(index, rows[::-1][1:]).tolist()
    assert sorted(set(expected)) == [False, True]
    world.ledger.apply(1, Appraise(9, keys))
    (answer,) = world.ledger.take_commands()
    assert isinstance(answer, Appraised)
    assert (answer.rank, answer.question_id) == (1, 9)
    assert answer.worth.tolist() == [False, *expected, False]
    assert (index.tier[rows[:-1]] == Tier.RESIDENT).all(), "a question withdraws nothing"


def test_a_block_that_left_and_comes_again_is_known_to_have_been_used() -> None:
    layout = Layout((full(16), swa(4, 8)))
    world = Simulator(layout, slots=100)
    index = world.ledger._books.index
    tokens = prompt(1, 20)
    world.run("a", tokens, [])
    index.uses[rows_of(world, tokens)] = 3
    world.ledger.apply(0, Retire(7, Keys.of(sorted(world.tiers[0]))))
    world.tiers[0].clear()
    assert Agree(0, 7) in world.ledger.take_commands()
    for n in range(2, 12):
        world.run("b", prompt(n, 10), [])  # what was still pinned leaves
    assert (rows_of(world, tokens) < 0).all()
    world.run("c", tokens, [])
    again = index.uses[rows_of(world, tokens)].tolist()
    assert set(again[:15]) == {4}, "what precedes a block that is remembered was used as often"
    assert set(again[15:]) <= {0, 4}
    windows = np.flatnonzero((index.group == 1) & (index.tier == Tier.RESIDENT))
    assert set(index.uses[windows].tolist()) == {0, 1}
