"""Cases of kind RACE at the deciding half: steps, aborts and answers in any order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.core.tables import full, swa
from tierkv.blocks import Copied, Keys, Move, MoveDone, MoveKind, Outcome, Recovered
from tierkv.hashing import chain
from tierkv.layout import Layout
from tierkv.ledger import Ledger

FULL = Layout((full(16),))
TOKENS = list(range(161))
HASHES = chain(TOKENS, 16).hashes


def make(layout: Layout = FULL, *, ranks: int = 1, stored: bool = False) -> Ledger:
    ledger = Ledger(layout, arena_bytes=64 * 4096, ranks=ranks, boundary_policy="dense")
    keys = [(g, h) for g in range(len(layout.groups)) for h in HASHES] if stored else []
    for rank in range(ranks):
        ledger.apply(rank, Recovered(Keys.of(keys)))
    return ledger


def save(
    ledger: Ledger, owner: str, computed: int, hashes: int = 10, pages: int = 10
) -> Move | None:
    return ledger.begin_save(
        owner,
        HASHES[:hashes],
        computed_tokens=computed,
        known_tokens=161,
        block_ids=[list(range(pages))] * len(ledger.layout.groups),
    )


def done(ledger: Ledger, move: Move, outcome: Outcome = Outcome.DONE, rank: int = 0) -> None:
    if move.kind is MoveKind.SAVE and outcome is Outcome.DONE:
        ledger.apply(rank, Copied(move.id))
    ledger.apply(rank, MoveDone(move.id, np.full(len(move), outcome, np.uint8)))


def assert_free(ledger: Ledger) -> None:
    assert ledger.moves_in_flight == 0
    assert ledger.stats()["leased_blocks"] == 0
    assert ledger._flights.load_bytes == ledger._flights.save_bytes == 0


def test_case_084_a_save_is_promised_only_once_its_pages_were_copied() -> None:
    ledger = make()
    move = save(ledger, "r", 161)
    assert move is not None
    assert ledger.lookup("s", HASHES, known_tokens=161).pending
    ledger.release("r")  # preempted: its pages are given to others
    done(ledger, move, Outcome.FAILED)  # and the copy was dropped
    assert ledger.lookup("s", HASHES, known_tokens=161).tokens == 0
    assert ledger.stats()["pinned_bytes"] == 0
    assert_free(ledger)


def test_case_086_only_computed_blocks_are_saved() -> None:
    move = save(make(), "r", 32, pages=4)
    assert move is not None
    assert move.block_ids.tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["load", "save"])
@pytest.mark.parametrize("abort", [False, True])
def test_case_089_a_request_may_come_back_while_its_moves_are_on_their_way(
    kind: str, abort: bool
) -> None:
    ledger = make(stored=kind == "load")
    if kind == "load":
        assert ledger.lookup("r", HASHES, known_tokens=161).tokens == 160
        first: Move | None = ledger.begin_load("r", [list(range(10))])
    else:
        first = save(ledger, "r", 161)
    assert first is not None
    if abort:
        ledger.release("r")
    again = ledger.lookup("r", HASHES, known_tokens=161)
    assert again.pending, "it shares what is on its way"
    done(ledger, first)
    assert ledger.lookup("r", HASHES, known_tokens=161).tokens == 160
    second = ledger.begin_load("r", [list(range(20, 30))])
    assert not second.from_tier.any()
    done(ledger, second)
    ledger.release("r")
    done(ledger, first)  # an answer that comes twice changes nothing
    assert_free(ledger)


def test_case_090_blocks_without_a_hash_wait_for_it() -> None:
    ledger = make()
    first = save(ledger, "r", 64, hashes=3, pages=4)
    second = save(ledger, "r", 65, hashes=4, pages=5)
    assert first is not None and second is not None
    assert (first.block_ids.tolist(), second.block_ids.tolist()) == ([0, 1, 2], [3])


def test_case_091_an_abort_before_the_first_step_changes_nothing() -> None:
    ledger = make()
    assert save(ledger, "r", 0, pages=0) is None
    ledger.release("r")
    ledger.release("r")
    ledger.release("never seen")
    assert_free(ledger)


def test_case_096_a_hit_is_ready_only_when_all_of_its_groups_are() -> None:
    layout = Layout((full(16), swa(16, 32)))
    ledger = make(layout, ranks=2, stored=True)
    assert ledger.lookup("a", HASHES, known_tokens=161).tokens == 160
    load = ledger.begin_load("a", [list(range(10))] * 2)
    slow = load.keys.groups == 1
    done(ledger, load, rank=0)
    assert ledger.lookup("b", HASHES, known_tokens=161).pending
    out = np.where(slow, Outcome.TIMED_OUT, Outcome.DONE).astype(np.uint8)
    ledger.apply(1, MoveDone(load.id, out))
    index = ledger._books.index
    rows = index.find_all(load.keys)
    assert (index.pinned[rows] == 2).tolist() == (~slow).tolist()
    hit = ledger.lookup("b", HASHES, known_tokens=161)
    assert hit.tokens == 160
    again = ledger.begin_load("b", [list(range(10))] * 2)
    assert again.from_tier.tolist() == slow.tolist(), "only what did not come is read again"
    done(ledger, again, rank=0)
    done(ledger, again, rank=1)
    assert_free(ledger)


@pytest.mark.parametrize("order", list(itertools.permutations(["release", "rotate", "answer"])))
def test_case_101_the_last_save_of_a_request_ends_well_in_any_order(order: tuple[str, ...]) -> None:
    ledger = make()
    move = save(ledger, "r", 161)
    assert move is not None
    for what in order:
        if what == "release":
            ledger.release("r")
        elif what == "rotate":
            ledger.rotate()
        else:
            done(ledger, move)
    done(ledger, move)
    late = save(ledger, "r", 161)  # a step that was under way when the request ended
    if late is not None:
        done(ledger, late)
    ledger.release("r")
    assert_free(ledger)
    assert ledger.counters["stored_blocks"] <= 20
    assert ledger.lookup("s", HASHES, known_tokens=161).tokens == 160
