"""`tierkv.leases`: who holds slots of the arena, since when and what for."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from tierkv import Group, GroupKind, Layout, leases
from tierkv.blocks import Copied, Keys, MoveDone, MoveReleased, Outcome, Recovered
from tierkv.ledger import Ledger

BLOCK = 5000
SLOT = 8192
LAYOUT = Layout((Group(name="kv", kind=GroupKind.FULL, block_tokens=4, block_bytes=BLOCK),))
HASHES = [bytes([n]) * 32 for n in range(1, 5)]


class World:
    """A ledger of two ranks, on a clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ledger = Ledger(
            LAYOUT, arena_bytes=16 * SLOT, ranks=2, boundary_policy="dense", clock=lambda: self.now
        )
        for rank in range(2):
            self.ledger.apply(rank, Recovered(Keys.of((0, h) for h in HASHES)))

    def seen(self) -> list[tuple[str, str, int, int, float, str]]:
        return [
            (x.owner, x.kind, x.blocks, x.nbytes, x.age_s, x.waits_for)
            for x in leases.leases(self.ledger)
        ]


def done(n: int, outcome: Outcome = Outcome.DONE) -> np.ndarray:
    return np.full(n, outcome, np.uint8)


def test_a_lease_is_shown_from_its_promise_to_its_end() -> None:
    world = World()
    assert world.seen() == []
    assert world.ledger.lookup("req 7", HASHES, known_tokens=17).tokens == 16
    world.now += 3
    assert world.seen() == [("req 7", "promise", 4, 4 * SLOT, 3.0, "its load to begin")]
    move = world.ledger.begin_load("req 7", [[0, 1, 2, 3]])
    world.now += 2
    one = f"move {move.id}"
    assert world.seen() == [(one, "load", 4, 4 * SLOT, 2.0, "the tier on ranks [0, 1]")]
    world.ledger.apply(0, MoveDone(move.id, done(4)))
    assert world.seen()[0][5] == "the tier on ranks [1]"
    late = MoveDone(move.id, done(4, Outcome.TIMED_OUT), released=False)
    world.ledger.apply(1, late)
    said = "a call that overran its deadline on ranks [1]"
    assert world.seen() == [(one, "quarantine", 4, 4 * SLOT, 2.0, said)]
    world.ledger.apply(1, MoveReleased(move.id))
    assert world.seen() == []


def test_the_oldest_comes_first_and_a_save_says_which_copies_are_due() -> None:
    world = World()
    others = [bytes([n]) * 32 for n in range(101, 104)]
    move = world.ledger.begin_save(
        "req 1", others, computed_tokens=12, known_tokens=12, block_ids=[[4, 5, 6]]
    )
    assert move is not None
    world.now += 5
    world.ledger.lookup("req 2", HASHES, known_tokens=17)
    world.ledger.apply(0, Copied(move.id))
    first, second = world.seen()
    assert first[:5] == (f"move {move.id}", "save", 3, 3 * SLOT, 5.0)
    assert first[5] == "the device's copies on ranks [1]"
    assert second[0] == "req 2"
    shown = json.loads(json.dumps(leases.debug(world.ledger)))
    assert shown["pinned_capacity_bytes"] == 16 * SLOT
    assert shown["pinned_free_bytes"] == (16 - 7) * SLOT
    assert [x["owner"] for x in shown["leases"]] == [first[0], "req 2"]


def test_who_waits_long_is_named_once_and_so_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    watch = leases.Watch(lambda: world.now)
    world.ledger.lookup("req 7", HASHES, known_tokens=17)
    move = world.ledger.begin_load("req 7", [[0, 1, 2, 3]])
    with caplog.at_level(logging.WARNING, "tierkv"):
        for _ in range(20):
            world.now += leases.LONG_S / 10
            watch.look(world.ledger)
        (line,) = [r.getMessage() for r in caplog.records]
        assert f"move {move.id} holds 4 blocks (load, {4 * SLOT} bytes of RAM)" in line
        assert "waits for the tier on ranks [0, 1]" in line
        for rank in range(2):
            world.ledger.apply(rank, MoveDone(move.id, done(4)))
        world.now += leases.LOOK_S
        watch.look(world.ledger)
    assert caplog.records[1].getMessage().endswith(f"move {move.id} has let go of its blocks")
    assert len(caplog.records) == 2
