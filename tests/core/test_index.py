"""The index against a dict: where blocks are, whatever is added, forgotten and given back."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.blocks import HASH_BYTES, Keys
from tierkv.index import NO_SLOT, Index, Pinned, Tier

GROUPS = 2
KEYS = st.tuples(
    st.integers(0, GROUPS - 1), st.integers(0, 6).map(lambda n: bytes([n]) * HASH_BYTES)
)


class IndexMachine(RuleBasedStateMachine):
    """`known`: key → row. `rows`: every row that was handed out and not given back → its state."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(GROUPS, capacity=2)
        self.known: dict[tuple[int, bytes], int] = {}
        self.rows: dict[int, dict[str, Any]] = {}

    @rule(key=KEYS, depth=st.integers(0, 99))
    def add(self, key: tuple[int, bytes], depth: int) -> None:
        if key in self.known:
            return
        row = self.index.add(*key, depth=depth)
        assert row not in self.rows, "a row in use was handed out again"
        self.known[key] = row
        self.rows[row] = {"key": key, "depth": depth, "pinned": 0, "tier": 0, "leases": 0}

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def add_many(self, keys: list[tuple[int, bytes]]) -> None:
        rows = self.index.add_all(Keys.of(keys)).tolist()
        for key, row in zip(keys, rows, strict=True):
            if key in self.known:
                assert row == self.known[key]
            else:
                assert row not in self.rows
                self.known[key] = row
                self.rows[row] = {"key": key, "depth": 0, "pinned": 0, "tier": 0, "leases": 0}

    @rule(
        pick=st.integers(0, 99),
        column=st.sampled_from(["pinned", "tier", "leases"]),
        value=st.integers(0, 2),
    )
    def write(self, pick: int, column: str, value: int) -> None:
        if self.rows:
            row = sorted(self.rows)[pick % len(self.rows)]
            getattr(self.index, column)[row] = value
            self.rows[row][column] = value

    @rule(pick=st.integers(0, 99))
    def forget(self, pick: int) -> None:
        if self.rows:
            row = sorted(self.rows)[pick % len(self.rows)]
            self.index.forget(row)
            key = self.rows[row]["key"]
            if self.known.get(key) == row:
                del self.known[key]

    @rule(picks=st.sets(st.integers(0, 99)))
    def forget_all(self, picks: set[int]) -> None:
        rows = sorted({sorted(self.rows)[n % len(self.rows)] for n in picks if self.rows})
        self.index.forget_all(np.array(rows, np.int64))
        gone = set(rows)
        self.known = {key: row for key, row in self.known.items() if row not in gone}

    @rule(picks=st.lists(st.integers(0, 99)))
    def reap_all(self, picks: list[int]) -> None:
        rows = [sorted(self.rows)[n % len(self.rows)] for n in picks if self.rows]
        self.index.reap_all(np.array(rows, np.int64))
        for row in set(rows):
            state = self.rows[row]
            if not (state["pinned"] or state["tier"] or state["leases"]):
                del self.rows[row]
                if self.known.get(state["key"]) == row:
                    del self.known[state["key"]]

    @rule(pick=st.integers(0, 99))
    def reap(self, pick: int) -> None:
        if not self.rows:
            return
        row = sorted(self.rows)[pick % len(self.rows)]
        state = self.rows[row]
        self.index.reap(row)
        self.index.reap(row)  # twice is the same as once
        if not (state["pinned"] or state["tier"] or state["leases"]):
            del self.rows[row]
            if self.known.get(state["key"]) == row:
                del self.known[state["key"]]
            assert self.index.offset[row] == NO_SLOT
            assert not self.index.is_known(row)

    @invariant()
    def every_key_leads_to_its_row(self) -> None:
        index = self.index
        assert len(index) == len(self.known)
        assert sorted(index.live().tolist()) == sorted(self.known.values())
        for group in range(GROUPS):
            for n in range(7):
                key = (group, bytes([n]) * HASH_BYTES)
                assert index.find(*key) == self.known.get(key, -1)
                assert index.finder(group)(key[1], -1) == self.known.get(key, -1)
        keys = Keys.of(self.known)
        assert index.find_all(keys).tolist() == list(self.known.values())

    @invariant()
    def every_row_keeps_its_state(self) -> None:
        for row, state in self.rows.items():
            assert next(iter(self.index.keys_of(np.array([row])))) == state["key"]
            for column in ("depth", "pinned", "tier", "leases"):
                assert getattr(self.index, column)[row] == state[column]
            assert self.index.is_known(row) == (self.known.get(state["key"]) == row)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_row_with_a_slot_is_not_given_back() -> None:
    index = Index(1)
    row = index.add(0, b"k")
    index.offset[row] = 0
    index.reap(row)
    assert index.find(0, b"k") == row
    index.offset[row] = NO_SLOT
    index.reap(row)
    assert index.find(0, b"k") == -1


def test_growing_keeps_every_column() -> None:
    index = Index(1, capacity=1)
    rows = [index.add(0, bytes([n]), depth=n) for n in range(100)]
    index.pinned[rows] = Pinned.RESIDENT
    index.tier[rows[:50]] = Tier.RESIDENT
    more = [index.add(0, bytes([n]) * 2) for n in range(100)]
    assert len({*rows, *more}) == 200
    assert index.depth[rows].tolist() == list(range(100))
    assert (index.pinned[more] == Pinned.ABSENT).all()
    assert (index.offset[[*rows, *more]] == NO_SLOT).all()


def test_a_key_that_is_given_twice_has_one_row_and_wastes_none() -> None:
    index = Index(2, capacity=4)
    one, two = (bytes([n]) * HASH_BYTES for n in (1, 2))
    rows = index.add_all(Keys.of([(0, one), (1, one), (0, two), (0, one)])).tolist()
    assert rows[0] == rows[3]
    assert len(set(rows)) == 3 == len(index)
    assert index.add(1, two) not in rows
    assert len(index.offset) == 4, "no row was lost"
