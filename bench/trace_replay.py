"""What a boundary policy is worth: a trace of prompts through the planner and the ledger.

``python -m bench.trace_replay --policy auto`` replays a public trace for one model and one policy
and prints the hit tokens, those lost against `dense`, and the bytes stored per token. With
``--capacity-gib`` the real ledger evicts from an arena of that size, and Belady's rule (the block
that is needed last goes first) says what hindsight would have done. ``--png`` draws the trade-off
of many policies.

``--capacity 5%,10%,20%,50%`` leaves the model and the planner out and compares what leaves a full
tier of that share of the trace's footprint, block by block and by whole segments: see
`bench.eviction`, whose `compare` says what ``--json`` prints then.

Else ``--json`` prints one object:

hit_tokens: of all prompts together, within the capacity if there is one.
dense_hit_tokens: the same where everything is kept for ever.
bytes_per_token: stored_bytes per token that could be reused, each counted once however many prompts
    share it: the tokens of the trace's distinct whole blocks.
stored_bytes: what the policy stores where nothing is evicted.
halves: the same for each half of the trace, the second with what the first left behind.
belady_hit_tokens: of the same stored blocks with the same capacity.

An engine is assumed that takes recurrent states at every boundary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import eviction
from bench.belady import belady_hits
from bench.traces import Names, Trace, find_trace, read_trace, synthetic_trace
from tierkv import planner, reach
from tierkv.blocks import Copied, MoveDone, Outcome
from tierkv.index import Index, Rows, Tier
from tierkv.layout import Layout
from tierkv.ledger import Ledger
from tierkv.presets import load_preset

EVICTION = "least recently used prompt first, its end first"
POLICIES = ("dense", "interval:1024", "interval:4096", "end", "auto:16384", "auto:8192", "auto")


class Pages(Sequence["int | None"]):
    """An engine's pages while a prompt is computed: one a block from `first` on, none below."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end = first, end

    def __len__(self) -> int:
        return self._end

    def __getitem__(self, block: Any) -> Any:
        if isinstance(block, slice):
            return [self[b] for b in range(*block.indices(self._end))]
        return block if block >= self._first else None


def pages_after(layout: Layout, hit_tokens: int, known_tokens: int) -> list[Pages]:
    """Page tables of a prompt whose beginning was loaded: windows that moved on have no pages."""
    tables = []
    for g, group in enumerate(layout.groups):
        first = reach.load_range(layout, g, hit_tokens)[0] if hit_tokens else 0
        tables.append(Pages(first, known_tokens // group.block_tokens))
    return tables


class Everything:
    """A view (`tierkv.reach.View`) in which all of a prompt's first tokens are there."""

    def __init__(self, layout: Layout, tokens: int) -> None:
        self._layout, self._tokens = layout, tokens

    def first_missing(self, group: int, first: int, end: int) -> int:
        there = self._tokens // self._layout.groups[group].block_tokens
        return max(first, min(end, there))

    def last_ends(self, groups: Sequence[int], low: int, high: int) -> int:
        step = self._layout.alignment_tokens
        boundary = min(high, self._tokens) // step * step
        return boundary if boundary > low else 0


def dense_hits(layout: Layout, trace: Trace) -> Iterator[tuple[int, int]]:
    """Per prompt: its hit where everything earlier is kept, and its tokens nobody had before."""
    known: set[int] = set()
    for prompt in trace.prompts:
        shared = next((i for i, b in enumerate(prompt.ids) if b not in known), len(prompt.ids))
        view = Everything(layout, shared * trace.block_tokens)
        hit = reach.longest_hit(layout, trace.known_tokens(prompt), view)
        yield hit, (len(prompt.ids) - shared) * trace.block_tokens
        known.update(prompt.ids)


@dataclass(slots=True)
class Unbounded:
    """What happens where nothing is ever evicted.

    hits, stored: per prompt, tokens and bytes. loaded, kept: per prompt, rows of `index`.
    """

    index: Index
    hits: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    loaded: list[Rows] = field(default_factory=list)
    kept: list[Rows] = field(default_factory=list)


def replay_unbounded(layout: Layout, policy: reach.Policy, trace: Trace) -> Unbounded:
    """Every prompt in turn through the planner; what it wants saved is there at once."""
    done = Unbounded(Index(len(layout.groups)))
    index, sizes = done.index, np.array(layout.block_bytes, np.int64)
    for prompt in trace.prompts:
        names = Names(prompt, trace.block_tokens, layout.hash_block_tokens)
        known = trace.known_tokens(prompt)
        hit = planner.plan_hit(index, layout, names, known_tokens=known)
        plan = planner.plan_save(
            index,
            layout,
            policy,
            names,
            planner.SaveProgress(),
            computed_tokens=known,
            known_tokens=known,
            block_ids=pages_after(layout, hit.tokens, known),
        )
        rows = index.add_many(plan.wanted.groups, plan.names)
        index.tier[rows] = Tier.RESIDENT
        done.hits.append(hit.tokens)
        done.stored.append(int(sizes[plan.wanted.groups].sum()))
        done.loaded.append(hit.rows)
        done.kept.append(np.concatenate([plan.kept_rows, rows]))
    return done


def replay_ledger(
    layout: Layout, policy: reach.Policy, trace: Trace, capacity_bytes: int
) -> list[int]:
    """Hit tokens of every prompt in turn through a real ledger whose arena is all there is."""
    ledger = Ledger(
        layout,
        arena_bytes=capacity_bytes // 4096 * 4096,
        boundary_policy=policy,
        reserve=0.0,
        clock=lambda: 0.0,
    )
    hits = []
    for n, prompt in enumerate(trace.prompts):
        owner, known = str(n), trace.known_tokens(prompt)
        names = Names(prompt, trace.block_tokens, layout.hash_block_tokens)
        hit = ledger.lookup(owner, names, known_tokens=known).tokens
        hits.append(hit)
        if hit:
            move = ledger.begin_load(owner, pages_after(layout, 0, known))
            ledger.apply(0, MoveDone(move.id, np.zeros(len(move), np.uint8)))
        save = ledger.begin_save(
            owner,
            names,
            computed_tokens=known,
            known_tokens=known,
            block_ids=pages_after(layout, hit, known),
        )
        if save is not None:
            ledger.apply(0, Copied(save.id))
            no_tier = np.full(len(save), Outcome.DECLINED, np.uint8)
            ledger.apply(0, MoveDone(save.id, no_tier))
        ledger.release(owner)
    return hits


def replay(
    layout: Layout, policy: reach.Policy, trace: Trace, *, capacity_bytes: int = 0
) -> dict[str, Any]:
    """The numbers of one run; see the module."""
    run = replay_unbounded(layout, policy, trace)
    dense, fresh = map(list, zip(*dense_hits(layout, trace), strict=True))
    hits = run.hits
    out: dict[str, Any] = {"policy": str(policy)}
    if capacity_bytes:
        hits = replay_ledger(layout, policy, trace, capacity_bytes)
        best = belady_hits(layout, trace, run.index, run.loaded, run.kept, capacity_bytes)
        out |= {
            "capacity_bytes": capacity_bytes,
            "eviction": EVICTION,
            "belady_hit_tokens": sum(best),
            "unbounded_hit_tokens": sum(run.hits),
        }
    half = len(trace.prompts) // 2
    columns = (hits, dense, [p.tokens for p in trace.prompts], fresh, run.stored)
    names = ("hit_tokens", "dense_hit_tokens", "prompt_tokens", "reusable_tokens", "stored_bytes")
    halves = []
    for part in (slice(None), slice(half), slice(half, None)):
        sums = {name: sum(c[part]) for name, c in zip(names, columns, strict=True)}
        sums["bytes_per_token"] = sums["stored_bytes"] / max(1, sums["reusable_tokens"])
        sums["hit_fraction_of_dense"] = sums["hit_tokens"] / max(1, sums["dense_hit_tokens"])
        halves.append(sums)
    return out | halves[0] | {"prompts": len(trace.prompts), "halves": halves[1:]}


def table(answer: dict[str, Any]) -> str:
    """The answer for people."""
    lines = [
        f"{answer['model']}, policy {answer['policy']}, trace {answer['trace']}: "
        f"{answer['prompts']:,} prompts, {answer['prompt_tokens']:,} tokens"
    ]
    for name, part in zip(
        ("all", "first half", "second half"), (answer, *answer["halves"]), strict=True
    ):
        lost = part["dense_hit_tokens"] - part["hit_tokens"]
        lines.append(
            f"{name:>12}: hit {part['hit_tokens']:,} tokens "
            f"({part['hit_tokens'] / max(1, part['prompt_tokens']):.1%} of all, "
            f"{part['hit_fraction_of_dense']:.2%} of dense: {lost:,} lost), "
            f"{part['bytes_per_token'] / 1024:.2f} KiB per token"
        )
    if "capacity_bytes" in answer:
        lines.append(
            f"  at {answer['capacity_bytes'] / 2**30:.0f} GiB ({answer['eviction']}); with "
            f"hindsight {answer['belady_hit_tokens']:,}, "
            f"without a limit {answer['unbounded_hit_tokens']:,}"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.trace_replay", description=__doc__.split("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, help="a trace (JSON lines)")
    parser.add_argument("--model", default="dsv4-flash")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--synthetic", action="store_true", help="a made-up trace that branches")
    parser.add_argument("--seed", type=int, default=1, help="of the synthetic trace")
    parser.add_argument("--limit", type=int, default=0, help="only the first prompts")
    parser.add_argument("--block-tokens", type=int, default=0, help="tokens per id of the trace")
    parser.add_argument("--capacity-gib", type=float, default=0.0)
    parser.add_argument(
        "--capacity",
        type=_shares,
        help="compare evictions at these shares of the trace's footprint: 5%%,10%%,20%%,50%%",
    )
    parser.add_argument("--png", type=Path, help="draw the trade-off of several policies")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _shares(text: str) -> list[float]:
    """`5%,10%` as shares of one."""
    try:
        shares = [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r}: write percentages up to 100, as in 5%,10%,50%")
    return shares


def _evict(args: argparse.Namespace) -> None:
    """`--capacity`: print, draw."""
    trace = _trace(args)
    answer = {"trace": trace.name} | eviction.compare(trace, args.capacity)
    if args.png:
        from bench.plots import draw_eviction

        draw_eviction(args.png, trace.name, answer["sizes"])
    print(json.dumps(answer) if args.json else eviction.table(answer))


def _trace(args: argparse.Namespace) -> Trace:
    if args.synthetic:
        return synthetic_trace(seed=args.seed, prompts=args.limit or 2000)
    path = args.trace or find_trace()
    if path is None:
        sys.exit("bench.trace_replay: no trace was found; name one, or write --synthetic")
    try:
        return read_trace(path, block_tokens=args.block_tokens, limit=args.limit)
    except (OSError, ValueError) as exc:
        sys.exit(f"bench.trace_replay: {exc}")


def main() -> None:
    """Replay, print, draw."""
    args = _arguments()
    if args.capacity:
        _evict(args)
        return
    layout, policy, trace = load_preset(args.model), reach.Policy.parse(args.policy), _trace(args)
    capacity = int(args.capacity_gib * 2**30)
    answer = {"model": args.model, "trace": trace.name}
    answer |= replay(layout, policy, trace, capacity_bytes=capacity)
    if args.png:
        from bench.plots import draw_tradeoff

        texts = dict.fromkeys([*POLICIES, str(policy)])
        runs = [replay(layout, reach.Policy.parse(p), trace) for p in texts]
        draw_tradeoff(args.png, f"{args.model}, {trace.name}", runs)
    print(json.dumps(answer) if args.json else table(answer))


if __name__ == "__main__":
    main()
