"""`tierkv plan` says what would be kept, in JSON and as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierkv.cli import app
from tierkv.cli.plan import BAR_COLUMNS, bar
from tierkv.plan import plan_prompt
from tierkv.presets import load_preset, preset_names

LAYOUT = {
    "hash_block_tokens": None,
    "groups": [
        {"name": "mla", "kind": "full", "block_tokens": 256, "block_bytes": 985600},
        {
            "name": "swa",
            "kind": "sliding_window",
            "block_tokens": 64,
            "window_tokens": 128,
            "block_bytes": 1607168,
        },
    ],
}


@pytest.fixture
def layout(tmp_path: Path) -> str:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT))
    return str(path)


def run(*args: str) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *args])


def test_the_json_is_what_the_planner_says(layout: str) -> None:
    result = run("--layout", layout, "--tokens", "1500", "--policy", "end", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (answer["policy"], answer["hit_tokens_resend"]) == ("end", 1280)
    assert [g["stored_ranges"] for g in answer["groups"]] == [[[0, 5]], [[18, 20]]]


@pytest.mark.parametrize("name", preset_names())
def test_every_known_model_can_be_planned_and_drawn(name: str) -> None:
    result = run("--model", name, "--tokens", "5000", "--json")
    assert json.loads(result.stdout) == plan_prompt(load_preset(name), 5000, model=name)
    drawn = run("--model", name, "--tokens", "5000")
    assert drawn.exit_code == 0
    assert "when the same prompt comes again" in drawn.stdout


def test_the_picture_fits_a_narrow_terminal(layout: str) -> None:
    runner = CliRunner(env={"COLUMNS": "80"})
    args = ["plan", "--layout", layout, "--tokens", "1500", "--policy", "end"]
    drawn = runner.invoke(app, args).stdout
    assert "│" + "█" * 48 + " " * 8 + "│" in drawn
    assert "…" not in drawn


def test_the_picture_says_how_many_prompts_fit(layout: str) -> None:
    result = run("--layout", layout, "--tokens", "1500", "--policy", "end", "--capacity", "1GiB")
    assert result.exit_code == 0
    assert "131 of such prompts fit in 1.0 GiB" in result.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "name a model with --model or a file with --layout"),
        (("--model", "llama3-70b", "--layout", "x.json"), "name a model with --model or a file"),
        (("--model", "llama3-7b"), "did you mean 'llama3-70b'?"),
        (("--layout", "absent.json"), "layout file absent.json: No such file"),
        (("--model", "llama3-70b", "--policy", "dens"), "did you mean 'dense'?"),
        (("--model", "llama3-70b", "--capacity", "many"), "--capacity: 'many' is not a size"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(args: tuple[str, ...], text: str) -> None:
    result = run("--tokens", "1000", *args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert text in result.stderr


def test_a_prompt_without_tokens_is_refused(layout: str) -> None:
    result = run("--layout", layout, "--tokens", "0", "--json")
    assert result.exit_code == 2
    assert "tokens is 0" in json.loads(result.stdout)["error"]


def test_the_bar_shows_whole_partial_and_absent_blocks() -> None:
    tokens = BAR_COLUMNS * 10  # ten tokens a column, blocks of twenty: two columns a block
    drawn = bar([[0, 2], [4, 5]], blocks=27, block_tokens=20, tokens=tokens)
    assert drawn == "████" + "····" + "██" + "·" * 44 + "  "
    assert bar([[1, 2]], blocks=112, block_tokens=5, tokens=tokens) == "▒" + "·" * 55


@pytest.mark.parametrize("tokens", ["1", "1000", "40000", "1000000"])
@pytest.mark.parametrize("policy", ["auto", "dense"])
def test_the_plan_is_drawn_into_a_file(tmp_path: Path, tokens: str, policy: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    picture = tmp_path / "plan.png"
    args = ("--model", "dsv4-flash", "--tokens", tokens, "--policy", policy)
    result = run(*args, "--png", str(picture), "--json")
    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(result.stdout)["policy"] == policy


def rectangles(group: dict[str, Any], low: int, high: int) -> tuple[list[float], bool]:
    """Starts of the filled boxes that a row draws, and whether heights stand for shares."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from tierkv.cli import picture

    axes = Figure().subplots()
    shares = picture._row(axes, 0, group, low, high)
    boxes = [p for p in axes.patches if isinstance(p, Rectangle)]
    filled = [b.get_x() for b in boxes if b.get_facecolor() != (1.0, 1.0, 1.0, 1.0)]
    return filled, shares


def test_a_row_shows_blocks_then_runs_then_shares() -> None:
    def group(tokens: int, policy: str) -> dict[str, Any]:
        plan = plan_prompt(load_preset("dsv4-flash"), tokens, policy)
        found: dict[str, Any] = plan["groups"][0]
        return found

    assert rectangles(group(1000, "auto"), 0, 1000) == ([640, 704], False)
    runs, shares = rectangles(group(1_000_000, "auto"), 0, 1_000_000)
    assert (len(runs), runs[:2], shares) == (245, [3968, 8064], False)
    columns, shares = rectangles(group(1_000_000, "dense"), 0, 1_000_000)
    assert (len(columns), shares) == (320, True)
    zoomed = rectangles(group(1_000_000, "dense"), 1_000_000 - 512, 1_000_000)
    assert zoomed == ([999552, 999616, 999808, 999872], False)


@pytest.mark.parametrize(
    ("name", "text"), [("plan.xyz", "xyz"), ("absent/plan.png", "No such file")]
)
def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, name: str, text: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    result = run("--model", "dsv4-flash", "--tokens", "1000", "--png", str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


def test_a_prompt_longer_than_any_is_refused_in_one_line() -> None:
    result = run("--model", "dsv4-flash", "--tokens", "16777217")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "tierkv: --tokens 16777217: write 16777216 or less\n"
    assert run("--model", "dsv4-flash", "--tokens", "16777216").exit_code == 0


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "tierkv.cli.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--model", "dsv4-flash", "--tokens", "1000", "--png", "plan.png")
    assert result.exit_code == 2
    assert "pip install 'tierkv[plot]'" in result.stderr


def test_the_targets_of_deepseek_v4_flash() -> None:
    answers = {}
    for policy in ("auto", "dense"):
        args = ("--model", "dsv4-flash", "--tokens", "131072", "--policy", policy)
        answers[policy] = json.loads(run(*args, "--capacity", "500GiB", "--json").stdout)
    assert answers["auto"]["bytes_per_token"] <= 5.5 * 1024
    assert answers["dense"]["bytes_per_token"] <= 20 * 1024
    assert answers["auto"]["sessions"] > 3 * answers["dense"]["sessions"] > 0
    assert answers["auto"]["lost_tokens_at_most"] == 3840
    assert run("--model", "dsv4-flash", "--tokens", "131072").stdout.count("at most 3,840") == 1
