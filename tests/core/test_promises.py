"""Promises of the ledger end by time, in order, whoever looked up meanwhile."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from tests.core.tables import full
from tierkv.blocks import Copied, MoveDone, Outcome
from tierkv.hashing import chain
from tierkv.layout import Layout
from tierkv.ledger import Ledger

LAYOUT = Layout((full(4),))
PROMPT = list(range(41))
HASHES = chain(PROMPT, 4).hashes


class World:
    """A ledger that holds one prompt, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = Ledger(LAYOUT, arena_bytes=64 << 12, clock=lambda: self.now, promise_s=10.0)
        move = self.ledger.begin_save(
            "save", HASHES, computed_tokens=41, known_tokens=41, block_ids=[list(range(20))]
        )
        assert move is not None
        self.ledger.apply(0, Copied(move.id))
        self.ledger.apply(0, MoveDone(move.id, np.full(len(move), Outcome.DECLINED, np.uint8)))
        self.ledger.release("save")

    def look(self, owner: str) -> int:
        return self.ledger.lookup(owner, HASHES, known_tokens=41).tokens

    def leased(self) -> int:
        return int(self.ledger._books.index.leases.sum())


def test_a_promise_that_nobody_used_is_taken_back_by_the_next_lookup_after_its_time() -> None:
    world = World()
    assert world.look("a") == 40
    world.now = 5.0
    assert world.look("b") == 40
    world.now = 10.5  # a's time is over, b's is not
    world.look("c")
    assert world.ledger.counters["promises_expired"] == 1
    assert world.leased() == 2 * 10
    world.now = 100.0
    world.look("d")
    assert world.ledger.counters["promises_expired"] == 3
    assert world.leased() == 10


def test_a_promise_that_was_renewed_counts_from_then() -> None:
    world = World()
    world.look("a")
    world.now = 8.0
    world.look("a")
    world.now = 12.0
    world.look("b")
    assert world.ledger.counters["promises_expired"] == 0
    assert world.leased() == 2 * 10


def test_a_promise_that_was_used_or_given_back_does_not_expire() -> None:
    world = World()
    world.look("a")
    move = world.ledger.begin_load("a", [list(range(20))])
    world.look("b")
    world.ledger.release("b")
    world.now = 50.0
    world.look("c")
    assert world.ledger.counters["promises_expired"] == 0
    assert world.leased() == 2 * 10
    world.ledger.apply(0, MoveDone(move.id, np.zeros(len(move), np.uint8)))
    assert world.leased() == 10


def test_a_request_that_asks_at_every_step_leaves_no_old_plans_behind() -> None:
    world = World()
    world.look("a")
    rows = world.ledger._requests["a"].promise
    assert rows is not None
    old = weakref.ref(rows.plan.rows)
    del rows
    world.look("a")
    gc.collect()
    assert old() is None
