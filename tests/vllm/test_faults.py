"""Whatever happens to store or keeper: the engine recomputes, and the output is the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from engines import ROUND, Engine, References, engine, prompt
from stores import fill, filled, nvme
from test_engine import same

from tierkv.blocks import Move, MoveKind

FIRST = ROUND[:1]


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The connector's lines about failed loads."""
    return [r.getMessage() for r in caplog.records if "could not be loaded" in r.getMessage()]


def segments(store: Path) -> list[Path]:
    return sorted(store.glob("*/seg-*"))


def filled_and_found(model: str, store: Path) -> tuple[Path, int]:
    """Fill the store; the segment that holds a block which every hit needs, and where."""
    fill(model, store)
    return place_of(filled(model).needed, store)


def place_of(block: bytes, store: Path) -> tuple[Path, int]:
    """The segment that holds these bytes, and where."""
    for path in segments(store):
        at = path.read_bytes().find(block)
        if at >= 0:
            return path, at
    raise AssertionError("the block is in no segment")


def test_a_flipped_byte_in_a_segment_is_recomputed(
    model: str, store: Path, references: References, caplog: pytest.LogCaptureFixture
) -> None:
    path, at = filled_and_found(model, store)
    with engine(model, extra=nvme(store)) as ours:
        with path.open("r+b") as segment:
            segment.seek(at + 1000)
            byte = segment.read(1)[0]
            segment.seek(at + 1000)
            segment.write(bytes([byte ^ 0x10]))
        answers = ours.ask(ROUND)
        ours.settle()
        counters, worker = ours.counters, ours.worker_side.counters
    assert same(answers, references[model][0])
    assert counters["load_corrupt_blocks"] == worker["failed_loads"] == 1
    assert len(failures(caplog)) == 1
    assert "CORRUPT" in failures(caplog)[0]


def test_a_truncated_segment_is_recomputed(
    model: str, store: Path, references: References, caplog: pytest.LogCaptureFixture
) -> None:
    path, at = filled_and_found(model, store)
    with engine(model, extra=nvme(store)) as ours:
        os.truncate(path, at + 4096)
        answers = ours.ask(ROUND)
        ours.settle()
        counters, worker = ours.counters, ours.worker_side.counters
    assert same(answers, references[model][0])
    lost = counters["load_missing_blocks"] + counters["load_failed_blocks"]
    assert lost + counters["load_corrupt_blocks"] > 0
    assert worker["failed_loads"] == len(failures(caplog)) > 0


@pytest.mark.parametrize("when", ["before the start", "after the start"])
def test_a_deleted_segment_is_recomputed(
    model: str, when: str, store: Path, references: References, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = filled_and_found(model, store)
    if when == "before the start":
        path.unlink()
    with engine(model, extra=nvme(store)) as ours:
        if when == "after the start":
            path.unlink()
        answers = ours.ask(ROUND)
        ours.settle()
        worker = ours.worker_side.counters
    assert same(answers, references[model][0])
    assert worker["failed_loads"] == len(failures(caplog))
    if when == "before the start":
        assert answers[0].cached_tokens < 480
    else:
        assert worker["failed_loads"] > 0


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_keeper_that_is_killed_or_stopped_in_a_load_costs_that_hit_and_comes_back(
    model: str,
    stop: signal.Signals,
    store: Path,
    references: References,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(model, store)
    with engine(model, extra=nvme(store) | {"hang_timeout_s": 0.5}) as ours:
        stop_keeper_at_the_next_load(ours, stop)
        answers = ours.ask(FIRST)
        after_failure = ours.worker_side.counters["failed_loads"]
        wait_for_the_tier(ours)
        loaded = ours.counters["loaded_bytes"]
        answers += ours.ask(ROUND[1:])
        ours.settle()
        counters, stats = ours.counters, ours.worker_side.storage.stats()
    assert same(answers, references[model][0])
    assert after_failure == len(failures(caplog)) == 1
    assert counters["load_failed_blocks"] > 0
    assert counters["tier_down"] == stats["keeper_deaths"] == stats["keeper_restarts"] == 1
    assert counters["loaded_bytes"] > loaded
    assert counters["leased_blocks"] == counters["moves_in_flight"] == 0


def stop_keeper_at_the_next_load(ours: Engine, stop: signal.Signals) -> None:
    """Send the signal to the keeper right before it is given its next load."""
    storage = ours.worker_side.storage
    submit = storage.submit

    def signal_first(move: Move) -> None:
        if move.kind is MoveKind.LOAD:
            os.kill(storage.pid, stop)
            storage.submit = submit
        submit(move)

    storage.submit = signal_first


def wait_for_the_tier(ours: Engine) -> None:
    """Let the engine work on something else until the tier is up again."""
    for attempt in range(500):
        if ours.scheduler_side.ledger.tier_is_up:
            return
        ours.ask([prompt(1000 + attempt, 20)])
    raise AssertionError("the tier did not come back")
