"""`bench.trace_replay`: what it prints is what the planner does, and `auto` keeps its promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import trace_replay
from bench.belady import belady_hits
from bench.trace_replay import dense_hits, replay, replay_ledger, replay_unbounded
from bench.traces import Names, Prompt, Trace, find_trace, read_trace, synthetic_trace
from tierkv import reach
from tierkv.presets import load_preset

FIELDS = {
    "model",
    "policy",
    "hit_tokens",
    "dense_hit_tokens",
    "prompt_tokens",
    "bytes_per_token",
    "stored_bytes",
}
KIB = 1024


def write(path: Path, requests: list[tuple[int, list[Any]]]) -> Path:
    lines = [json.dumps({"input_length": n, "hash_ids": ids}) for n, ids in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("requests", "block_tokens", "whole"),
    [
        ([(1300, [0, 1, 2]), (6758, list(range(14)))], 512, [2, 13]),
        ([(33, ["a", "b", "c"]), (160, list("abcdefghij"))], 16, [2, 10]),
        ([(1300, [0, 1]), (6758, list(range(13)))], 512, [2, 13]),
    ],
)
def test_the_block_size_of_a_trace_is_worked_out_from_its_lengths(
    tmp_path: Path, requests: list[tuple[int, list[Any]]], block_tokens: int, whole: list[int]
) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", requests))
    assert trace.block_tokens == block_tokens
    assert [len(p.ids) for p in trace.prompts] == whole


def test_a_trace_whose_lengths_fit_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [(1000, [0, 1]), (1000, list(range(40)))])
    with pytest.raises(ValueError, match="--block-tokens"):
        read_trace(path)
    assert read_trace(path, block_tokens=500).block_tokens == 500
    (tmp_path / "other.jsonl").write_text('{"prompt": "hello"}\n')
    with pytest.raises(ValueError, match="must have input_length and hash_ids"):
        read_trace(tmp_path / "other.jsonl")


ids = st.lists(st.integers(0, 3), max_size=6)


@settings(max_examples=100, deadline=None)
@given(ids, ids, st.sampled_from([1, 4, 16, 24, 48]))
def test_two_prompts_share_the_names_of_what_they_share(
    a: list[int], b: list[int], unit: int
) -> None:
    numbers: dict[tuple[int, ...], int] = {}

    def prompt(blocks: list[int]) -> Prompt:  # an id for every prefix
        prefixes = [tuple(blocks[: i + 1]) for i in range(len(blocks))]
        return Prompt(tuple(numbers.setdefault(p, len(numbers)) for p in prefixes), 99)

    one, two = Names(prompt(a), 16, unit), Names(prompt(b), 16, unit)
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    common = min(len(a), len(b)) if shared is None else shared
    for i, (x, y) in enumerate(zip(one, two, strict=False)):
        # A unit that begins in a shared block and ends in another is not shared.
        assert (x == y) == ((i + 1) * unit <= common * 16)
    assert len(one) == len(a) * 16 // unit
    assert one[:3] == [one[i] for i in range(min(3, len(one)))]


@pytest.mark.parametrize("model", ["dsv4-flash", "gemma3-27b", "qwen3-next-80b"])
def test_what_dense_would_hit_is_what_a_replay_of_dense_hits(model: str) -> None:
    layout, trace = load_preset(model), synthetic_trace(prompts=60)
    run = replay_unbounded(layout, reach.DENSE, trace)
    assert run.hits == [hit for hit, _ in dense_hits(layout, trace)]
    assert sum(run.hits) > 0


@pytest.mark.parametrize("policy", ["dense", "auto", "end", "interval:1024"])
def test_the_ledger_hits_what_the_planner_alone_does(policy: str) -> None:
    layout, trace = load_preset("dsv4-flash"), synthetic_trace(prompts=80)
    parsed = reach.Policy.parse(policy)
    unbounded = replay_unbounded(layout, parsed, trace)
    assert replay_ledger(layout, parsed, trace, 1 << 50) == unbounded.hits


def test_with_less_room_hindsight_hits_less_and_the_ledger_no_more_than_that() -> None:
    layout, trace = load_preset("dsv4-flash"), synthetic_trace(prompts=200)
    run = replay_unbounded(layout, reach.AUTO, trace)
    hindsight = []
    for capacity in (1 << 50, 1 << 29, 1 << 27):
        best = sum(belady_hits(layout, trace, run.index, run.loaded, run.kept, capacity))
        assert sum(replay_ledger(layout, reach.AUTO, trace, capacity)) <= best
        hindsight.append(best)
    assert hindsight[0] == sum(run.hits) > hindsight[1] > hindsight[2] > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_auto_keeps_97_percent_of_the_hits_of_a_trace_that_branches(seed: int) -> None:
    trace = synthetic_trace(seed=seed, prompts=1000)
    answer = replay(load_preset("dsv4-flash"), reach.AUTO, trace)
    assert answer["hit_fraction_of_dense"] >= 0.97
    assert answer["bytes_per_token"] <= 5.5 * KIB


def test_auto_keeps_its_promise_on_the_public_trace() -> None:
    path = find_trace()
    if path is None:
        pytest.skip("the public trace is not on this machine")
    answer = replay(load_preset("dsv4-flash"), reach.AUTO, read_trace(path, limit=4000))
    assert answer["halves"][1]["hit_fraction_of_dense"] >= 0.985
    assert answer["bytes_per_token"] <= 5.5 * KIB


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.trace_replay", *args])
    trace_replay.main()


def test_one_json_object_with_every_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--synthetic", "--limit", "60", "--json", "--policy", "end")
    run_main(monkeypatch, *args)
    plain = json.loads(capsys.readouterr().out)
    assert set(plain) >= FIELDS
    assert "capacity_bytes" not in plain
    assert (plain["model"], plain["policy"], plain["prompts"]) == ("dsv4-flash", "end", 60)
    for name in ("hit_tokens", "dense_hit_tokens", "prompt_tokens", "stored_bytes"):
        assert plain[name] == sum(half[name] for half in plain["halves"])
    run_main(monkeypatch, *args, "--capacity-gib", "0.5")
    bounded = json.loads(capsys.readouterr().out)
    assert bounded["capacity_bytes"] == 1 << 29
    assert bounded["eviction"]
    assert bounded["hit_tokens"] <= bounded["belady_hit_tokens"] <= plain["hit_tokens"]
    assert bounded["stored_bytes"] == plain["stored_bytes"]


def test_the_trade_off_is_drawn_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    picture = tmp_path / "tradeoff.png"
    run_main(monkeypatch, "--synthetic", "--limit", "40", "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "% of dense" in capsys.readouterr().out


def test_a_trace_that_is_not_there_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"bench.trace_replay: .*absent.jsonl"):
        run_main(monkeypatch, "absent.jsonl")
    monkeypatch.setattr(trace_replay, "find_trace", lambda: None)
    with pytest.raises(SystemExit, match="write --synthetic"):
        run_main(monkeypatch)


def test_the_known_tokens_of_a_prompt_end_with_what_the_trace_tells() -> None:
    trace = Trace("t", 512, (Prompt((0, 1), 1300), Prompt((0, 1), 1024), Prompt((), 5)))
    assert [trace.known_tokens(p) for p in trace.prompts] == [1025, 1024, 1]
