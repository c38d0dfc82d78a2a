"""The ledger by example: what stays when room is short, what is told to the ranks, what is said."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.simulator import Key, Simulator
from tests.core.tables import full, mamba, swa
from tierkv.blocks import Copied, Keys, MoveDone, MoveKind, Outcome, Recovered, Retire, TierDown
from tierkv.hashing import chain
from tierkv.index import Tier
from tierkv.layout import Layout
from tierkv.ledger import Agree, Ledger, Rotate, Submit

FULL = Layout((full(16),))


def declined(rank: int, key: Key) -> Outcome:
    """What ranks without a storage tier answer."""
    return Outcome.DECLINED


def prompt(number: int, blocks: int) -> list[int]:
    """Whole blocks of 16 tokens and one token more, so that all of them can be hit."""
    return [number * 10_000 + i for i in range(16 * blocks + 1)]


@pytest.mark.parametrize("step", [16, 32, 1000])
def test_of_a_prompt_saved_in_steps_the_beginning_stays_longest(step: int) -> None:
    world = Simulator(FULL, slots=8)
    first, second = prompt(1, 8), prompt(2, 3)
    world.run("a", first, range(step, len(first), step), fault=declined)
    world.run("b", second, [], fault=declined)
    assert world.hit(second) == 3 * 16
    assert world.hit(first) == 5 * 16


def test_a_prompt_larger_than_an_arena_without_a_tier_keeps_its_beginning() -> None:
    world = Simulator(FULL, slots=8)
    first = prompt(1, 20)
    world.run("a", first, range(32, len(first), 32), fault=declined)
    assert world.hit(first) == 8 * 16


def test_a_prompt_larger_than_the_arena_passes_through_it_into_the_tier() -> None:
    world = Simulator(FULL, slots=8)
    first = prompt(1, 20)
    world.run("a", first, range(32, len(first), 32))
    assert len(world.stored) == 20


def test_a_recovered_prompt_loses_its_end_first_too() -> None:
    world = Simulator(FULL, slots=8)
    first, second = prompt(1, 8), prompt(2, 3)
    world.run("a", first[:-2], [])
    again = Simulator(FULL, slots=8)
    again.tiers = world.tiers
    again.ledger.apply(0, Recovered(Keys.of(sorted(world.stored, reverse=True))))
    again.run("a", first[:-1], [], fault=declined)
    again.ledger.apply(0, TierDown("gone"))
    again.run("b", second, [], fault=declined)
    assert again.hit(first) == 5 * 16


@pytest.mark.parametrize("others", range(8))
def test_short_of_room_a_prompt_shrinks_from_its_end_in_all_groups_together(others: int) -> None:
    layout = Layout((full(16), swa(4, 8), mamba(16)))
    world = Simulator(layout, slots=8 * 4, has_tier=False)
    first = prompt(1, 8)
    world.run("a", first, [], every_state=True, fault=declined, patient=True)
    for n in range(others):
        world.run(f"b{n}", prompt(2 + n, 1), [], every_state=True, fault=declined)
    assert world.hit(first) == (8 - others) * 16


def test_what_a_hit_used_outlives_the_tails_it_did_not_use() -> None:
    layout = Layout((full(16), swa(4, 8), mamba(16)))
    world = Simulator(layout, slots=8 * 4, has_tier=False)
    first = prompt(1, 8)
    world.run("a", first, [], every_state=True, fault=declined, patient=True)
    assert world.hit(first) == 8 * 16
    for n in range(5):
        world.run(f"b{n}", prompt(2 + n, 1), [], every_state=True, fault=declined)
    assert world.hit(first) == 8 * 16
    assert world.hit(first[:113]) == 0


def test_what_the_tier_declined_is_offered_again_when_a_request_ends() -> None:
    layout = Layout((full(16),))
    world = Simulator(layout, slots=64)
    first, second = prompt(1, 5), prompt(2, 1)
    world.run("a", first, [], fault=declined)
    assert world.ledger.unstored_blocks == 5
    world.run("b", second, [])
    assert world.ledger.unstored_blocks == 0
    assert len(world.stored) == 6
    world.run("c", second, [])
    assert world.ledger.saves_in_flight() == set()  # nothing is due: nothing is offered


def test_an_old_loads_answer_after_a_rotation_deletes_nothing_new() -> None:
    hashes = chain(prompt(1, 2), 16).hashes
    ledger = Ledger(FULL, boundary_policy="dense", arena_bytes=64 * 4096, ranks=2)
    keys = Keys.of((0, h) for h in hashes)
    for rank in range(2):
        ledger.apply(rank, Recovered(keys))
    assert ledger.lookup("r", hashes, known_tokens=33).tokens == 32
    load = ledger.begin_load("r", [[0, 1]])
    epoch = ledger.rotate()
    for rank in range(2):
        ledger.apply(rank, Recovered(Keys.of([]), epoch))
    save = ledger.begin_save(
        "r", hashes, computed_tokens=33, known_tokens=33, block_ids=[[0, 1, 2]]
    )
    assert save is not None and len(save) == 2
    for rank in range(2):
        ledger.apply(rank, MoveDone(load.id, np.full(2, Outcome.MISSING, np.uint8)))
    assert [type(c) for c in ledger.take_commands()] == [Rotate]
    for rank in range(2):
        ledger.apply(rank, Copied(save.id))
        ledger.apply(rank, MoveDone(save.id, np.zeros(2, np.uint8)))
    assert ledger.lookup("s", hashes, known_tokens=33).tokens == 32


def test_blocks_that_one_rank_has_lost_are_deleted_at_the_others() -> None:
    hashes = chain(prompt(1, 2), 16).hashes
    ledger = Ledger(FULL, boundary_policy="dense", arena_bytes=64 * 4096, ranks=2)
    for rank in range(2):
        ledger.apply(rank, Recovered(Keys.of((0, h) for h in hashes)))
    ledger.lookup("r", hashes, known_tokens=33)
    load = ledger.begin_load("r", [[0, 1]])
    ledger.apply(0, MoveDone(load.id, np.zeros(2, np.uint8)))
    ledger.apply(1, MoveDone(load.id, np.array([Outcome.DONE, Outcome.CORRUPT], np.uint8)))
    (command,) = ledger.take_commands()
    assert isinstance(command, Submit) and command.move.kind is MoveKind.DELETE
    assert list(command.move.keys) == [(0, hashes[1])]
    assert ledger.lookup("s", hashes, known_tokens=33).tokens == 16


def test_how_many_blocks_wait_for_room_can_be_asked_at_any_time() -> None:
    hashes = chain(prompt(1, 10), 16).hashes
    ledger = Ledger(FULL, boundary_policy="dense", arena_bytes=8 * 4096)

    def save() -> int:
        move = ledger.begin_save(
            "r", hashes, computed_tokens=161, known_tokens=161, block_ids=[list(range(11))]
        )
        return 0 if move is None else len(move)

    assert save() == 7  # the budget: an eighth is left to loads
    assert ledger.declined_blocks("r") == 3
    assert save() == 0, "nothing has changed: nothing is tried"
    assert ledger.declined_blocks("r") == 3
    assert ledger.counters["declined_blocks"] == 3
    ledger.release("r")
    assert ledger.declined_blocks("r") == 0


def test_tokens_are_counted_for_each_group_by_itself() -> None:
    layout = Layout((full(16), swa(4, 8)))
    world = Simulator(layout, slots=64, policy="dense")
    world.run("a", prompt(1, 3), [])
    stats = world.ledger.stats()
    assert stats["stored_tokens"] == 3 * 16 + 3 * 2 * 4
    assert stats["skipped_tokens"] == 3 * 2 * 4
    assert stats["evicted_pinned_tokens"] == stats["evicted_tier_tokens"] == 0


def test_what_a_rank_retires_while_another_is_down_is_not_promised_when_that_one_returns() -> None:
    world = Simulator(FULL, slots=8, ranks=2)
    tokens = prompt(1, 4)
    world.run("a", tokens, [])
    world.ledger.apply(0, TierDown("gone"))
    last = max(world.stored, key=lambda key: chain(tokens, 16).hashes.index(key[1]))
    world.ledger.apply(1, Retire(7, Keys.of([last])))
    world.tiers[1].discard(last)
    assert Agree(1, 7) in world.ledger.take_commands()
    world.ledger.apply(0, Recovered(Keys.of(world.tiers[0])))
    ordered = [c for c in world.ledger.take_commands() if isinstance(c, Submit) and c.rank == 0]
    assert [list(c.move.keys) for c in ordered if c.move.kind is MoveKind.DELETE][-1:] == [[last]]
    index = world.ledger._books.index
    assert index.tier[index.find(*last)] != Tier.RESIDENT
