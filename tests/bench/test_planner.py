"""`bench.planner` measures what it says, in one JSON object; how fast is for people to look at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import planner
from tierkv.presets import load_preset


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.planner", "--rounds", "2", *args])
    planner.main()


def test_every_length_has_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, "--tokens", "3000", "1000", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert [p["tokens"] for p in answer["growth"]] == [1000, 3000]
    for point in answer["growth"]:
        assert set(point) == {"tokens", "lookup_miss", "save", *planner.GOALS_MS}
        assert all(v > 0 for v in point.values())
    assert set(answer["met"]) == set(planner.GOALS_MS)


def test_a_goal_that_is_missed_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    monkeypatch.setitem(planner.GOALS_MS, "lookup", 0.0)
    picture = tmp_path / "growth.svg"
    with pytest.raises(SystemExit) as caught:
        run_main(monkeypatch, "--tokens", "1000", "--check", "--png", str(picture))
    assert caught.value.code == 1
    assert "decode_step" in capsys.readouterr().out
    assert "<svg" in picture.read_text()


def test_the_cases_are_what_they_are_called() -> None:
    layout = load_preset("dsv4-flash")
    prompt = planner.Prompt(layout, 5000)
    kept = planner._ledger(layout, "auto")
    planner._land(kept, planner._save(kept, prompt))
    assert kept.lookup("x", prompt.hashes, known_tokens=5000).tokens == 4864
    few, known = planner.few_tails(layout, prompt)
    assert few.stats()["pinned_blocks"] == 19 + 2 * 5
    assert few.lookup("x", prompt.hashes, known_tokens=known).tokens == 256
    empty = planner._ledger(layout, "auto")
    assert empty.lookup("x", prompt.hashes, known_tokens=5000).tokens == 0
