"""The ledger against a simulated world of ranks: slots hold names instead of bytes.

Whatever order copies, answers, late writes, retirements, lost tiers and rotations come in, a load
that every rank calls done must find the right name in every rank's slot, and in the end nothing
may be leased, quarantined or lost from the books.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.blocks import (
    Copied,
    Keys,
    Move,
    MoveDone,
    MoveKind,
    MoveReleased,
    Outcome,
    Recovered,
    Retire,
    TierDown,
    slot_bytes,
)
from tierkv.hashing import chain
from tierkv.layout import Group, GroupKind, Layout
from tierkv.ledger import Agree, Ledger, Rotate, Submit

RANKS = 2
LAYOUT = Layout(
    (
        Group(name="full", kind=GroupKind.FULL, block_tokens=8, block_bytes=3 * 4096),
        Group(
            name="swa",
            kind=GroupKind.SLIDING_WINDOW,
            block_tokens=2,
            window_tokens=4,
            block_bytes=4096,
        ),
    )
)
PROMPTS = [
    list(range(40)),
    [*range(16), *range(100, 124)],
    [*range(24), *range(200, 208)],
    list(range(500, 526)),
]
CHAINS = [chain(p, LAYOUT.hash_block_tokens).hashes for p in PROMPTS]
NBYTES = LAYOUT.block_bytes


class Rank:
    """One rank's arena (offset → length, name) and tier (a set of keys)."""

    def __init__(self) -> None:
        self.memory: dict[int, tuple[int, Any]] = {}
        self.tier: set[tuple[int, bytes]] = set()
        self.todo: list[tuple[str, Move]] = []
        self.hung: list[Move] = []
        self.retiring: dict[int, Keys] = {}
        self.up = False
        self.epoch = 0

    def put(self, offset: int, nbytes: int, name: Any) -> None:
        end = offset + slot_bytes(nbytes)
        for other, (length, _) in list(self.memory.items()):
            if other < end and offset < other + slot_bytes(length):
                del self.memory[other]
        self.memory[offset] = (nbytes, name)

    def write(self, move: Move) -> np.ndarray:
        out = np.zeros(len(move), np.uint8)
        for i, key in enumerate(move.keys):
            held = self.memory.get(int(move.offsets[i]))
            assert held is not None and held[1] == key, "a save found a foreign slot"
            if self.up and move.epoch == self.epoch:
                self.tier.add(key)
            else:
                out[i] = Outcome.DECLINED
        return out

    def read(self, move: Move) -> np.ndarray:
        out = np.zeros(len(move), np.uint8)
        for i, key in enumerate(move.keys):
            if not move.from_tier[i]:
                continue
            if self.up and move.epoch == self.epoch and key in self.tier:
                self.put(int(move.offsets[i]), NBYTES[key[0]], key)
            else:
                out[i] = Outcome.MISSING
        return out


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger(
            LAYOUT, arena_bytes=40 * 4096, ranks=RANKS, clock=lambda: self.now, promise_s=50
        )
        self.ranks = [Rank() for _ in range(RANKS)]
        self.retire_id = 0
        self.loads: dict[int, tuple[Move, set[int], np.ndarray]] = {}
        self.stale: set[int] = set()
        for r in range(RANKS):
            self.open(r)

    def open(self, r: int) -> None:
        rank = self.ranks[r]
        rank.up = True
        self.ledger.apply(r, Recovered(Keys.of(rank.tier), rank.epoch))
        self.obey()

    def obey(self) -> None:
        for command in self.ledger.take_commands():
            match command:
                case Agree(rank, retire_id):
                    keys = self.ranks[rank].retiring.pop(retire_id, None)
                    if keys is not None:
                        self.ranks[rank].tier -= set(keys)
                case Rotate(epoch):
                    self.stale |= set(self.loads)
                    for rank in self.ranks:
                        rank.epoch = epoch
                        rank.tier.clear()
                case Submit(which, move):
                    for r, rank in enumerate(self.ranks):
                        if which is None or which == r:
                            self.send(rank, move)

    def send(self, rank: Rank, move: Move) -> None:
        if move.kind is MoveKind.DELETE:
            if move.epoch == rank.epoch:
                rank.tier -= set(move.keys)
        else:
            rank.todo.append(("answer", move))

    # What a request does -------------------------------------------------------------------

    @rule(p=st.sampled_from(range(len(PROMPTS))), who=st.integers(0, 3), local=st.integers(0, 2))
    def look(self, p: int, who: int, local: int) -> None:
        hit = self.ledger.lookup(
            f"r{who}", CHAINS[p], known_tokens=len(PROMPTS[p]), local_tokens=8 * local
        )
        assert hit.tokens < len(PROMPTS[p])
        if hit.pending or hit.tokens <= 8 * local:
            return
        move = self.ledger.begin_load(f"r{who}", [list(range(99))] * 2)
        self.loads[move.id] = (move, set(range(RANKS)), np.zeros(len(move), bool))
        for rank in self.ranks:
            rank.todo.append(("answer", move))
        self.obey()

    @rule(p=st.sampled_from(range(len(PROMPTS))), who=st.integers(0, 3))
    def promise_only(self, p: int, who: int) -> None:
        self.ledger.lookup(f"r{who}", CHAINS[p], known_tokens=len(PROMPTS[p]))

    @rule(
        p=st.sampled_from(range(len(PROMPTS))),
        who=st.integers(0, 3),
        upto=st.integers(1, 40),
    )
    def save(self, p: int, who: int, upto: int) -> None:
        move = self.ledger.begin_save(
            f"p{p}w{who}",
            CHAINS[p],
            computed_tokens=min(upto, len(PROMPTS[p])),
            known_tokens=len(PROMPTS[p]),
            block_ids=[list(range(99))] * 2,
        )
        if move is not None:
            assert len(set(move.keys)) == len(move)
            for rank in self.ranks:
                rank.todo.append(("copy", move))

    @rule(who=st.integers(0, 3))
    def leave(self, who: int) -> None:
        self.ledger.release(f"r{who}")
        self.obey()

    @rule(p=st.sampled_from(range(len(PROMPTS))), who=st.integers(0, 3))
    def finish_saver(self, p: int, who: int) -> None:
        self.ledger.release(f"p{p}w{who}")

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # What ranks do ---------------------------------------------------------------------------

    @rule(r=st.integers(0, RANKS - 1), fault=st.sampled_from(["", "", "", "fail", "hang"]))
    def step(self, r: int, fault: str) -> None:
        rank = self.ranks[r]
        if not rank.todo:
            return
        what, move = rank.todo.pop(0)
        if what == "copy":
            for i, key in enumerate(move.keys):
                rank.put(int(move.offsets[i]), NBYTES[key[0]], key)
            self.ledger.apply(r, Copied(move.id))
            rank.todo.insert(0, ("answer", move))
        elif fault == "fail":
            self.answer(r, move, np.full(len(move), Outcome.FAILED, np.uint8))
        elif fault == "hang":
            rank.hung.append(move)
            self.answer(r, move, np.full(len(move), Outcome.TIMED_OUT, np.uint8), released=False)
        else:
            work = rank.write if move.kind is MoveKind.SAVE else rank.read
            self.answer(r, move, work(move))
        self.obey()

    def answer(self, r: int, move: Move, outcomes: np.ndarray, *, released: bool = True) -> None:
        if move.id in self.loads:
            _, due, bad = self.loads[move.id]
            bad |= outcomes != Outcome.DONE
            for i, key in enumerate(move.keys):
                if outcomes[i] == Outcome.DONE and move.id not in self.stale:
                    held = self.ranks[r].memory.get(int(move.offsets[i]))
                    assert held is not None and held[1] == key, "a load found a foreign slot"
            due.discard(r)
        self.ledger.apply(r, MoveDone(move.id, outcomes, released))

    @rule(r=st.integers(0, RANKS - 1), scribble=st.booleans())
    def hung_move_ends(self, r: int, scribble: bool) -> None:
        rank = self.ranks[r]
        if not rank.hung:
            return
        move = rank.hung.pop(0)
        if scribble and move.kind is MoveKind.LOAD:
            for i in np.flatnonzero(move.from_tier):
                group = int(move.keys.groups[i])
                rank.put(int(move.offsets[i]), NBYTES[group], "late write")
        self.ledger.apply(r, MoveReleased(move.id))
        self.obey()

    @rule(r=st.integers(0, RANKS - 1), data=st.data())
    def retire(self, r: int, data: st.DataObject) -> None:
        rank = self.ranks[r]
        free = sorted(rank.tier - {k for keys in rank.retiring.values() for k in keys})
        if not free or not rank.up:
            return
        keys = Keys.of(data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True)))
        self.retire_id += 1
        rank.retiring[self.retire_id] = keys
        self.ledger.apply(r, Retire(self.retire_id, keys))
        self.obey()

    @precondition(lambda self: all(not r.hung for r in self.ranks))
    @rule(r=st.integers(0, RANKS - 1))
    def keeper_dies(self, r: int) -> None:
        rank = self.ranks[r]
        if not rank.up:
            return
        rank.up = False
        answers = [m for what, m in rank.todo if what == "answer"]
        rank.todo = [t for t in rank.todo if t[0] == "copy"]
        rank.retiring.clear()
        for move in answers:
            self.answer(r, move, np.full(len(move), Outcome.FAILED, np.uint8))
        self.ledger.apply(r, TierDown("killed"))
        self.obey()

    @rule(r=st.integers(0, RANKS - 1))
    def keeper_returns(self, r: int) -> None:
        if not self.ranks[r].up:
            self.open(r)

    @rule()
    def rotate(self) -> None:
        self.ledger.rotate()
        self.obey()

    # What must hold --------------------------------------------------------------------------

    @invariant()
    def promised_tier_blocks_are_everywhere(self) -> None:
        index = self.ledger._books.index
        rows = np.flatnonzero(index.tier == 2)
        for key in index.keys_of(rows):
            for rank in self.ranks:
                assert rank.up and key in rank.tier

    def settle(self) -> None:
        for _ in range(400):
            for r in range(RANKS):
                self.step(r, "")
                self.hung_move_ends(r, False)

    def teardown(self) -> None:
        for r, rank in enumerate(self.ranks):
            if not rank.up:
                self.open(r)
        self.settle()
        for who in range(4):
            self.ledger.release(f"r{who}")
            for p in range(len(PROMPTS)):
                self.ledger.release(f"p{p}w{who}")
        self.obey()
        self.settle()  # what the tier did not take is offered again when requests end
        ledger, books = self.ledger, self.ledger._books
        assert not any(r.retiring or r.todo or r.hung for r in self.ranks)
        assert ledger.moves_in_flight == 0 and not ledger._flights._by_id
        assert not books.index.leases.any() and not books.index.tier_leases.any()
        assert ledger._flights.load_bytes == ledger._flights.save_bytes == 0
        held = np.flatnonzero(books.index.pinned)
        used = books.room.slots.capacity_bytes - books.room.slots.free_bytes
        assert books.room.slot_bytes(held) == used


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
