"""The copies between pages and the arena against plain ones of the same bytes, on a CPU.

``python -m bench.device --out bench/results/device.json`` copies packed DeepSeek-V4 blocks (padded
pages, random block ids) into arena slots and back, through `tierkv.copier.Copier` as the cache and
the vLLM connector do: into slots side by side, as a batch gets them as long as a hole of
the arena holds it, and into slots that each lie alone, as an old arena may give them. Everything
runs on one thread. Every round times two plain copies right before and right after each of ours;
a ratio is our rate over the mean of the two. Values are medians of interleaved rounds.

memcpy  `numpy.copyto` of as many bytes in one piece.
twin    one call of torch's `copy_` of as many bytes in the same pattern on the arena's side: in one
        piece for neighbors, with a gap behind every block for scattered slots.

What limits ours: memory, and for 64 KiB some 0.7 µs a block in Python, beside 10 to 15 µs for its
bytes. Pages come in random order, so the twin has the easier half: its source is one piece. Blocks
made of many short pages (below `tierkv.runs.STRIP_BYTES` a comb) are copied by indexed copies of
torch instead, and into scattered slots twice, through a buffer that stays in a cache; `--layers`
shows them: as many tensors of their own, with one page of the block in each.

It also times what saving costs the thread that asks: `Cache.save` of `--blocks` blocks, on the
event loop's thread, in its own CPU time, without what the copying thread does. Chains are made
before, as a program makes them once per prompt; the time includes planning.

Goals: 0.6 of memcpy's rate for both kinds of slots; 0.3 ms per 64 blocks. ``--check`` exits with 1
where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierkv
from tierkv.blocks import slot_bytes
from tierkv.copier import Copier
from tierkv.device import Pages, arena_tensor
from tierkv.layout import Group, GroupKind, Layout
from tierkv.pinned import Arena
from tierkv.streams import CpuDevice

BLOCK_KIB = (64, 1024)
ROUNDS = 15
RATIO_GOAL = 0.6
CALLER_GOAL_MS = 0.3
PADDING = 1_002_240 / 985_664
"""Padded page bytes over real ones of DeepSeek-V4-Flash (tierkv/data/dsv4-flash.json)."""

PLACES = ("neighbors", "scattered")
"""Slots side by side, as a fresh arena gives them, or each alone, as an old one may."""


def packed(
    block_bytes: int, blocks: int, apart: int = 0
) -> tuple[Layout, dict[str, list[torch.Tensor]]]:
    """One group of a packed layout: its layers side by side in every block, then padding.

    apart: as many tensors of their own instead, one a layer.
    """
    group = Group(name="packed", kind=GroupKind.FULL, block_tokens=256, block_bytes=block_bytes)
    if apart:
        shape = (blocks, block_bytes // apart)
        made = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(apart)]
        return Layout((group,)), {"packed": made}
    stride = round(block_bytes * PADDING / 64) * 64
    pool = torch.randint(0, 256, (blocks, stride), dtype=torch.uint8)
    layers = [pool[:, n : n + block_bytes // 8] for n in range(0, block_bytes, block_bytes // 8)]
    return Layout((group,)), {"packed": layers}


def seconds(act: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Rig:
    """Pages, an arena twice as large as their half, and the plain copies beside them."""

    def __init__(self, block_bytes: int, nbytes: int, apart: int, arena: Arena) -> None:
        self.block_bytes, self.n = block_bytes, nbytes // block_bytes
        layout, tensors = packed(block_bytes, 2 * self.n, apart)
        self.pages, self.rng = Pages(layout, tensors), np.random.default_rng(0)
        self.copier = Copier(arena_tensor(arena.view), CpuDevice())
        self.source = torch.randint(0, 256, (self.n, block_bytes), dtype=torch.uint8)
        self.target = torch.zeros((2 * self.n, block_bytes), dtype=torch.uint8)

    def memcpy(self) -> None:
        """In one piece."""
        np.copyto(self.target[: self.n].numpy(), self.source.numpy())

    def twin(self, place: str) -> None:
        """In the pattern of the slots."""
        scattered = self.target.view(self.n, 2, self.block_bytes)[:, 0]
        (self.target[: self.n] if place == "neighbors" else scattered).copy_(self.source)

    def copy(self, op: str, place: str) -> Callable[[], object]:
        """Ours, of other blocks each time."""
        launch = self.copier.save if op == "save" else self.copier.load
        step = slot_bytes(self.block_bytes) * (1 if place == "neighbors" else 2)
        offsets = np.arange(self.n) * step
        ids = self.rng.permutation(2 * self.n)[: self.n].astype(np.int32)
        groups, after = np.zeros(self.n, np.uint16), self.copier.mark()
        return lambda: launch(self.pages, groups, ids, offsets, after=after)

    def sample(self, op: str, place: str) -> tuple[float, float, float]:
        """Seconds: ours, and the means of memcpy and twin around it."""
        plain = [self.memcpy, lambda: self.twin(place)]
        before = [seconds(act) for act in plain]
        took = seconds(self.copy(op, place))
        memcpy, twin = ((b + seconds(act)) / 2 for b, act in zip(before, plain, strict=True))
        return took, memcpy, twin


def copies(block_bytes: int, nbytes: int, rounds: int, apart: int = 0) -> list[dict[str, Any]]:
    """Rates of saves and loads, each with neighbors and with scattered slots."""
    cases = [(p, op) for p in PLACES for op in ("save", "load")]
    samples: dict[tuple[str, str], list[tuple[float, float, float]]] = {c: [] for c in cases}
    n = nbytes // block_bytes
    with Arena.create(2 * n * slot_bytes(block_bytes), prefault=True) as arena:
        rig = Rig(block_bytes, nbytes, apart, arena)
        for turn in range(rounds + 1):
            for place, op in cases:
                sample = rig.sample(op, place)
                if turn:  # the first one warms up
                    samples[place, op].append(sample)
        del rig  # it holds the arena's memory

    def rate(times: list[float]) -> float:
        return round(n * block_bytes / statistics.median(times) / 1e9, 3)

    return [
        {
            "block_bytes": block_bytes,
            "layers_apart": apart,
            "op": op,
            "slots": place,
            "gb_per_s": rate([t for t, _, _ in found]),
            "memcpy_gb_per_s": rate([m for _, m, _ in found]),
            "twin_gb_per_s": rate([w for _, _, w in found]),
            "ratio": round(statistics.median(m / t for t, m, _ in found), 3),
            "twin_ratio": round(statistics.median(w / t for t, _, w in found), 3),
        }
        for (place, op), found in samples.items()
    ]


async def caller(block_bytes: int, blocks: int, rounds: int) -> dict[str, Any]:
    """What `Cache.save` of so many new blocks takes of the loop's thread, in ms per 64 blocks."""
    layout, tensors = packed(block_bytes, blocks)
    pages = Pages(layout, tensors)
    pinned = (rounds + 3) * blocks * slot_bytes(block_bytes)  # nothing is evicted
    table = {"packed": list(range(blocks))}
    times, planning = [], [0.0]
    async with tierkv.open(
        "", layout=layout, namespace="bench@1", pinned=str(pinned), policy="dense"
    ) as cache:
        begin_save = cache._ledger.begin_save

        def timed(*args: Any, **more: Any) -> Any:
            start = time.thread_time()
            move = begin_save(*args, **more)
            planning[-1] += time.thread_time() - start
            return move

        cache._ledger.begin_save = timed  # type: ignore[method-assign]
        for turn in range(rounds + 1):
            chain = cache.chain([turn + 1] * (blocks * 256))
            planning.append(0.0)
            start = time.thread_time()
            saved = await cache.save(chain, pages, table)
            times.append(time.thread_time() - start)
            if saved.blocks != blocks:
                raise RuntimeError(f"{saved.blocks} of {blocks} blocks were saved")
    scale = 1e3 * 64 / blocks
    return {
        "block_bytes": block_bytes,
        "blocks": blocks,
        "caller_ms_per_64_blocks": round(statistics.median(times[1:]) * scale, 3),
        "of_which_planning_ms": round(statistics.median(planning[2:]) * scale, 3),
        "best_ms_per_64_blocks": round(min(times[1:]) * scale, 3),
    }


def measure(nbytes: int, rounds: int, sizes: tuple[int, ...], apart: int = 0) -> dict[str, Any]:
    """Everything, as JSON."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for size in sizes for row in copies(size, nbytes, rounds, apart)]
        callers = [asyncio.run(caller(size, 64, rounds)) for size in sizes]
    finally:
        torch.set_num_threads(threads)
    return {
        "ok": all(r["ratio"] >= RATIO_GOAL for r in rows)
        and all(c["caller_ms_per_64_blocks"] < CALLER_GOAL_MS for c in callers),
        "cores": os.cpu_count(),
        "threads": 1,
        "copies": rows,
        "caller": callers,
    }


def show(found: dict[str, Any]) -> None:
    """The tables for people."""
    print("   block  op    slots      GB/s  memcpy  ratio   twin  ratio")
    for r in found["copies"]:
        ours = f"{r['gb_per_s']:6.2f}  {r['memcpy_gb_per_s']:6.2f}  {r['ratio']:5.2f}"
        twin = f"{r['twin_gb_per_s']:5.2f}  {r['twin_ratio']:5.2f}"
        print(f"{r['block_bytes'] >> 10:4d} KiB  {r['op']:4s}  {r['slots']:9s} {ours}  {twin}")
    for c in found["caller"]:
        print(
            f"saving 64 blocks of {c['block_bytes'] >> 10} KiB takes "
            f"{c['caller_ms_per_64_blocks']:.2f} ms of the caller's thread, "
            f"{c['of_which_planning_ms']:.2f} of them planning (best {c['best_ms_per_64_blocks']})"
        )
    print("goals reached" if found["ok"] else "a goal is missed")


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status says whether `--check` held."""
    parser = argparse.ArgumentParser(prog="bench.device", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="MiB per copy")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=0, help="layers apart, to be tried beside")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    args = parser.parse_args(argv)
    if args.mib < 4 or args.rounds < 1:
        parser.error("write --mib 4 or more and --rounds 1 or more")
    sizes = tuple(k << 10 for k in BLOCK_KIB)
    if args.layers and any(size % args.layers for size in sizes):
        parser.error("write --layers 16, or another power of two")
    found = measure(args.mib << 20, args.rounds, sizes, args.layers)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0 if found["ok"] or not args.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
