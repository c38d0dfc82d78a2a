"""The GPU's scripts on a CPU: everything in them runs, so that a GPU's minutes are for numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import device, gpu

ROOT = Path(__file__).parents[2]


def test_a_dry_run_fills_every_part_of_the_json_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, png = tmp_path / "gpu.json", tmp_path / "gpu.png"
    assert gpu.main(["--dry", "--dir", str(tmp_path), "--out", str(out), "--png", str(png)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert (found["dry"], found["ok"], found["machine"]["gpu"]) == (True, True, None)
    assert [found["shapes"][name]["wrong_pages"] for name in gpu.SHAPES] == [0, 0]
    assert all(found["end_to_end"][name]["hit_tokens"] == 512 for name in gpu.SHAPES)
    assert found["host_copies"]["pinned"] is False
    assert found["gds"]["reason"]
    assert png.stat().st_size > 10_000
    assert {p.name for p in tmp_path.iterdir()} == {"gpu.json", "gpu.png"}, "it cleans up"


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "bench.gpu: torch sees no GPU here; write --dry to try the script\n"


@pytest.mark.parametrize(("where", "line"), [("cuda", "1 skipped"), ("cpu", "22 passed")])
def test_the_tests_of_a_gpu_run_on_a_cpu_and_are_skipped_in_one_line_without_a_gpu(
    where: str, line: str
) -> None:
    if where == "cuda" and gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    words = "-c tests/gpu/pytest.ini --rootdir tests/gpu -p no:asyncio -p no:timeout"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words.split(), "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, "TIERKV_GPU": where, "PYTHONPATH": ".:backends"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert line in done.stdout, done.stdout + done.stderr
    if where == "cuda":
        skipped = [li for li in done.stdout.splitlines() if li.startswith("SKIPPED")]
        assert len(skipped) == 1
        assert "torch sees no CUDA device here" in skipped[0]


def test_the_device_benchmark_measures_every_case_and_prints_both_ways(
    capsys: pytest.CaptureFixture[str],
) -> None:
    device.main(["--mib", "4", "--rounds", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    cases = {(r["block_bytes"], r["op"], r["slots"]) for r in found["copies"]}
    assert len(cases) == len(found["copies"]) == 2 * 2 * 2
    assert all(r["ratio"] > 0 for r in found["copies"])
    assert [c["blocks"] for c in found["caller"]] == [64, 64]
    device.show(found)
    assert "goal" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        device.main(["--mib", "1"])
