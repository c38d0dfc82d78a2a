"""The soak can fail: it sees wrong bytes, and ends itself where something hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soak_watch
from soak import grown, is_wrong, prompts_of

HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "plugin"), *sys.path])}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | PATHS,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


@pytest.mark.timeout(600)  # two engines start in it; on a busy machine each takes a minute
def test_a_run_whose_loaded_bytes_are_zeroed_finds_wrong_outputs_and_fails(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = "--seconds 6 --restarts 0 --prompts 8 --rate 0 --model tinyllama --sabotage --seed 1"
    ended = run("-m", "soak", *words.split(), "--out", str(out))
    assert ended.returncode == 1, ended.stderr
    found = json.loads(out.read_text())
    assert found["wrong_outputs"] > 0
    assert not found["ok"]
    assert not found["leaks"]
    assert json.loads(ended.stdout.splitlines()[-1]) == found
    assert "soak: seed 1, model tinyllama" in ended.stderr


HANGS = """
import threading
import time
from soak_watch import Watch
watch = Watch(lambda: "told", lambda: "described", lambda phase: print("ended", phase, flush=True),
              tell_s=0.05)
watch.phase("quick", 60)
watch.phase("slow", 0.2)
threading.Event().wait()
"""


def test_a_phase_that_hangs_is_told_described_and_ends_the_process() -> None:
    ended = run("-c", HANGS)
    assert ended.returncode == soak_watch.HUNG_STATUS
    assert ended.stdout == "ended slow\n"
    assert "slow         told" in ended.stderr
    assert "slow         HANGS: described" in ended.stderr
    assert 'File "<string>", line 9 in <module>' in ended.stderr


def test_an_answer_is_compared_as_far_as_it_and_what_is_certain_of_it_go() -> None:
    certain = [1, 2, 3], [-0.1, -0.2, -0.3]
    assert not is_wrong(([1, 2], [-0.1, -0.2]), certain)
    assert not is_wrong(([1, 2, 3, 4], [-0.1, -0.2, -0.3, -9.0]), certain)
    assert is_wrong(([1, 5], [-0.1, -0.2]), certain)
    assert is_wrong(([1, 2], [-0.1, -0.25]), certain)


def test_memory_that_grows_after_the_warm_up_is_seen_and_that_before_is_not() -> None:
    assert grown([(float(n), min(n, 20) << 20) for n in range(100)]) == 0
    assert grown([(float(n), n << 20) for n in range(100)]) > 30 << 20


def test_a_seed_gives_the_same_prompts_again() -> None:
    assert prompts_of(3, 20) == prompts_of(3, 20)
    assert prompts_of(3, 20) != prompts_of(4, 20)
