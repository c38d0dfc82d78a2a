"""`bench.presets` prints one row for every model that `tierkv plan` knows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import presets
from tierkv.plan import plan_prompt
from tierkv.presets import load_preset, preset_names


def test_the_table_has_every_model_and_the_numbers_of_its_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.presets", "--tokens", "10000"])
    presets.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:-2]] == list(preset_names())
    kib = plan_prompt(load_preset("gemma3-27b"), 10000, "auto")["bytes_per_token"] / 1024
    assert f" {kib:.2f} |" in next(line for line in lines if "gemma3-27b" in line)


def test_the_json_says_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.presets", "--tokens", "10000", "--json"])
    presets.main()
    answer = json.loads(capsys.readouterr().out)
    for row in answer["models"]:
        assert row["end"] <= row["auto"] <= row["dense"] <= row["all_blocks"]


def test_the_readme_shows_the_table_that_is_printed() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    found = presets.rows(131072, 500 << 30)
    assert presets.table(found, 131072, "500GiB").split("\n\n")[0] in readme
