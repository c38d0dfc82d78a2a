"""The disk tier beside what else there is, and beside the disk itself, in one run.

``python -m bench.disk_tier --dir /mnt/kv --block-bytes 64KiB --engines tierkv,vllm-fs,raw``

Every engine moves the same blocks from and to the same arena: writes, cold reads, both at once.
Rounds are interleaved, engine by engine, so that drift of the machine hits all alike; values are
medians of the rounds, latencies those of whole jobs over all rounds. Every block that was read is
compared with what was written. Before the first round each engine fills its share of the disk, so
that space is used again from then on, as it is in a store that has run for a while.

Engines: ``tierkv`` (in process), ``tierkv-nosum`` (without checksums, to see what they cost),
``tierkv-keeper`` (in a process of its own), ``files`` and ``aiofiles`` (a file per block, renamed
into place), ``vllm-fs`` (vLLM's own tier; run this with the interpreter that has vLLM), ``raw``
(the disk's limit for 16 MiB vectored direct I/O), ``raw-2m`` (the same in calls of 2 MiB). Buffered
engines are synced inside the clock.

``--block-bytes`` and ``--jobs`` take lists and are swept. ``--gil-load`` adds a thread that spins
in Python in this process; ``--gil-load both`` measures ``tierkv`` and ``tierkv-keeper`` with and
without it, one right after the other. ``--png`` draws the curves; ``--draw FILE`` draws those of
earlier JSON, and ``--markdown FILE`` prints its table. At the end stands which goals of the tier
were met (`bench.disk_goals`). Whatever stands still is ended and named (`bench.watchdog`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from rich.progress import Progress

from bench import disk_goals, disk_report
from bench.disk_engines import ENGINES, Engine, Job, Setup
from bench.gil import Spinner
from bench.watchdog import Stalled, Watchdog
from tierkv.blocks import HASH_BYTES
from tierkv.pinned import Arena
from tierkv.urls import parse_size

JOB_BYTES: Final = 16 << 20
JOB_BLOCKS: Final = 1024
SET_BYTES: Final = 256 << 20
SET_BLOCKS: Final = 8192
"""Bounds of jobs and sets: a file per 4 KiB block would take minutes a round."""
KINDS: Final = ("write", "read", "mixed")
ON: Final = "on"
BOTH: Final = "both"
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
_SETS_ON_DISK: Final = 3


class Payload:
    """The arena and a copy of what ought to be in it."""

    def __init__(self, arena: Arena, block_bytes: int) -> None:
        self._slots = np.frombuffer(arena.view, np.uint8).reshape(-1, block_bytes)
        self._right = np.frombuffer(os.urandom(1 << 20), np.uint8)
        self._right = np.resize(self._right, self._slots.size).reshape(self._slots.shape)

    def fill(self, set_number: int) -> None:
        """Blocks of a set: no two alike, and none like one of another set."""
        stamps = np.stack([np.arange(len(self._right)), np.full(len(self._right), set_number)], 1)
        self._right[:, :16] = np.ascontiguousarray(stamps, np.int64).view(np.uint8)
        self._slots[:] = self._right

    def wipe(self, first: int = 0) -> None:
        """Zero the slots from `first` on, so that only a real read makes them right."""
        self._slots[first:] = 0

    def wrong(self, first: int = 0) -> int:
        """How many blocks from `first` on are not what they ought to be."""
        return int((self._slots[first:] != self._right[first:]).any(axis=1).sum())


@dataclass(slots=True)
class Samples:
    """What one engine showed. Lists have an entry a round, but for `job_s`: one a job."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    job_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lookups_per_s: list[float] = field(default_factory=list)
    wrong_blocks: int = 0
    modes: dict[str, str] = field(default_factory=dict)

    def summary(self, setup: Setup) -> dict[str, Any]:
        """The JSON of one engine."""
        gb = setup.blocks * setup.block_bytes / 1e9
        kinds = {}
        for kind in KINDS:
            seconds, cpu_s = (statistics.median(s[kind]) for s in (self.seconds, self.cpu_s))
            p50_s, p99_s = np.percentile(self.job_s[kind], (50, 99))
            kinds[kind] = {
                "gb_per_s": round(gb / seconds, 3),
                "blocks_per_s": round(setup.blocks / seconds),
                "cpu_s_per_gb": round(cpu_s / gb, 4),
                "p50_ms": round(p50_s * 1e3, 3),
                "p99_ms": round(p99_s * 1e3, 3),
                "seconds": [round(s, 5) for s in self.seconds[kind]],
                "cpu_s": [round(s, 5) for s in self.cpu_s[kind]],
            }
        return {
            **kinds,
            "lookups_per_s": round(statistics.median(self.lookups_per_s)),
            "wrong_blocks": self.wrong_blocks,
            "modes": self.modes,
        }


class Lap:
    """One engine at one block size, round after round.

    samples: what it showed by the number of jobs side by side, and whether a thread was spinning.
    """

    def __init__(self, engine: Engine, payload: Payload, watchdog: Watchdog) -> None:
        self.engine = engine
        self.samples: dict[tuple[int, bool], Samples] = defaultdict(Samples)
        self._payload = payload
        self._watchdog = watchdog
        self._sets: list[bytes] = []
        self._count = 0
        self._per_job = min(max(JOB_BYTES // engine.setup.block_bytes, 1), JOB_BLOCKS)

    async def fill_disk(self) -> None:
        """Write until old sets have to go."""
        self._payload.fill(0)
        setup, nothing = self.engine.setup, Samples()
        for _ in range(self.engine.room_bytes // (setup.blocks * setup.block_bytes) + 1):
            jobs = self._jobs(True, self._next_set())
            await self._run(jobs, "write", nothing, setup.jobs, spin=False)

    async def round(self, at_once: int, *, spin: bool, drop: bool) -> None:
        """Write a set, read it back, then read half of it while half of another is written."""
        blocks, samples = self.engine.setup.blocks, self.samples[at_once, spin]
        run = partial(self._run, samples=samples, at_once=at_once, spin=spin)
        hashes = self._next_set()
        self._payload.fill(self._count)
        await run(self._jobs(True, hashes), "write")
        self.engine.stored(hashes)
        self._payload.wipe()
        if drop:
            await asyncio.to_thread(drop_page_cache_sync)
        await run(self._jobs(False, hashes), "read")
        samples.wrong_blocks += self._payload.wrong()
        await self._look_up(hashes, samples)
        half = blocks // 2
        if drop:
            await asyncio.to_thread(drop_page_cache_sync)
        self._payload.wipe(half)
        loads = [job for job in self._jobs(False, hashes) if job.first >= half]
        saves = [job for job in self._jobs(True, self._next_set()) if job.first < half]
        both = [job for pair in zip(loads, saves, strict=False) for job in pair]
        await run([*both, *loads[len(saves) :], *saves[len(loads) :]], "mixed")
        samples.wrong_blocks += self._payload.wrong(half)
        samples.modes = self.engine.modes()

    def _next_set(self) -> bytes:
        self._count += 1
        self._sets.append(os.urandom(self.engine.setup.blocks * HASH_BYTES))
        if len(self._sets) > self.engine.setup.sets:
            self.engine.forget(self._sets.pop(0))
        return self._sets[-1]

    def _jobs(self, save: bool, hashes: bytes) -> list[Job]:
        """Jobs for a whole set. A cut in the middle lets `mixed` split it."""
        number = self._count
        half = self.engine.setup.blocks // 2
        edges = sorted({*range(0, half, self._per_job), *range(half, 2 * half, self._per_job)})
        step = HASH_BYTES
        return [
            Job(save, number, a, hashes[a * step : b * step])
            for a, b in zip(edges, [*edges[1:], 2 * half], strict=True)
        ]

    async def _run(
        self, jobs: Sequence[Job], kind: str, samples: Samples, at_once: int, *, spin: bool
    ) -> None:
        """All jobs, so many at a time, with clocks around."""
        left = iter(jobs)
        what = f"{self._what}, {at_once} jobs side by side: a {{}} of {{}} blocks"

        async def work() -> None:
            for job in left:
                began = time.perf_counter()
                name = what.format("save" if job.save else "load", job.count)
                async with self._watchdog.limited(name):
                    await self.engine.move(job)
                samples.job_s[kind].append(time.perf_counter() - began)

        spinner = Spinner() if spin else None
        with spinner or contextlib.nullcontext(), self.engine.measured():
            spun_s = spinner.cpu_s() if spinner else 0.0
            cpu_s, began = self.engine.cpu_s(), time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work())
            if self.engine.buffered and kind != "read":
                await asyncio.to_thread(os.sync)
            seconds = time.perf_counter() - began
            cpu_s = self.engine.cpu_s() - cpu_s
            cpu_s -= spinner.cpu_s() - spun_s if spinner else 0.0
        samples.seconds[kind].append(seconds)
        samples.cpu_s[kind].append(cpu_s)

    async def _look_up(self, hashes: bytes, samples: Samples) -> None:
        began = time.perf_counter()
        async with self._watchdog.limited(f"{self._what}: a lookup"):
            found = await self.engine.find(hashes)
        seconds = time.perf_counter() - began
        samples.lookups_per_s.append(found / seconds)

    @property
    def _what(self) -> str:
        return f"{self.engine.name}, {self.engine.setup.block_bytes >> 10} KiB blocks"


def drop_page_cache_sync() -> None:
    """Have the kernel forget clean file pages and what it knows of files; others' as well."""
    _DROP_CACHES.write_text("3")


def engine_class(name: str) -> type[Engine]:
    """The engine called `name`; vLLM is imported only where it is asked for."""
    if name == "vllm-fs":
        from bench.vllm_fs import VllmFsEngine

        return VllmFsEngine
    return ENGINES[name]


async def measure(
    args: argparse.Namespace, folder: Path, block_bytes: int, progress: Progress
) -> list[dict[str, Any]]:
    """All engines at one block size, with every number of jobs side by side."""
    blocks = (args.blocks or min(max(SET_BYTES // block_bytes, 2), SET_BLOCKS)) // 2 * 2
    jobs = args.jobs if args.jobs_at in (None, block_bytes) else args.jobs[:1]
    plan = _plan(args, jobs)
    total = args.rounds * sum(map(len, plan))
    task = progress.add_task(f"{block_bytes >> 10} KiB", total=total)
    async with Watchdog() as watchdog, contextlib.AsyncExitStack() as stack:
        arena = stack.enter_context(Arena.create(blocks * block_bytes, prefault=True))
        payload = Payload(arena, block_bytes)
        laps = {}
        for name in args.engines:
            progress.update(task, description=f"{block_bytes >> 10} KiB: filling, {name}")
            directory = folder / f"{name}-{block_bytes}"
            directory.mkdir()
            stack.callback(shutil.rmtree, directory)
            setup = Setup(directory, arena, block_bytes, blocks, max(jobs), _SETS_ON_DISK)
            engine = engine_class(name)(setup)
            async with watchdog.limited(f"{name}: opening"):
                await engine.open()
            stack.push_async_callback(_close, engine, watchdog)
            laps[name] = Lap(engine, payload, watchdog)
            await laps[name].fill_disk()
        for number in range(args.rounds):
            for name, at_once, spin in _turned(plan, number):
                progress.update(task, description=f"{block_bytes >> 10} KiB: {name}")
                await laps[name].round(at_once, spin=spin, drop=args.drop)
                progress.advance(task)
    return [_run_of(laps.values(), block_bytes, blocks, n, args.gil_load) for n in jobs]


async def _close(engine: Engine, watchdog: Watchdog) -> None:
    async with watchdog.limited(f"{engine.name}: closing"):
        await engine.close()


Turn = tuple[str, int, bool]
"""An engine, jobs side by side, beside a spinning thread or not."""


def _plan(args: argparse.Namespace, jobs: Sequence[int]) -> list[list[Turn]]:
    """What a round consists of. What belongs together comes one right after the other."""
    plan = []
    for at_once in jobs:
        for name in args.engines:
            twice = args.gil_load == BOTH and at_once == jobs[0] and engine_class(name).beside_load
            spins = (False, True) if twice else (args.gil_load == ON,)
            plan.append([(name, at_once, spin) for spin in spins])
    return plan


def _turned(plan: list[list[Turn]], number: int) -> list[Turn]:
    """Every round begins elsewhere, and every other one goes backwards."""
    start = number * len(plan) // 3 % len(plan)
    turned = [turn for together in plan[start:] + plan[:start] for turn in together]
    return turned[::-1] if number % 2 else turned


def _run_of(
    laps: Iterable[Lap], block_bytes: int, blocks: int, at_once: int, gil_load: str
) -> dict[str, Any]:
    """The JSON of one block size with one number of jobs."""

    def engines(spin: bool) -> dict[str, Any]:
        told = {lap.engine.name: (lap, lap.samples.get((at_once, spin))) for lap in laps}
        return {name: s.summary(lap.engine.setup) for name, (lap, s) in told.items() if s}

    run: dict[str, Any] = {"block_bytes": block_bytes, "jobs": at_once, "blocks": blocks}
    run["engines"] = engines(gil_load == ON)
    if gil_load == BOTH and (beside := engines(True)):
        run["beside_load"] = beside
    return run


def _sizes(text: str) -> list[int]:
    return [parse_size(size, "--block-bytes") for size in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options, with lists split and defaults filled in."""
    parser = argparse.ArgumentParser(prog="bench.disk_tier", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where to write")
    parser.add_argument("--block-bytes", type=_sizes, default="64KiB", help="like 64KiB,1MiB")
    parser.add_argument("--blocks", type=int, help="per set (default: 256 MiB, 8192 at most)")
    parser.add_argument("--jobs", default="8", help="moves side by side, like 8,1,16")
    parser.add_argument(
        "--jobs-at",
        type=partial(parse_size, what="--jobs-at"),
        help="the block size at which all of --jobs are tried, at others only its first",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", help="like tierkv,raw (default: all that are installed)")
    parser.add_argument(
        "--gil-load", nargs="?", choices=(ON, BOTH), const=ON, help="beside a thread that spins"
    )
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="write the JSON to this file as well")
    parser.add_argument("--png", type=Path, help="draw the curves over block sizes")
    parser.add_argument("--draw", type=Path, help="measure nothing: draw this JSON file to --png")
    parser.add_argument("--markdown", type=Path, help="measure nothing: print README's table of it")
    args = parser.parse_args(argv)
    known = [*ENGINES, *(["vllm-fs"] if find_spec("vllm") else [])]
    args.engines = args.engines.split(",") if args.engines else known
    if unknown := [name for name in args.engines if name not in known]:
        parser.error(f"not an engine here: {', '.join(unknown)}; write some of {', '.join(known)}")
    args.jobs = [int(n) for n in args.jobs.split(",")]
    args.command = _command(sys.argv[1:] if argv is None else argv)
    args.drop = not args.warm and os.access(_DROP_CACHES, os.W_OK)
    return args


def _command(argv: Sequence[str]) -> str:
    """What to type to measure the same: without what says where, and in what form it is told."""
    silent = {"--dir", "--out", "--png", "--json"}
    words, skip = ["python -m bench.disk_tier"], False
    for word in argv:
        if skip:
            skip = False
        elif word.partition("=")[0] in silent:
            skip = "=" not in word and word != "--json"
        else:
            words.append(word)
    return " ".join(words)


async def run(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Every block size with every number of jobs."""
    with Progress(console=disk_report.stderr(), transient=True) as progress:
        runs = [await measure(args, folder, size, progress) for size in args.block_bytes]
    return [one for of_size in runs for one in of_size]


def _report(
    args: argparse.Namespace, runs: list[dict[str, Any]], machine: dict[str, Any]
) -> dict[str, Any]:
    report = {
        # One run is the usual case, so its engines stand at the top as well.
        "engines": runs[0]["engines"],
        "runs": runs,
        "rounds": args.rounds,
        "job_bytes": JOB_BYTES,
        "gil_load": args.gil_load,
        "page_cache_dropped": args.drop,
        "command": args.command,
        "machine": machine,
    }
    report["verdict"] = disk_goals.verdict(report)
    return report


def _stalled(exc: BaseException) -> str | None:
    """What stood still, if that is what ended the run."""
    if isinstance(exc, ExceptionGroup):
        return next(filter(None, map(_stalled, exc.exceptions)), None)
    return str(exc) if isinstance(exc, Stalled) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, draw. Exit status 1: a block was read wrong; 2: an engine stood still."""
    args = parse(argv)
    if args.draw:
        disk_report.draw(json.loads(args.draw.read_text()), args.png)
        return 0
    if args.markdown:
        print(disk_report.markdown(json.loads(args.markdown.read_text())))
        return 0
    try:
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="tierkv-bench-") as folder:
            machine = disk_report.machine(Path(folder))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runs = runner.run(run(args, Path(folder)))
    except (Stalled, ExceptionGroup) as exc:
        if (line := _stalled(exc)) is None:
            raise
        print(f"disk_tier: stopped: {line}", file=sys.stderr)
        return 2
    report = _report(args, runs, machine)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
    else:
        disk_report.show(report)
        disk_report.show_verdict(report["verdict"])
    if args.png:
        disk_report.draw(report, args.png)
    parts = (run.get(part, {}) for run in runs for part in ("engines", "beside_load"))
    wrong = sum(engine["wrong_blocks"] for part in parts for engine in part.values())
    if wrong:
        print(f"{wrong} blocks were read wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
