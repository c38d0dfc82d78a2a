"""`tierkv demo` shows what the main job measured, and fails when it failed."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from tierkv.cli import app

ANSWER: dict[str, Any] = {
    "ok": True,
    "prompts": 4,
    "tokens": 12000,
    "hit_tokens": 11776,
    "hit_tokens_after_restart": 11776,
    "bytes_stored": 3 << 20,
    "bytes_skipped": 9 << 20,
    "bytes_per_token": 262.1,
    "save_gb_per_s": 1.25,
    "load_gb_per_s": 2.5,
    "mismatched_blocks": 0,
}


class Job:
    def __init__(self) -> None:
        self.answer = dict(ANSWER)
        self.place: Path | None = None

    def run_demo(self, place: Path) -> dict[str, Any]:
        assert place.is_dir()
        (place / "what-a-demo-leaves").touch()
        self.place = place
        print("loading")
        return self.answer


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job()
    module = ModuleType("tierkv.demo")
    module.__dict__["run_demo"] = job.run_demo
    monkeypatch.setitem(sys.modules, "tierkv.demo", module)
    return job


def test_the_json_is_what_the_job_measured(job: Job) -> None:
    result = CliRunner().invoke(app, ["demo", "--json"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, ANSWER)


def test_the_table_shows_what_reachability_saved(job: Job) -> None:
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0
    for text in ("3.0 MiB", "12.0 MiB", "9.0 MiB", "11,776", "2.50 GB/s"):
        assert text in result.stdout


def test_a_mismatch_exits_with_1(job: Job) -> None:
    job.answer |= {"ok": False, "mismatched_blocks": 2}
    assert CliRunner().invoke(app, ["demo"]).exit_code == 1
    result = CliRunner().invoke(app, ["demo", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["mismatched_blocks"]) == (1, 2)


def test_it_works_inside_the_named_directory_and_leaves_nothing(job: Job, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["demo", "--dir", str(tmp_path)]).exit_code == 0
    assert job.place is not None
    assert job.place.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_refused_in_one_line(job: Job, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--dir", str(tmp_path / "absent")])
    assert (result.exit_code, job.place) == (2, None)
    assert result.stderr.startswith(f"tierkv: --dir {tmp_path}/absent: No such file")
    assert result.stderr.count("\n") == 1


TERMINATED = """
import asyncio, os, pathlib, signal, sys, types

async def job(place):
    (place / "what-a-demo-leaves").touch()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

demo = types.ModuleType("tierkv.demo")
demo.run_demo = lambda place: asyncio.run(job(place))
sys.modules["tierkv.demo"] = demo
from tierkv.cli import main
main()
"""


def test_a_demo_that_is_terminated_leaves_nothing_either(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, "demo", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (128 + 15, [])
    assert "Traceback" not in done.stderr


def test_the_real_demo_brings_everything_back(tmp_path: Path) -> None:
    script = Path(sysconfig.get_path("scripts")) / "tierkv"
    done = subprocess.run(
        [script, "demo", "--json", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"], answer["mismatched_blocks"]) == (0, True, 0)
    assert answer["hit_tokens_after_restart"] == answer["hit_tokens"] > 0
    assert answer["bytes_skipped"] > 0
    assert set(ANSWER) <= set(answer)
    assert list(tmp_path.iterdir()) == []
