"""What planning costs: lookups, first plans and decode steps, from a thousand tokens to a million.

``python -m bench.planner`` times the deciding half on one core, with the hashes given, for
DeepSeek-V4-Flash (unit 4 tokens, state groups of 4 and 8 tokens). Medians of ``--rounds``, in
milliseconds:

lookup: `Ledger.lookup` of a prompt of which all is kept, promise taken back included.
lookup_few_tails: the same where every full-attention block is there and, within reach, no tail but
    that of the first boundary.
lookup_miss: the same where nothing is there.
plan: `planner.plan_save` of a prompt of which nothing is kept yet, computed at once.
save: `Ledger.begin_save` of the same: with slots, rows and the move.
decode_step: `Ledger.begin_save` of one more token; the mean over 256 of them, so that a boundary
    is passed in each round.

Goals at 1,000,000 tokens: lookup 2 ms, plan 20 ms, decode step 0.05 ms. ``--check`` exits with 1
where one is missed. ``--png`` draws the growth. ``--json`` prints one object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tierkv import planner, reach
from tierkv.blocks import Copied, Move, MoveDone, Outcome
from tierkv.index import Index
from tierkv.layout import Layout
from tierkv.ledger import Ledger
from tierkv.presets import load_preset

TOKENS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
GOALS_MS = {"lookup": 2.0, "lookup_few_tails": 2.0, "plan": 20.0, "decode_step": 0.05}
_ARENA_BYTES = 1 << 50
_STEPS = 256


class Prompt:
    """Names and pages of an imagined prompt."""

    def __init__(self, layout: Layout, tokens: int, seed: int = 0) -> None:
        room = tokens + 2 * _STEPS
        raw = np.random.default_rng(seed).bytes(32 * (room // layout.hash_block_tokens))
        self.tokens = tokens
        self.all_hashes = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        self.hashes = self.all_hashes[: tokens // layout.hash_block_tokens]
        self.pages = [list(range(1, room // g.block_tokens + 1)) for g in layout.groups]


def median_ms(rounds: int, act: Callable[[], object], reset: Callable[[], object] = int) -> float:
    """The median time of `act`; `reset` runs after each and is not counted."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
        reset()
    return statistics.median(times) * 1e3


def _ledger(layout: Layout, policy: str) -> Ledger:
    return Ledger(layout, arena_bytes=_ARENA_BYTES, boundary_policy=policy)


def _save(ledger: Ledger, prompt: Prompt, owner: str = "save") -> Move | None:
    return ledger.begin_save(
        owner,
        prompt.hashes,
        computed_tokens=prompt.tokens,
        known_tokens=prompt.tokens,
        block_ids=prompt.pages,
    )


def _land(ledger: Ledger, move: Move | None) -> None:
    if move is not None:
        ledger.apply(0, Copied(move.id))
        ledger.apply(0, MoveDone(move.id, np.full(len(move), Outcome.DECLINED, np.uint8)))


def _lookup_ms(ledger: Ledger, prompt: Prompt, known_tokens: int, rounds: int) -> float:
    def look() -> None:
        ledger.lookup("look", prompt.hashes, known_tokens=known_tokens)

    return median_ms(rounds, look, lambda: ledger.release("look"))


def few_tails(layout: Layout, prompt: Prompt) -> tuple[Ledger, int]:
    """A ledger with all full blocks of the prompt, but tails at its first and last boundary alone.

    And how many tokens a prompt knows that may not end at the last.
    """
    ledger, step = _ledger(layout, "end"), layout.alignment_tokens
    for owner, tokens in (("first", step + 1), ("all", prompt.tokens)):
        move = ledger.begin_save(
            owner,
            prompt.hashes,
            computed_tokens=tokens,
            known_tokens=tokens,
            block_ids=prompt.pages,
        )
        _land(ledger, move)
    return ledger, (prompt.tokens - 1) // step * step


def _decode_ms(layout: Layout, policy: str, prompt: Prompt, rounds: int) -> float:
    per_step = []
    for _ in range(rounds):
        ledger = _ledger(layout, policy)
        _land(ledger, _save(ledger, prompt))
        start = time.perf_counter()
        for n in range(prompt.tokens + 1, prompt.tokens + 1 + _STEPS):
            ledger.begin_save(
                "save",
                prompt.all_hashes,
                computed_tokens=n,
                known_tokens=n,
                block_ids=prompt.pages,
            )
        per_step.append((time.perf_counter() - start) / _STEPS)
    return statistics.median(per_step) * 1e3


def measure(layout: Layout, policy: str, tokens: int, rounds: int) -> dict[str, float]:
    """All figures for one length, in milliseconds; see the module."""
    prompt = Prompt(layout, tokens)
    kept = _ledger(layout, policy)
    _land(kept, _save(kept, prompt))
    parsed, empty = reach.Policy.parse(policy), Index(len(layout.groups))
    fresh = [_ledger(layout, policy)]
    few, known = few_tails(layout, prompt)

    def plan() -> None:
        planner.plan_save(
            empty,
            layout,
            parsed,
            prompt.hashes,
            planner.SaveProgress(),
            computed_tokens=tokens,
            known_tokens=tokens,
            block_ids=prompt.pages,
        )

    return {
        "lookup": _lookup_ms(kept, prompt, tokens, rounds),
        "lookup_few_tails": _lookup_ms(few, prompt, known, rounds),
        "lookup_miss": _lookup_ms(_ledger(layout, policy), prompt, tokens, rounds),
        "plan": median_ms(rounds, plan),
        "save": median_ms(
            rounds,
            lambda: _save(fresh[0], prompt),
            lambda: fresh.__setitem__(0, _ledger(layout, policy)),
        ),
        "decode_step": _decode_ms(layout, policy, prompt, min(rounds, 10)),
    }


def table(answer: dict[str, Any]) -> str:
    """The answer for people."""
    names = list(GOALS_MS) + [n for n in ("lookup_miss", "save") if n not in GOALS_MS]
    lines = [f"{answer['model']}, policy {answer['policy']}: milliseconds, medians"]
    lines.append("tokens".rjust(10) + "".join(n.rjust(18) for n in names))
    for point in answer["growth"]:
        lines.append(f"{point['tokens']:>10,}" + "".join(f"{point[n]:18.4f}" for n in names))
    lines.append("goals".rjust(10) + "".join(str(GOALS_MS.get(n, "")).rjust(18) for n in names))
    return "\n".join(lines)


def main() -> None:
    """Measure, print, draw, check."""
    parser = argparse.ArgumentParser(prog="bench.planner", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="dsv4-flash")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--png", type=Path, help="draw the growth")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    layout = load_preset(args.model)
    growth = [
        {"tokens": n} | measure(layout, args.policy, n, args.rounds) for n in sorted(args.tokens)
    ]
    largest = growth[-1]
    met = {name: largest[name] <= goal for name, goal in GOALS_MS.items()}
    answer = {
        "model": args.model,
        "policy": args.policy,
        "rounds": args.rounds,
        "growth": growth,
        "goals_ms": GOALS_MS,
        "met": met,
        "python": platform.python_version(),
    }
    if args.png:
        from bench.plots import draw_growth

        series = {n: [(p["tokens"], p[n]) for p in growth] for n in (*GOALS_MS, "save")}
        draw_growth(args.png, f"{args.model}, policy {args.policy}", series)
    print(json.dumps(answer) if args.json else table(answer))
    if args.check and not all(met.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
