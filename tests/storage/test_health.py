"""A tier that keeps failing is left alone, probed, and taken back when it answers."""

from __future__ import annotations

from tierkv.health import FIRST_BACKOFF_S, MAX_BACKOFF_S, TOLERANCE, Entry, TierHealth


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def degraded() -> tuple[TierHealth, Clock]:
    clock = Clock()
    health = TierHealth(clock)
    assert [health.failed(probe=False) for _ in range(TOLERANCE)] == [False] * (TOLERANCE - 1) + [
        True
    ]
    return health, clock


def test_a_success_in_between_keeps_a_tier_healthy() -> None:
    health = TierHealth(Clock())
    for _ in range(5):
        for _ in range(TOLERANCE - 1):
            health.failed(probe=False)
        assert health.enter() is Entry.OPEN
        assert not health.succeeded()
    assert health.degradations == 0


def test_a_degraded_tier_is_closed_until_its_back_off_is_over_and_then_probed_once() -> None:
    health, clock = degraded()
    assert health.enter() is Entry.CLOSED
    clock.now += FIRST_BACKOFF_S
    assert health.enter() is Entry.PROBE
    assert health.enter() is Entry.CLOSED
    assert health.succeeded()
    assert health.enter() is Entry.OPEN


def test_every_failed_probe_doubles_the_wait_up_to_a_bound() -> None:
    health, clock = degraded()
    wait_s = FIRST_BACKOFF_S
    for _ in range(12):
        clock.now += wait_s - 0.01
        assert health.enter() is Entry.CLOSED
        clock.now += 0.01
        assert health.enter() is Entry.PROBE
        health.failed(probe=True)
        wait_s = min(wait_s * 2, MAX_BACKOFF_S)
    assert health.degradations == 1


def test_late_failures_of_earlier_moves_do_not_end_the_probe() -> None:
    health, clock = degraded()
    clock.now += FIRST_BACKOFF_S
    assert health.enter() is Entry.PROBE
    health.failed(probe=False)
    assert health.enter() is Entry.CLOSED
    health.unknown()
    assert health.enter() is Entry.PROBE
