"""`tierkv.policy.worth_keeping` and `tierkv.past`: what stays of a segment, what is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.index import Tier
from tierkv.past import Past
from tierkv.policy import BONUS_USES, LEAVING, SAMPLE, worth_keeping


@dataclass
class Columns:
    """A `tierkv.policy.History` of n rows in the tier."""

    tick: NDArray[np.int64]
    uses: NDArray[np.uint8]
    gap: NDArray[np.int32]
    tier: NDArray[np.uint8]


def columns(rows: list[tuple[int, int, int]]) -> Columns:
    tick, uses, gap = (list(column) for column in zip(*rows, strict=True))
    return Columns(
        np.array(tick, np.int64),
        np.array(uses, np.uint8),
        np.array(gap, np.int32),
        np.full(len(rows), Tier.RESIDENT, np.uint8),
    )


row = st.tuples(st.integers(0, 1000), st.integers(0, 255), st.integers(0, 100))


def oracle(rows: list[tuple[int, int, int]]) -> list[bool]:
    """The rule in plain Python, with sorting."""
    gaps = sorted(gap for _, _, gap in rows if gap)
    typical = gaps[len(gaps) // 2] if gaps else 0
    scores = [tick + typical * min(uses, BONUS_USES) for tick, uses, _ in rows]
    bar = sorted(scores)[int(len(scores) * LEAVING)]
    return [score > bar for score in scores]


@given(st.lists(row, min_size=1, max_size=60))
def test_what_stays_scores_above_the_quantile_of_the_whole_tier(
    rows: list[tuple[int, int, int]],
) -> None:
    index, every = columns(rows), np.arange(len(rows))
    assert worth_keeping(index, every).tolist() == oracle(rows)
    assert worth_keeping(index, every[::-2]).tolist() == oracle(rows)[::-2]


@given(st.lists(row, min_size=1, max_size=60), st.data())
def test_one_more_use_or_a_later_one_never_makes_a_block_leave(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    tick, uses = data.draw(st.integers(0, 1000)), data.draw(st.integers(0, 254))
    worse, better = (
        (tick, uses, 0),
        data.draw(st.tuples(st.integers(tick, 1000), st.integers(uses, 255), st.just(0))),
    )
    keep = worth_keeping(columns([*rows, worse, better]), np.array([len(rows), len(rows) + 1]))
    assert keep[1] >= keep[0]


@given(st.lists(row, min_size=1, max_size=60), st.integers(1, 50))
def test_only_ratios_of_times_count(rows: list[tuple[int, int, int]], scale: int) -> None:
    every = np.arange(len(rows))
    slower = [(tick * scale, uses, gap * scale) for tick, uses, gap in rows]
    same = worth_keeping(columns(slower), every) == worth_keeping(columns(rows), every)
    assert same.all()


@given(st.lists(row, min_size=1, max_size=30), st.lists(row, max_size=30))
def test_rows_that_are_not_in_the_tier_say_nothing(
    rows: list[tuple[int, int, int]], others: list[tuple[int, int, int]]
) -> None:
    index = columns([*rows, *others])
    index.tier[len(rows) :] = Tier.ABSENT
    assert worth_keeping(index, np.arange(len(rows))).tolist() == oracle(rows)


def test_nothing_is_worth_keeping_where_nothing_is_in_the_tier() -> None:
    index = columns([(5, 1, 1)] * 3)
    index.tier[:] = Tier.SUSPENDED
    assert worth_keeping(index, np.arange(3)).tolist() == [False] * 3
    assert worth_keeping(index, np.arange(0)).tolist() == []


def test_a_sample_stands_for_many_rows() -> None:
    n = 40 * SAMPLE
    rng = np.random.default_rng(1)
    index = Columns(
        rng.permutation(n).astype(np.int64),
        np.zeros(n, np.uint8),
        np.zeros(n, np.int32),
        np.full(n, Tier.RESIDENT, np.uint8),
    )
    assert worth_keeping(index, np.arange(n)).mean() == pytest.approx(1 - LEAVING, abs=0.02)


names = st.integers(0, 10**6).map(lambda n: sha256(str(n).encode()).digest())


@given(st.dictionaries(names, st.integers(0, 255), max_size=40), st.lists(names, max_size=40))
def test_who_left_is_recalled_with_one_use_more_and_nobody_else(
    left: dict[bytes, int], others: list[bytes]
) -> None:
    past = Past(1 << 20)
    past.remember(list(left), np.array(list(left.values()), np.uint8))
    asked = [*left, *others]
    expected = [min(left[name], 254) + 1 if name in left else 0 for name in asked]
    got = past.recall(asked).tolist()
    # Where two names meet in one place the later one is recalled.
    assert all(a in (b, 0) for a, b in zip(got, expected, strict=True))
    if left:
        assert got[len(left) - 1] == expected[len(left) - 1] > 0


def test_a_full_past_forgets_and_never_mistakes() -> None:
    past = Past(16)
    old, new = ([sha256(b"%d" % n).digest() for n in part] for part in (range(64), range(64, 128)))
    past.remember(old, np.full(64, 7, np.uint8))
    past.remember(new, np.full(64, 3, np.uint8))
    assert set(past.recall(old).tolist()) <= {0, 8}
    recalled = past.recall(new).tolist()
    assert set(recalled) <= {0, 4}
    assert 8 <= sum(uses > 0 for uses in recalled) <= 16
