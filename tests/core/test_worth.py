"""Load or compute again: by what was measured, never for ever, and not before anything is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.worth import DECAY, ENOUGH, PROBE_EVERY, Judge, Line, Worth


def judge(prefill_s: float, load_s: float, **more: int) -> Judge:
    """After equal numbers of both, each so many seconds per thousand tokens."""
    made = Judge(**more)
    for n in range(1, ENOUGH + 1):
        made.prefill.add(1000 * n, prefill_s * n)
        made.loaded("nvme", 1000 * n, load_s * n)
    return made


def test_a_hit_below_the_minimum_is_not_taken_whatever_was_measured() -> None:
    quick = judge(1.0, 0.01, min_hit_tokens=100)
    assert quick.decide(99, {"nvme": 99}) is Worth.TOO_SHORT
    assert quick.decide(99, {"nvme": 99}, always=True) is Worth.TOO_SHORT
    assert quick.decide(100, {"nvme": 100}) is Worth.LOAD


def test_a_load_that_takes_longer_than_computing_is_not_taken_unless_told_to() -> None:
    slow = judge(0.1, 0.2)
    assert slow.decide(5000, {"nvme": 5000}) is Worth.TOO_SLOW
    assert slow.decide(5000, {"nvme": 5000}, always=True) is Worth.LOAD


def test_of_a_hit_only_what_comes_from_the_tier_is_waited_for() -> None:
    slow = judge(0.1, 0.2)
    slow.loads["pinned"] = judge(0.1, 0.001).loads["nvme"]
    assert slow.decide(5000, {"pinned": 3000, "nvme": 2000}) is Worth.LOAD
    assert slow.decide(5000, {"pinned": 1000, "nvme": 4000}) is Worth.TOO_SLOW


def test_before_enough_was_measured_every_hit_is_taken() -> None:
    made = judge(0.1, 0.2)
    assert made.decide(5000, {"s3": 5000}) is Worth.LOAD
    made = Judge()
    for n in range(ENOUGH):
        assert made.decide(5000, {"nvme": 5000}) is Worth.LOAD
        made.loaded("nvme", 1000, 1.0 + n)
    assert made.decide(5000, {"nvme": 5000}) is Worth.LOAD  # no prefill was seen


def test_a_tier_that_became_fast_again_is_found_out() -> None:
    slow = judge(0.1, 0.2)
    taken = 0
    for _ in range(40 * PROBE_EVERY):
        if slow.decide(5000, {"nvme": 5000}) is Worth.LOAD:
            taken += 1
            slow.loaded("nvme", 5000, 0.01)
    assert taken > 20 * PROBE_EVERY


amounts = st.floats(1, 1e6)


@given(st.lists(st.tuples(amounts, st.floats(1e-4, 10)), min_size=2, max_size=40))
def test_a_line_is_the_weighted_least_squares_line_or_the_best_that_does_not_fall(
    seen: list[tuple[float, float]],
) -> None:
    line = Line()
    for x, y in seen:
        line.add(x, y)
    x, y = np.array(seen).T
    w = DECAY ** np.arange(len(seen))[::-1]
    assert all(line.at(n) >= 0 for n in (0, 1, 1e6))
    if np.ptp(x) / x.max() < 0.1:
        return  # about one size: see the next test
    slope, fixed = np.polyfit(x, y, 1, w=np.sqrt(w))
    for n in (x.min(), x.mean(), x.max()):
        if slope < 0:
            wanted = np.average(y, weights=w)
        elif fixed < 0:
            wanted = n * (w * x * y).sum() / (w * x * x).sum()
        else:
            wanted = fixed + slope * n
        if abs(slope) * x.max() > 1e-6 and abs(fixed) > 1e-6:  # not on the edge of a case
            assert line.at(n) == pytest.approx(wanted, rel=1e-3)


def test_observations_of_one_size_are_a_line_through_the_origin() -> None:
    line = Line()
    for _ in range(10):
        line.add(512, 0.5)
    assert line.at(1024) == pytest.approx(1.0)
    assert Line().at(1000) == 0.0
