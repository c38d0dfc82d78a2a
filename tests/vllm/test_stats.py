"""What is counted, in which report it goes out, and what an engine's `/metrics` make of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from stub import Stub, blocks, request

from tierkv.books import Census
from tierkv.connectors.vllm.stats import (
    COUNTERS,
    INTERVAL_S,
    MOVE_SECONDS,
    LedgerStats,
    MoveStats,
    StepClock,
    TierKVMetrics,
    TierKVStats,
    tier_name,
    unread_warning,
)
from tierkv.worth import Line


class Clock:
    """`time.monotonic` for a test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", made)
    return made


# Times of steps. ------------------------------------------------------------------------------


def test_steps_that_hardly_prefill_are_not_measured(clock: Clock) -> None:
    line = Line()
    steps = StepClock(line)
    for scheduled in ({"a": StepClock.LEAST}, {str(n): 1 for n in range(100)}, {}):
        steps.begin(scheduled)
        clock.now += 1.0
        steps.end()
    assert line.count == 0
    steps.begin({"a": StepClock.LEAST, "b": 2})  # one of each would come without a prefill
    clock.now += 0.5
    steps.end()
    assert line.count == 1
    assert line.at(StepClock.LEAST) == pytest.approx(0.5)


def test_of_steps_that_overlap_each_counts_from_the_end_of_the_one_before(clock: Clock) -> None:
    line = Line()
    steps = StepClock(line)
    steps.begin({"a": 101})
    clock.now += 1.0
    steps.begin({"a": 101})  # while the first one runs
    clock.now += 1.0
    steps.end()
    assert line.at(100) == pytest.approx(2.0)
    clock.now += 0.5
    steps.end()
    assert line.at(100) < 2.0
    assert line.count == 2
    both = Line()
    both.add(100, 2.0)
    both.add(100, 0.5)
    assert line.at(100) == pytest.approx(both.at(100))
    steps.end()  # one that never began
    assert line.count == 2


# Moves of one rank. ---------------------------------------------------------------------------


def test_a_moves_time_is_reported_once_with_its_kind_and_tier(clock: Clock) -> None:
    stats = MoveStats("nvme")
    stats.begin(1, "save")
    stats.begin(2, "load", in_tier=False)
    clock.now += 0.25
    stats.end(2)
    clock.now += 0.25
    stats.end(1)
    stats.end(1)
    stats.end(7)  # of an engine that began before
    report = stats.collect({})
    assert report is not None
    assert report.data[MOVE_SECONDS] == [("load", "pinned", 0.25), ("save", "nvme", 0.5)]
    assert stats.collect({}) is None


def test_counters_go_out_as_differences_and_a_new_keeper_subtracts_nothing(clock: Clock) -> None:
    stats = MoveStats("nvme")
    sums: dict[str, int] = {}
    for copied, timed_out in ((5, 2), (0, 3), (4, 0), (0, 1)):  # the keeper restarts in between
        stats.counters["copied_in_bytes"] += copied
        report = stats.collect({"timed_out_moves": timed_out, "load_bytes_waiting": 7})
        for name, value in (report.data if report else {}).items():
            if name in COUNTERS:
                assert value > 0
                sums[name] = sums.get(name, 0) + value
    assert sums == {"copied_in_bytes": 9, "timed_out_moves": 4}


def test_gauges_of_a_rank_come_with_every_report_and_alone_once_an_interval(clock: Clock) -> None:
    stats = MoveStats("nvme")
    gauges = {"keeper_alive": 1, "read_ahead": 9}
    first = stats.collect(gauges)
    assert first is not None
    assert first.data == {"keeper_alive": 1}  # and nothing that is no metric
    assert stats.collect(gauges) is None
    stats.counters["failed_loads"] += 1
    busy = stats.collect(gauges)
    assert busy is not None
    assert busy.data == {"failed_loads": 1, "keeper_alive": 1}
    clock.now += INTERVAL_S
    later = stats.collect(gauges)
    assert later is not None
    assert later.data == {"keeper_alive": 1}


def test_observations_that_nobody_collects_are_bounded(clock: Clock) -> None:
    stats = MoveStats("nvme")
    for n in range(5000):
        stats.begin(n, "save")
        stats.end(n)
    report = stats.collect({})
    assert report is not None
    assert len(report.data[MOVE_SECONDS]) == 4096


# The ledger's. --------------------------------------------------------------------------------


def test_reports_add_up_to_the_ledgers_counters_and_come_once_a_second(clock: Clock) -> None:
    stub = Stub()
    stats = LedgerStats("memory")
    sums = TierKVStats()
    for name in "abc":
        stub.compute(request(name, 100), (list(range(1, 8)),))
        stats.add("too_short_tokens", 3)
        report = stats.collect(stub.scheduler.ledger)
        assert report is not None
        sums.aggregate(report)
        assert stats.collect(stub.scheduler.ledger) is None
        clock.now += INTERVAL_S
    known = stub.scheduler.ledger.stats()
    assert known["stored_blocks"] == 18
    told = {n: v for n, v in sums.data.items() if n in COUNTERS and v}
    assert told.pop("too_short_tokens") == 9
    assert told == {n: v for n, v in known.items() if n in COUNTERS and v}
    assert sums.data["pinned_bytes"] == known["pinned_bytes"]
    assert sums.data["tier_blocks"] == sums.data["never_read_blocks"] == 18
    assert sums.data["tier_up"] == 1


def test_the_end_of_the_last_move_is_reported_at_once(clock: Clock) -> None:
    stub = Stub()
    ledger = stub.scheduler.ledger
    stats = LedgerStats("memory")
    assert stats.collect(ledger) is not None
    stub.storage.silent = True
    stub.compute(request("a", 100), (list(range(1, 8)),))
    assert ledger.moves_in_flight
    assert stats.collect(ledger) is None
    [save] = stub.storage.moves
    stub.storage.silent = False
    stub.storage.submit(save)
    stub.step()
    report = stats.collect(ledger)
    assert report is not None
    assert report.data["stored_blocks"] == 6
    assert stats.collect(ledger) is None


@pytest.mark.parametrize("from_ram", [True, False])
def test_the_end_of_the_last_request_is_reported_at_once(clock: Clock, from_ram: bool) -> None:
    stub = Stub()
    side = stub.scheduler
    stub.compute(request("a1", 100), (list(range(1, 8)),))
    side.finished("a1")
    assert side.stats() is not None
    for name in ("a2", "a3") if from_ram else ("b2", "c3"):
        made, table = request(name, 100), (list(range(21, 28)),)
        tokens, _ = side.matched_tokens(made, 0)
        side.allocated(made, blocks(table), tokens or 0)
        stub.step({name: (1, table)})  # a load begins and ends in it
        assert side.stats() is None
        side.finished(name)
        report = side.stats()
        assert report is not None
        assert report.data["lookups"] == 1
        assert report.data["loaded_tokens"] == (96 if from_ram else 0)
        assert side.stats() is None


def test_a_census_in_slices_finds_what_a_look_at_everything_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Census, "SLICE", 5)
    stub = Stub()
    for name in "abc":
        stub.compute(request(name, 100), (list(range(1, 8)),))
    census = stub.scheduler.ledger.census
    assert census.found["tier_blocks"] == 0
    for _ in range(2):  # a second pass counts nothing twice
        slices = 1
        while not census.advance():
            slices += 1
        assert slices > 3
        assert census.found == {
            "tier_blocks": 18,
            "never_read_blocks": 18,
            "never_read_bytes": 18 * stub.layout.block_bytes[0],
        }


FULL_OF_UNREAD = {
    "tier_blocks": 100,
    "never_read_blocks": 95,
    "never_read_bytes": 9500,
    "evicted_tier_blocks": 100,
}


@pytest.mark.parametrize(
    ("changed", "warns"),
    [
        ({}, True),
        ({"evicted_tier_blocks": 99}, False),  # not turned over yet
        ({"never_read_blocks": 94}, False),
        ({"tier_blocks": 0, "never_read_blocks": 0}, False),
    ],
)
def test_a_tier_that_wears_for_nothing_is_told_of(changed: dict[str, int], warns: bool) -> None:
    line = unread_warning(FULL_OF_UNREAD | changed)
    assert bool(line) == warns
    if line:
        assert "95 of the 100 blocks in it (9500 bytes)" in line


def test_that_warning_comes_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub()
    stub.compute(request("a", 100), (list(range(1, 8)),))
    stub.scheduler.ledger.counters["evicted_tier_blocks"] += 6
    stats = LedgerStats("nvme")
    with caplog.at_level(logging.WARNING, "tierkv"):
        for _ in range(3):
            assert stats.collect(stub.scheduler.ledger) is not None
            clock.now += INTERVAL_S
    assert len([r for r in caplog.records if "were never read" in r.getMessage()]) == 1


# On the engine's channels. --------------------------------------------------------------------


def test_of_two_reports_counters_add_up_and_the_newer_gauge_stays() -> None:
    one = TierKVStats({"hits": 2, "tier_up": 1, MOVE_SECONDS: [("load", "nvme", 0.5)]})
    two = TierKVStats({"hits": 3, "tier_up": 0, MOVE_SECONDS: [("save", "nvme", 0.25)]})
    assert one.aggregate(two) is one
    assert one.data == {
        "hits": 5,
        "tier_up": 0,
        MOVE_SECONDS: [("load", "nvme", 0.5), ("save", "nvme", 0.25)],
    }
    assert one.reduce() == {"tierkv_hits": 5, "tierkv_slowest_move_seconds": 0.5}
    assert not one.is_empty()
    one.reset()
    assert one.is_empty()


def sample(name: str, **more: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": "0", **more})


def test_metrics_count_up_set_gauges_and_observe_times() -> None:
    kinds: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    labels: dict[int, list[object]] = {0: ["m", "0"]}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = TierKVMetrics(config, kinds, ["model_name", "engine"], labels)
    again = TierKVMetrics(config, kinds, ["model_name", "engine"], labels)
    metrics.observe({"hits": 2, "tier_blocks": 7, "lookups": 0})
    again.observe({"hits": 3, "tier_blocks": 5, MOVE_SECONDS: [("load", "nvme", 0.5)]})
    assert sample("tierkv_hits_total") == 5
    assert sample("tierkv_tier_blocks") == 5
    assert sample("tierkv_move_seconds_sum", move="load", tier="nvme") == 0.5


@pytest.mark.parametrize(("url", "name"), [("nvme:///mnt/kv", "nvme"), ("", "none")])
def test_a_tier_is_named_by_its_scheme(url: str, name: str) -> None:
    assert tier_name(url) == name
