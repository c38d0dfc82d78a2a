"""`bench.eviction`: policies against slow oracles, and the default against LRU."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import trace_replay
from bench.eviction import (
    BLOCKWISE,
    Segments,
    belady,
    compare,
    fifo,
    footprint,
    lru,
    s3_fifo,
    table,
)
from bench.traces import synthetic_trace


@st.composite
def made_prompts(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Prompts over a small tree of prefixes: equal ids mean equal prefixes."""
    texts = draw(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12))
    numbers: dict[tuple[int, ...], int] = {}
    return [
        tuple(numbers.setdefault(tuple(t[: n + 1]), len(numbers)) for n in range(len(t)))
        for t in texts
    ]


def held_prefix(prompt: tuple[int, ...], held: set[int]) -> int:
    return len(list(itertools.takewhile(held.__contains__, prompt)))


def ranked(prompts: list[tuple[int, ...]], capacity: int, *, by_use: bool) -> list[int]:
    """LRU, or FIFO, by ranking everything anew after each prompt."""
    held: dict[int, tuple[int, int]] = {}
    hits = []
    for now, prompt in enumerate(prompts):
        hits.append(held_prefix(prompt, set(held)))
        for depth, block in enumerate(prompt):
            if by_use or block not in held:
                held[block] = (now, -depth)
        best = sorted(held, key=lambda block: held[block], reverse=True)[:capacity]
        held = {block: held[block] for block in best}
    return hits


@given(made_prompts(), st.integers(1, 12))
def test_lru_and_fifo_keep_the_best_ranked(prompts: list[tuple[int, ...]], capacity: int) -> None:
    assert list(lru(prompts, capacity)) == ranked(prompts, capacity, by_use=True)
    assert list(fifo(prompts, capacity)) == ranked(prompts, capacity, by_use=False)


def best_of_all(prompts: list[tuple[int, ...]], capacity: int) -> int:
    """The most blocks that any choice of what is held between prompts can hit, by trying all."""
    reach: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for held, hits in reach.items():
            total = hits + held_prefix(prompt, set(held))
            there = sorted(held | set(prompt))
            for kept in itertools.combinations(there, min(capacity, len(there))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), total)
        reach = after
    return max(reach.values())


@settings(max_examples=60, deadline=None)
@given(made_prompts().map(lambda prompts: prompts[:5]), st.integers(1, 3))
def test_no_choice_beats_belady(prompts: list[tuple[int, ...]], capacity: int) -> None:
    assert sum(belady(prompts, capacity)) == best_of_all(prompts, capacity)


@given(made_prompts(), st.integers(1, 12))
def test_no_policy_hits_more_than_belady_nor_less_than_all_where_all_fits(
    prompts: list[tuple[int, ...]], capacity: int
) -> None:
    bound = sum(belady(prompts, capacity))
    everything = list(belady(prompts, 10**6))
    for run in (lru, fifo, s3_fifo):
        assert sum(run(prompts, capacity)) <= bound
        assert list(run(prompts, 10**6)) == everything


@settings(max_examples=60, deadline=None)
@given(made_prompts(), st.integers(8, 40), st.integers(8, 12))
def test_segments_never_hold_more_than_the_capacity(
    prompts: list[tuple[int, ...]], capacity: int, segments: int
) -> None:
    run = Segments(prompts, capacity, segments)
    for _ in run.hits():
        assert len(run.index) <= capacity
    assert len(run.index) <= run.stored
    assert run.rewritten <= run.stored  # at most half of what is given up


def test_segments_with_room_for_all_write_every_block_once_and_hit_all() -> None:
    prompts = [p.ids for p in synthetic_trace(prompts=100).prompts]
    run = Segments(prompts, 4 * footprint(prompts), 32)
    assert list(run.hits()) == list(lru(prompts, 10**9))
    assert (run.stored, run.rewritten) == (footprint(prompts), 0)


def test_one_json_object_a_table_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    args = ["--synthetic", "--limit", "60", "--capacity", "10%,50%"]
    picture = tmp_path / "eviction.png"
    monkeypatch.setattr(sys, "argv", ["bench.trace_replay", *args, "--png", str(picture), "--json"])
    trace_replay.main()
    answer = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [size["capacity_share"] for size in answer["sizes"]] == [0.1, 0.5]
    for size in answer["sizes"]:
        assert set(size["hit_tokens"]) == {*BLOCKWISE, "default"}
        assert all(run["write_amplification"] >= 1 for run in size["default"])
    assert "of LRU" in table(answer)


@pytest.mark.parametrize("text", ["", "5%,x", "0%", "101%"])
def test_a_capacity_that_is_no_share_is_refused_in_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.trace_replay", f"--capacity={text}"])
    with pytest.raises(SystemExit):
        trace_replay.main()
    assert "write percentages up to 100" in capsys.readouterr().err


def test_progress_leaves_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    compare(synthetic_trace(prompts=20), [0.2], segments=[4])
    assert capsys.readouterr().out == ""
