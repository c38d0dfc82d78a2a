"""The benchmarks run, verify what they read, and print the JSON that is promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import disk_goals, disk_report, disk_tier, restart
from bench.disk_engines import FilesEngine

TINY = ["--block-bytes", "8KiB", "--blocks", "64", "--jobs", "2", "--rounds", "1", "--warm"]
ENGINES = "tierkv,tierkv-nosum,tierkv-keeper,files,aiofiles,raw,raw-2m"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert disk_tier.main([*TINY, *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_every_engine_moves_blocks_and_reads_them_back_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(capsys, "--dir", str(tmp_path), "--engines", ENGINES)
    assert list(report["engines"]) == ENGINES.split(",")
    for engine in report["engines"].values():
        assert engine["wrong_blocks"] == 0
        for kind in ("write", "read", "mixed"):
            rates = {"gb_per_s", "blocks_per_s", "cpu_s_per_gb", "p50_ms", "p99_ms"}
            assert set(engine[kind]) == rates | {"seconds", "cpu_s"}
            assert len(engine[kind]["seconds"]) == len(engine[kind]["cpu_s"]) == 1
            assert engine[kind]["blocks_per_s"] > 0
    assert report["engines"]["files"]["modes"]["direct"] == "no"
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in json.dumps(report)


def test_bytes_that_were_read_wrong_are_counted_and_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = FilesEngine.move_sync

    def spoilt(self: FilesEngine, job: Any) -> None:
        real(self, job)
        if not job.save and job.first == 0:
            self.setup.arena.view[100] ^= 1

    monkeypatch.setattr(FilesEngine, "move_sync", spoilt)
    arguments = [*TINY, "--dir", str(tmp_path), "--engines", "files", "--json"]
    assert disk_tier.main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["engines"]["files"]["wrong_blocks"] == 1


def test_the_curves_and_the_tables_are_made_from_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--engines", "files,raw", "--gil-load", "--jobs", "2,1")
    report = run(capsys, "--dir", str(tmp_path), *words)
    assert [one["jobs"] for one in report["runs"]] == [2, 1]
    pytest.importorskip("matplotlib")
    disk_report.draw(report, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    disk_report.show(report)
    assert "raw" in capsys.readouterr().out
    table = disk_report.markdown(report)
    assert "`python -m bench.disk_tier --block-bytes 8KiB" in table
    assert "| 8 KiB, 1 jobs | raw |" in table


def test_of_both_loads_the_tier_is_measured_with_and_without_and_what_it_keeps_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--engines", "tierkv,tierkv-keeper,raw", "--gil-load", "both", "--rounds", "2")
    report = run(capsys, "--dir", str(tmp_path), *words)
    (one,) = report["runs"]
    assert list(one["engines"]) == ["tierkv", "tierkv-keeper", "raw"]
    assert list(one["beside_load"]) == ["tierkv", "tierkv-keeper"]
    kept = [line for line in report["verdict"] if "kept beside" in line["goal"]]
    assert {(line["engine"], line["kind"]) for line in kept} == {
        (engine, kind) for engine in one["beside_load"] for kind in ("write", "read")
    }
    assert all((line["met"] is None) == (line["engine"] == "tierkv") for line in kept)
    assert "tierkv-keeper beside a busy thread" in disk_report.markdown(report)
    disk_report.show_verdict(report["verdict"])
    assert "kept beside a spinning thread" in capsys.readouterr().out


def test_all_numbers_of_jobs_are_tried_at_one_block_size_only_where_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--block-bytes", "8KiB,4KiB", "--jobs", "2,1", "--jobs-at", "4KiB")
    report = run(capsys, "--dir", str(tmp_path), "--engines", "raw", *words)
    tried = [(one["block_bytes"], one["jobs"]) for one in report["runs"]]
    assert tried == [(8192, 2), (4096, 2), (4096, 1)]


HANGS = """
import asyncio, sys
from bench import disk_tier, watchdog
from bench.disk_engines import AiofilesEngine

async def hang(self, job):
    await asyncio.sleep(3600)

AiofilesEngine.move = hang
watchdog.Watchdog.__init__.__defaults__ = (0.5, 20.0)
sys.exit(disk_tier.main(sys.argv[1:]))
"""


def test_an_engine_that_stands_still_is_named_and_ends_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, *TINY, "--engines", "aiofiles", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == (
        "disk_tier: stopped: aiofiles, 8 KiB blocks, 2 jobs side by side: a save of 32 blocks "
        "was not done after 0.5 s"
    )
    assert "most recent call first" in done.stderr
    assert not list(tmp_path.iterdir())


STANDS = """
import asyncio, time
from bench.watchdog import Watchdog

async def main():
    async with Watchdog(0.2, 0.3):
        await asyncio.sleep(0)  # the first beat
        time.sleep(3600)

asyncio.run(main())
"""


def test_a_loop_that_stands_still_is_shown_and_ended() -> None:
    command = [sys.executable, "-c", STANDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in main" in done.stderr


def test_a_restart_brings_every_block_back_and_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        restart.main(["--dir", str(tmp_path), "--blocks", "5000", "--rounds", "1", "--json"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["blocks"] == 5000
    assert report["open_s_clean"] > 0
    assert report["open_s_killed"] > 0
    assert report["index_bytes_per_block"] > 0


Shown = tuple[list[float], list[float]]
"""Seconds and CPU seconds of each round; the set is 1 GB, so they are seconds per GB."""


def judged(block_bytes: int, engine: str, **shown: Shown) -> dict[str, bool | None]:
    """Whether each goal of writes is met, by its words."""
    engines = {
        name.replace("_", "-"): {k: {"seconds": s, "cpu_s": c} for k in ("write", "read")}
        for name, (s, c) in shown.items()
    }
    blocks = 10**9 / block_bytes
    run = {"block_bytes": block_bytes, "jobs": 8, "blocks": blocks, "engines": engines}
    found = disk_goals.verdict({"runs": [run]})
    return {
        one["goal"].split(" (")[0]: one["met"]
        for one in found
        if one["kind"] == "write" and one["engine"] == engine
    }


def steady(blocks_per_s: float, cpu_s: float) -> Shown:
    return [10_000 / blocks_per_s] * 3, [cpu_s] * 3


def test_a_tier_at_the_disks_limit_need_not_be_so_many_times_faster_than_another() -> None:
    others = {"vllm_fs": steady(8000, 1.0), "raw": steady(10_000, 0.05)}
    plain = {"tierkv_nosum": steady(9100, 0.1)}
    goals = judged(64 << 10, "tierkv", tierkv=steady(9100, 0.2), **plain, **others)
    assert goals == {
        "blocks/s of raw": True,
        "blocks/s of vllm-fs": True,
        "CPU of vllm-fs, without checksums": True,
        "CPU s/GB of checksums": True,
        "throughput that checksums cost": True,
    }
    slow = judged(64 << 10, "tierkv", tierkv=steady(8600, 0.3), **plain, **others)
    assert not any(slow[what] for what in slow if "CPU of" not in what)


def test_at_a_mebibyte_as_fast_is_asked_for_whatever_the_disk_can_do() -> None:
    engines = {
        "tierkv": steady(9100, 1.0),
        "tierkv_nosum": steady(9100, 0.9),
        "vllm_fs": steady(9200, 1.0),
        "raw": steady(10_000, 0.05),
    }
    goals = judged(1 << 20, "tierkv", **engines)
    assert goals["blocks/s of raw"]
    assert not goals["blocks/s of vllm-fs"]
    assert not goals["CPU of vllm-fs, without checksums"]


def test_the_keeper_is_judged_as_well_with_what_checksums_may_cost_taken_off() -> None:
    others = {"vllm_fs": steady(2000, 1.0), "raw": steady(10_000, 0.05)}
    off = "CPU of vllm-fs, 0.13 s/GB off for checksums"
    good = judged(64 << 10, "tierkv-keeper", tierkv_keeper=steady(9100, 0.32), **others)
    assert good == {"blocks/s of raw": True, "blocks/s of vllm-fs": True, off: True}
    bad = judged(64 << 10, "tierkv-keeper", tierkv_keeper=steady(5000, 0.35), **others)
    assert bad == {"blocks/s of raw": False, "blocks/s of vllm-fs": False, off: False}


def test_rounds_are_compared_one_by_one_so_that_one_disturbed_round_changes_nothing() -> None:
    raw, ours = [1.0, 3.0, 2.0], [3.0, 3.1, 2.1]  # ratios 0.33, 0.97, 0.95; of medians: 0.67
    assert judged(64 << 10, "tierkv", tierkv=(ours, ours), raw=(raw, raw))["blocks/s of raw"]
    ours[2] = 3.0
    twice = judged(64 << 10, "tierkv", tierkv=(ours, ours), raw=(raw, raw))
    assert not twice["blocks/s of raw"]
