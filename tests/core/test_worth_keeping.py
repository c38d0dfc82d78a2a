"""`tierkv.policy.worth_keeping` and `tierkv.past`: what stays of a segment, what is remembered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.blocks import Keys
from tierkv.index import Tier
from tierkv.past import Past
from tierkv.policy import BONUS_USES, LEAVING, SAMPLE, STAYS, worth_keeping


@dataclass
class Columns:
    """A `tierkv.policy.History` of n rows in the tier."""

    tick: NDArray[np.int64]
    depth: NDArray[np.int32]
    uses: NDArray[np.uint8]
    gap: NDArray[np.int32]
    tier: NDArray[np.uint8]


def columns(rows: list[tuple[int, int, int]]) -> Columns:
    tick, uses, gap = (list(column) for column in zip(*rows, strict=True))
    return Columns(
        np.array(tick, np.int64),
        np.arange(len(rows), dtype=np.int32),
        np.array(uses, np.uint8),
        np.array(gap, np.int32),
        np.full(len(rows), Tier.RESIDENT, np.uint8),
    )


row = st.tuples(st.integers(0, 1000), st.integers(0, 255), st.integers(0, 100))


def oracle(rows: list[tuple[int, int, int]], chosen: list[int]) -> list[bool]:
    """The rule in plain Python, with sorting. Row n is n tokens deep."""
    gaps = sorted(gap for _, _, gap in rows if gap)
    typical = gaps[len(gaps) // 2] if gaps else 0
    scores = [tick + typical * min(uses, BONUS_USES) for tick, uses, _ in rows]
    bar = sorted(scores)[int(len(scores) * LEAVING)]
    worth = sorted((n for n in chosen if scores[n] > bar), key=lambda n: (-scores[n], n))
    if len(worth) <= STAYS * len(chosen):
        worth = worth[: len(chosen) // 2]
    return [n in worth for n in chosen]


@given(st.lists(row, min_size=1, max_size=60), st.data())
def test_what_stays_scores_above_the_quantile_of_the_tier_and_is_the_best_half_at_most(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True))
    got = worth_keeping(columns(rows), np.array(chosen, np.int64))
    assert got.tolist() == oracle(rows, chosen)


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
    chosen = list(range(len(rows)))
    assert worth_keeping(index, np.array(chosen)).tolist() == oracle(rows, chosen)


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
        np.zeros(n, np.int32),
        np.zeros(n, np.uint8),
        np.zeros(n, np.int32),
        np.full(n, Tier.RESIDENT, np.uint8),
    )
    coldest, hottest = np.argsort(index.tick)[: n // 2], np.argsort(index.tick)[n // 2 :]
    assert worth_keeping(index, coldest).mean() == pytest.approx(1 - LEAVING / 0.5, abs=0.04)
    assert worth_keeping(index, hottest).all()


names = st.integers(0, 10**6).map(lambda n: sha256(str(n).encode()).digest())


def keys_of(hashes: Iterable[bytes], group: int = 0) -> Keys:
    return Keys.of((group, name) for name in hashes)


def past_of(entries: int) -> Past:
    past = Past()
    past.reserve(entries)
    return past


@settings(deadline=None)
@given(
    st.dictionaries(names, st.integers(0, 255), max_size=40),
    st.lists(names, max_size=40),
    st.integers(0, 3),
)
def test_a_prompt_recalls_the_most_that_it_or_what_follows_was_used(
    left: dict[bytes, int], others: list[bytes], grown: int
) -> None:
    past = past_of(1 << 20)
    past.remember(keys_of(left), np.array(list(left.values()), np.uint8))
    past.reserve(past.entries << grown)
    asked = [*left, *others]
    got = past.recall(keys_of(asked)).tolist()
    for n, uses in enumerate(got):
        possible = [min(left[name], 254) + 1 for name in asked[n:] if name in left]
        assert uses in (0, *possible)
        assert uses == max(got[n:])
    alone = past.recall(keys_of(asked), chained=False).tolist()
    assert [max(alone[n:]) for n in range(len(alone))] == got


def test_what_precedes_a_block_in_a_chain_was_used_at_least_as_often() -> None:
    prompt = [n.to_bytes(8, "little") * 4 for n in range(1, 1001)]
    past = past_of(1 << 20)
    past.remember(keys_of(prompt[::3]), np.full(334, 4, np.uint8))
    assert set(past.recall(keys_of(prompt)).tolist()) == {5}
    assert past.recall(keys_of(prompt), chained=False).tolist() == [5, 0, 0] * 333 + [5]
    assert not past.recall(keys_of(sha256(b"other%d" % n).digest() for n in range(1000))).any()


def test_a_full_past_forgets_and_never_mistakes() -> None:
    past = past_of(16)
    old, new = ([sha256(b"%d" % n).digest() for n in part] for part in (range(64), range(64, 128)))
    past.remember(keys_of(old), np.full(64, 7, np.uint8))
    past.remember(keys_of(new), np.full(64, 3, np.uint8))
    assert all(past.recall(keys_of([name]))[0] in (0, 8) for name in old)
    recalled = [int(past.recall(keys_of([name]))[0]) for name in new]
    assert set(recalled) == {0, 4}
    assert 8 <= sum(uses > 0 for uses in recalled) <= 16


def test_groups_are_told_apart_though_their_blocks_share_hashes() -> None:
    prompt = [n.to_bytes(8, "little") * 4 for n in range(1, 1001)]
    past = past_of(1 << 20)
    for group in range(3):
        past.remember(keys_of(prompt, group), np.full(1000, 10 * group, np.uint8))
    for group in range(3):
        assert set(past.recall(keys_of(prompt, group)).tolist()) == {10 * group + 1}
