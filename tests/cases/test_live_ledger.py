"""Cases of kinds LIVE, RANK and PIN at the deciding half: full arenas, parked loads, ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.tables import full
from tierkv.blocks import Copied, Keys, Move, MoveDone, MoveReleased, Outcome, Recovered
from tierkv.hashing import chain
from tierkv.layout import Layout
from tierkv.ledger import Agree, Ledger, Submit

FULL = Layout((full(16),))
SLOT = 4096


def hashes_of(number: int, blocks: int) -> list[bytes]:
    tokens = [number * 1000 + i for i in range(16 * blocks + 1)]
    return list(chain(tokens, 16).hashes)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    slots: int, stored: list[list[bytes]], *, ranks: int = 1, clock: Clock | None = None
) -> Ledger:
    ledger = Ledger(
        FULL,
        arena_bytes=slots * SLOT,
        ranks=ranks,
        boundary_policy="dense",
        promise_s=30,
        pending_s=10,
        clock=clock or Clock(),
    )
    for rank in range(ranks):
        ledger.apply(rank, Recovered(Keys.of((0, h) for hashes in stored for h in hashes)))
    return ledger


def look(ledger: Ledger, owner: str, hashes: list[bytes]) -> tuple[int, bool]:
    hit = ledger.lookup(owner, hashes, known_tokens=16 * len(hashes) + 1)
    return hit.tokens // 16, hit.pending


def save(ledger: Ledger, owner: str, hashes: list[bytes]) -> Move | None:
    tokens = 16 * len(hashes) + 1
    return ledger.begin_save(
        owner,
        hashes,
        computed_tokens=tokens,
        known_tokens=tokens,
        block_ids=[list(range(len(hashes)))],
    )


def done(ledger: Ledger, move: Move, rank: int = 0) -> None:
    ledger.apply(rank, Copied(move.id))
    ledger.apply(rank, MoveDone(move.id, np.zeros(len(move), np.uint8)))


def test_case_104_waiting_loads_leave_room_for_saves() -> None:
    prompts = [hashes_of(n, 5) for n in range(50)]
    ledger = make(10, prompts)
    answers = [look(ledger, f"r{n}", hashes) for n, hashes in enumerate(prompts)]
    promised = [n for n, (blocks, pending) in enumerate(answers) if blocks and not pending]
    assert promised == [0], "the next five would pass what is kept for saves"
    assert all(pending for blocks, pending in answers[1:])
    assert ledger._flights.load_bytes <= 10 * SLOT * 7 // 8
    move = save(ledger, "s", hashes_of(99, 2))
    assert move is not None and len(move) == 2
    for n, hashes in enumerate(prompts):
        assert look(ledger, f"r{n}", hashes) == (5, False), "one after the other gets its turn"
        load = ledger.begin_load(f"r{n}", [list(range(5))])
        done(ledger, load)
        ledger.release(f"r{n}")


def test_case_105_a_save_that_found_no_room_is_not_tried_again_before_there_is_some() -> None:
    ledger = make(8, [])
    holder = save(ledger, "a", hashes_of(1, 7))
    assert holder is not None and len(holder) == 7
    wanted = hashes_of(2, 3)
    for _ in range(20):
        assert save(ledger, "b", wanted) is None
    assert ledger.counters["declined_blocks"] == 3, "one attempt a block"
    done(ledger, holder)
    move = save(ledger, "b", wanted)
    assert move is not None and len(move) == 3
    assert save(ledger, "b", wanted) is None


@pytest.mark.parametrize("head_only", [True, False])
def test_case_108_parked_loads_never_stop_the_others_for_good(head_only: bool) -> None:
    clock = Clock()
    prompts = {f"r{n}": hashes_of(n, 5) for n in range(6)}
    ledger = make(20, list(prompts.values()), clock=clock)
    pages, running, waiting = 4, {"long": 20}, list(prompts)  # "long" holds 16 of the 20 pages
    loads: list[tuple[str, Move]] = []
    for step in range(100):
        clock.now += 1.0
        for owner, move in loads:
            done(ledger, move)
            running[owner] = step + 3
        loads.clear()
        for owner in [o for o, end in running.items() if end <= step]:
            del running[owner]
            ledger.release(owner)
            pages += 16 if owner == "long" else 5
        for owner in list(waiting):  # as an engine does: every step it asks anew
            blocks, pending = look(ledger, owner, prompts[owner])
            if pending or pages < 5:
                if head_only:
                    break
                continue  # parked, with a promise that holds room
            pages -= 5
            waiting.remove(owner)
            if blocks:
                loads.append((owner, ledger.begin_load(owner, [list(range(5))])))
            else:
                running[owner] = step + 3
        if not waiting and not running and not loads:
            break
    else:
        raise AssertionError("no request makes progress")
    assert ledger.counters["hits"] >= 3
    assert ledger.stats()["leased_blocks"] == 0
    assert ledger._flights.load_bytes == 0


def test_case_108_a_promise_that_nobody_takes_up_ends_and_its_room_comes_back() -> None:
    clock = Clock()
    ledger = make(8, [hashes_of(1, 7), hashes_of(2, 7)], clock=clock)
    assert look(ledger, "a", hashes_of(1, 7)) == (7, False)
    assert look(ledger, "b", hashes_of(2, 7)) == (7, True)
    clock.now = 11.0
    assert look(ledger, "b", hashes_of(2, 7)) == (0, False), "it waits no longer than it may"
    clock.now = 31.0
    assert look(ledger, "b", hashes_of(2, 7)) == (7, False)
    with pytest.raises(KeyError):
        ledger.begin_load("a", [list(range(7))])


def test_case_109_what_does_not_fit_is_counted_and_nothing_raises() -> None:
    ledger = make(3, [])
    moves = [save(ledger, f"r{n}", hashes_of(n, 1)) for n in range(100)]
    taken = [m for m in moves if m is not None]
    assert len(taken) == 2  # the budget: an eighth of three slots is left to loads
    assert ledger.counters["declined_blocks"] == 98
    for move in taken:
        done(ledger, move)
    for n in range(100):
        move = save(ledger, f"r{n}", hashes_of(n, 1))
        if move is not None:
            done(ledger, move)
        ledger.release(f"r{n}")
    assert ledger.counters["stored_blocks"] == 100
    assert ledger.stats()["leased_blocks"] == 0


def test_case_110_a_failed_load_is_an_answer_and_the_prompt_is_served_again() -> None:
    hashes = hashes_of(1, 4)
    ledger = make(8, [hashes])
    assert look(ledger, "r", hashes) == (4, False)
    load = ledger.begin_load("r", [list(range(4))])
    ledger.apply(0, MoveDone(load.id, np.full(4, Outcome.FAILED, np.uint8)))
    assert ledger.counters["load_failed_blocks"] == 4
    assert ledger.stats()["pinned_bytes"] == 0
    assert save(ledger, "r", hashes) is None, "an error once is no proof that they are gone"
    assert look(ledger, "r", hashes) == (4, False)


@pytest.mark.parametrize("begun", [False, True])
def test_case_112_an_aborted_lookup_gives_its_slots_back_without_another(begun: bool) -> None:
    hashes = hashes_of(1, 4)
    ledger = make(8, [hashes])
    assert look(ledger, "r", hashes) == (4, False)
    assert ledger.stats()["pinned_bytes"] == 4 * SLOT
    if begun:
        load = ledger.begin_load("r", [list(range(4))])
        ledger.release("r")
        ledger.apply(0, MoveDone(load.id, np.full(4, Outcome.TIMED_OUT, np.uint8), released=False))
        assert ledger.stats()["pinned_bytes"] == 4 * SLOT, "something may still write there"
        ledger.apply(0, MoveReleased(load.id))
    else:
        ledger.release("r")
    assert ledger.stats()["pinned_bytes"] == 0
    assert ledger.stats()["leased_blocks"] == 0


def test_case_119_blocks_are_ready_once_every_rank_says_so_whenever_that_is() -> None:
    hashes = hashes_of(1, 4)
    ledger = make(16, [], ranks=3)
    move = save(ledger, "r", hashes)
    assert move is not None
    for rank in (2, 0):
        done(ledger, move, rank)
        assert look(ledger, "s", hashes) == (4, True)
        assert ledger.counters["stored_blocks"] == 0
    done(ledger, move, 1)
    assert look(ledger, "s", hashes) == (4, False)
    assert ledger.counters["stored_blocks"] == 4


def test_case_119_a_tier_is_promised_from_once_every_rank_has_opened_its_own() -> None:
    keys = Keys.of((0, h) for h in hashes_of(1, 4))
    ledger = Ledger(FULL, arena_bytes=16 * SLOT, ranks=2, boundary_policy="dense")
    ledger.apply(1, Recovered(keys))
    assert look(ledger, "s", hashes_of(1, 4)) == (0, False)
    ledger.apply(0, Recovered(keys.take([0, 1, 3])))
    assert look(ledger, "s", hashes_of(1, 4)) == (2, False), "one rank lacks the third block"
    (command,) = ledger.take_commands()
    assert isinstance(command, Submit)
    assert (command.rank, list(command.move.keys)) == (1, [(0, keys.hash_at(2))])


def test_case_120_no_slot_lies_beyond_the_smallest_rank() -> None:
    sizes = [35_341, 34_435, 36_561]
    ledger = make(min(sizes), [])
    hashes = hashes_of(1, 40_000)
    taken = 0
    for _ in range(3):
        move = save(ledger, "r", hashes)
        if move is None:
            break
        assert int(move.offsets.max()) + SLOT <= min(sizes) * SLOT
        assert len(set(move.offsets.tolist())) == len(move)
        taken += len(move)
        done(ledger, move)
    assert taken == 40_000


@pytest.mark.parametrize("lost", [0, 1])
def test_case_148_what_one_rank_could_not_do_none_of_them_has(lost: int) -> None:
    hashes = hashes_of(1, 4)
    ledger = make(16, [], ranks=2)
    move = save(ledger, "r", hashes)
    assert move is not None
    for rank in range(2):
        ledger.apply(rank, Copied(move.id))
        outcome = Outcome.FAILED if rank == lost else Outcome.DONE
        ledger.apply(rank, MoveDone(move.id, np.full(4, outcome, np.uint8)))
    assert ledger.stats()["tier_blocks"] == 0
    assert ledger.unstored_blocks == 4
    assert ledger.rewrite() == 4
    (command,) = ledger.take_commands()
    assert isinstance(command, Submit) and command.rank is None, "all of them try again"
    assert not isinstance(command, Agree)
    for rank in range(2):
        ledger.apply(rank, MoveDone(command.move.id, np.zeros(4, np.uint8)))
    assert ledger.stats()["tier_blocks"] == 4
