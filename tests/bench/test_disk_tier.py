"""The benchmarks run, verify what they read, and print the JSON that is promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import disk_report, disk_tier, restart
from bench.disk_engines import FilesEngine

TINY = ["--block-bytes", "8KiB", "--blocks", "64", "--jobs", "2", "--rounds", "1", "--warm"]
ENGINES = "tierkv,tierkv-nosum,tierkv-keeper,files,aiofiles,raw"


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
            fields = {"gb_per_s", "blocks_per_s", "cpu_s_per_gb", "p50_ms", "p99_ms"}
            assert set(engine[kind]) == fields
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


def test_the_curves_and_the_table_are_drawn_from_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(capsys, "--dir", str(tmp_path), "--engines", "files,raw", "--gil-load")
    pytest.importorskip("matplotlib")
    disk_report.draw(report, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    disk_report.show(report)
    assert "raw" in capsys.readouterr().out


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


def kind(blocks_per_s: int, cpu_s_per_gb: float) -> dict[str, float]:
    return {"blocks_per_s": blocks_per_s, "cpu_s_per_gb": cpu_s_per_gb}


def judged(block_bytes: int, **engines: tuple[int, float]) -> dict[str, bool]:
    """Whether each goal of writes is met, by its words."""
    measured = {
        name.replace("_", "-"): {"write": kind(*values), "read": kind(*values)}
        for name, values in engines.items()
    }
    run = {"block_bytes": block_bytes, "jobs": 8, "engines": measured}
    found = disk_report.verdict({"runs": [run]})
    return {one["goal"].split(" (")[0]: one["met"] for one in found if one["kind"] == "write"}


def test_a_tier_at_the_disks_limit_need_not_be_so_many_times_faster_than_another() -> None:
    engines = {"tierkv_nosum": (9100, 0.1), "vllm_fs": (8000, 1.0), "raw": (10_000, 0.05)}
    goals = judged(64 << 10, tierkv=(9100, 0.2), **engines)
    assert goals == {
        "blocks/s of raw": True,
        "blocks/s of vllm-fs": True,
        "CPU of vllm-fs without checksums": True,
        "CPU s/GB of checksums": True,
    }
    slow = judged(64 << 10, tierkv=(8900, 0.3), **engines)
    assert not any(slow[what] for what in slow if "CPU of" not in what)


def test_at_a_mebibyte_as_fast_is_asked_for_whatever_the_disk_can_do() -> None:
    engines = {"tierkv_nosum": (9100, 0.9), "vllm_fs": (9200, 1.0), "raw": (10_000, 0.05)}
    goals = judged(1 << 20, tierkv=(9100, 1.0), **engines)
    assert goals["blocks/s of raw"]
    assert not goals["blocks/s of vllm-fs"]
    assert not goals["CPU of vllm-fs without checksums"]
