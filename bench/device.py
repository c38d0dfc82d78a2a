"""The copies between pages and the arena against `memcpy`, side by side, on a CPU.

``python -m bench.device`` copies packed DeepSeek-V4 blocks (one group of `--block-kib` per block,
padded pages, random block ids) into arena slots and back, through `tierkv.copier.Copier` as the
cache and the vLLM connector do. Every round times one `memcpy` of the same bytes right before and
right after each copy; a ratio is the copy's rate over the mean of the two. Values are medians.

It also times what saving costs the thread that asks: `Cache.save` of `--blocks` blocks, on the
event loop's thread, in its own CPU time, without what the copying thread does. Chains are made
before, as a program makes them once per prompt; the time includes planning.

Goals: 0.6 of memcpy's rate for slots side by side, which is how a batch gets them as long as a hole
holds it; 0.3 ms per 64 blocks. ``--check`` exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
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


def packed(block_bytes: int, blocks: int) -> tuple[Layout, dict[str, list[torch.Tensor]]]:
    """One group of a packed layout: its layers side by side in every block, then padding."""
    group = Group(name="packed", kind=GroupKind.FULL, block_tokens=256, block_bytes=block_bytes)
    stride = round(block_bytes * PADDING / 64) * 64
    pool = torch.randint(0, 256, (blocks, stride), dtype=torch.uint8)
    layers = [pool[:, n : n + block_bytes // 8] for n in range(0, block_bytes, block_bytes // 8)]
    return Layout((group,)), {"packed": layers}


def seconds(act: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def copies(block_bytes: int, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Rates of saves and loads, each with neighbors and with scattered slots."""
    n, slot = nbytes // block_bytes, slot_bytes(block_bytes)
    layout, tensors = packed(block_bytes, 2 * n)
    pages, rng = Pages(layout, tensors), np.random.default_rng(0)
    groups = np.zeros(n, np.uint16)
    with Arena.create(2 * n * slot, prefault=True) as arena:
        copier = Copier(arena_tensor(arena.view), CpuDevice())
        source, target = (torch.zeros(n * block_bytes, dtype=torch.uint8) for _ in range(2))
        source.random_()

        def memcpy() -> None:
            np.copyto(target.numpy(), source.numpy())

        after = copier.mark()

        def timed(launch: Callable[..., object], offsets: np.ndarray[Any, Any]) -> list[float]:
            ids = rng.permutation(2 * n)[:n].astype(np.int32)
            before = seconds(memcpy)
            took = seconds(lambda: launch(pages, groups, ids, offsets, after=after))
            return [took, (before + seconds(memcpy)) / 2]

        where = {"neighbors": np.arange(n) * slot, "scattered": np.arange(n) * 2 * slot}
        cases = [(p, op) for p in PLACES for op in ("save", "load")]
        launches = {"save": copier.save, "load": copier.load}
        samples: dict[tuple[str, str], list[list[float]]] = {c: [] for c in cases}
        for turn in range(rounds + 1):
            for place, op in cases:
                sample = timed(launches[op], where[place])
                if turn:  # the first one warms up
                    samples[place, op].append(sample)
        del launches, copier  # they hold the arena's memory
    return [
        {
            "block_bytes": block_bytes,
            "op": op,
            "slots": place,
            "gb_per_s": round(n * block_bytes / statistics.median(t for t, _ in found) / 1e9, 3),
            "memcpy_gb_per_s": round(
                n * block_bytes / statistics.median(m for _, m in found) / 1e9, 3
            ),
            "ratio": round(statistics.median(m / t for t, m in found), 3),
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


def measure(nbytes: int, rounds: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Everything, as JSON."""
    rows = [row for size in sizes for row in copies(size, nbytes, rounds)]
    callers = [asyncio.run(caller(size, 64, rounds)) for size in sizes]
    return {
        "ok": all(r["ratio"] >= RATIO_GOAL for r in rows if r["slots"] == "neighbors")
        and all(c["caller_ms_per_64_blocks"] < CALLER_GOAL_MS for c in callers),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "copies": rows,
        "caller": callers,
    }


def show(found: dict[str, Any]) -> None:
    """The tables for people."""
    print("   block  op    slots      GB/s  memcpy  ratio")
    for r in found["copies"]:
        rates = f"{r['gb_per_s']:6.2f}  {r['memcpy_gb_per_s']:6.2f}  {r['ratio']:5.2f}"
        print(f"{r['block_bytes'] >> 10:4d} KiB  {r['op']:4s}  {r['slots']:9s} {rates}")
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    args = parser.parse_args(argv)
    if args.mib < 4 or args.rounds < 1:
        parser.error("write --mib 4 or more and --rounds 1 or more")
    found = measure(args.mib << 20, args.rounds, tuple(k << 10 for k in BLOCK_KIB))
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0 if found["ok"] or not args.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
