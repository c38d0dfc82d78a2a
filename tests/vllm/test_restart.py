"""The cache of an engine that ended is read by the next one, from NVMe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import ENVIRONMENT, HERE, ROUND, Answer, References, corrupt_loads, engine
from stores import fill, nvme
from test_engine import GROUPS, planned_bytes, same

Job = tuple[str, dict[str, Any], int | None]


def one_round_command(*jobs: Job) -> tuple[list[str], dict[str, str]]:
    """How another process runs a round in each of these engines, and its environment."""
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{HERE}:{HERE / 'plugin'}"}
    return [sys.executable, "-m", "one_round", json.dumps(jobs)], environment


def test_a_second_engine_loads_from_nvme_with_the_same_output(
    model: str, store: Path, references: References
) -> None:
    fill(model, store)
    with engine(model, extra=nvme(store)) as ours:
        answers = ours.ask(ROUND)
        ours.settle()
        counters, worker = ours.counters, ours.worker_side.counters
        layout = ours.scheduler_side.ledger.layout
    plain, cached = references[model]
    assert same(answers, plain)
    assert [a.cached_tokens for a in answers] == [a.cached_tokens for a in cached]
    plan = planned_bytes(layout, 480) * len(ROUND)
    assert counters["loaded_bytes"] == worker["copied_in_bytes"] == plan


@pytest.mark.parametrize(("tiny", "group"), GROUPS)
def test_twin_of_the_restart_sees_one_corrupted_group(
    tiny: str, group: int, store: Path, references: References
) -> None:
    fill(tiny, store)
    with engine(tiny, extra=nvme(store)) as ours:
        corrupt_loads(ours, group)
        answers = ours.ask(ROUND)
    plain, _ = references[tiny]
    assert not any(a.same_output(b) for a, b in zip(answers, plain, strict=True))


def answers_of(found: dict[str, Any]) -> list[Answer]:
    """What the other process printed."""
    columns = zip(found["tokens"], found["logprobs"], found["cached_tokens"], strict=True)
    return [Answer(tuple(tokens), tuple(logprobs), n) for tokens, logprobs, n in columns]


WHOLE = [("tinyllama", None), ("tinygemma3", None)]
TWINS = [("tinyllama", 0), ("tinygemma3", 1)]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | None], Any]:
    """What another process answers over stores of its own, by model and corrupted group.

    One process for all: to import the engine takes longer than all that is asked of it.
    """
    jobs: list[Job] = []
    for model, group in WHOLE + TWINS:
        store = tmp_path_factory.mktemp("elsewhere") / "store"
        fill(model, store)
        jobs.append((model, nvme(store), group))
    command, environment = one_round_command(*jobs)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(WHOLE + TWINS, found, strict=True))


@pytest.mark.timeout(420)
def test_a_new_process_loads_from_nvme_with_the_same_output(
    model: str, elsewhere: dict[tuple[str, int | None], Any], references: References
) -> None:
    found = elsewhere[model, None]
    plain, cached = references[model]
    assert all(a.same_output(b) for a, b in zip(answers_of(found), plain, strict=True))
    assert found["cached_tokens"] == [a.cached_tokens for a in cached]
    assert found["loaded_bytes"] == found["copied_in_bytes"] > 0


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("tiny", "group"), TWINS)
def test_twin_of_the_new_process_sees_one_corrupted_group(
    tiny: str,
    group: int,
    elsewhere: dict[tuple[str, int | None], Any],
    references: References,
) -> None:
    found = elsewhere[tiny, group]
    plain, cached = references[tiny]
    assert found["cached_tokens"] == [a.cached_tokens for a in cached]
    assert not any(a.same_logprobs(b) for a, b in zip(answers_of(found), plain, strict=True))


def test_other_weights_share_nothing(store: Path) -> None:
    fill("tinyllama", store)
    with engine("tinyllama", extra=nvme(store) | {"identity": "other"}) as ours:
        answers = ours.ask(ROUND[:1])
    assert answers[0].cached_tokens == 0
