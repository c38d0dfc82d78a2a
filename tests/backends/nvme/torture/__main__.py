"""Torture an nvme store: ``python -m tests.backends.nvme.torture --dir /mnt/disk``.

For each numbered system call of a recorded life of a store (`life.py`), over the backend itself
and over the storage half, a fault is injected or the process is killed; then it goes on, is opened
again, and everything is checked. What counts: no wrong byte, every acknowledged block, the next
open, the quota as seen from outside, no descriptor, thread, slot or lease left, and later saves.

Faults are drawn evenly from all pairs of a call's name and a kind of fault, so the rare ones are
all there. The same numbers draw the same cases. The last line of output is the result; the exit
status is 1 where anything was violated.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.backends.nvme.torture.cases import Bench, Case, faults_of, kills_of

HOMES = ("backend", "storage")


def drawn(cases: Iterable[Case], names: dict[str, list[str]], n: int, seed: int) -> list[Case]:
    """N cases, as many from each pair of call and fault as there are or as it takes."""
    rng = random.Random(seed)
    piles: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in cases:
        name = names[case.home][case.number - 1]
        piles[case.home, name, case.injection, case.code].append(case)
    for pile in piles.values():
        rng.shuffle(pile)
    out: list[Case] = []
    while len(out) < n and piles:
        for pair in list(piles):
            out.append(piles[pair].pop())
            if not piles[pair]:
                del piles[pair]
    rng.shuffle(out)
    return out[:n]


@dataclass
class Result:
    """faults, kills: that took place. stopped: by Ctrl-C or SIGTERM.

    lost: acknowledged blocks that flipped bits and files said to be missing cost.
    """

    faults: int = 0
    kills: int = 0
    violations: list[str] = field(default_factory=list)
    lost: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    stopped: bool = False

    def take(self, case: Case, answer: dict[str, Any]) -> None:
        self.cases += 1
        self.lost += answer.get("lost", 0)
        if answer["hit"]:
            self.faults += not case.is_kill
            self.kills += case.is_kill
            assert case.injection is not None
            self.kinds[case.injection.value] += 1
        for text in answer["violations"]:
            self.violations.append(f"{case} ({answer.get('name', '')}): {text}")
            print(self.violations[-1], flush=True)


def run(cases: Sequence[Case], directory: Path, workers: int, *, quiet: bool) -> Result:
    """Try all cases, in so many processes at a time."""
    result, started = Result(), time.monotonic()
    ways = selectors.DefaultSelector()
    pids = []
    for worker in range(workers):
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            _work(cases[worker::workers], directory / f"worker{worker}", into)
        os.close(into)
        pids.append(pid)
        ways.register(os.fdopen(out, "rb"), selectors.EVENT_READ, cases[worker::workers])
    shown = 0.0
    mine = {key.fd: iter(key.data) for key in ways.get_map().values()}
    while ways.get_map() and not result.stopped:
        for key, _ in _ready(ways, result):
            pipe: Any = key.fileobj
            line = pipe.readline()
            if not line:
                ways.unregister(pipe)
                pipe.close()
                continue
            result.take(next(mine[key.fd]), json.loads(line))
            if time.monotonic() - shown > 1 and not quiet:
                shown = time.monotonic()
                _show(result, len(cases), shown - started)
    for pid in pids:
        if result.stopped:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            continue
        _, status = os.waitpid(pid, 0)
        if status:
            result.violations.append(f"a worker ended with {os.waitstatus_to_exitcode(status)}")
    return result


def _ready(ways: selectors.BaseSelector, result: Result) -> list[Any]:
    try:
        return ways.select()
    except KeyboardInterrupt:
        result.stopped = True
        return []


def _work(cases: Sequence[Case], directory: Path, into: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bench = Bench(directory)
    with os.fdopen(into, "wb", buffering=0) as pipe:
        for case in cases:
            pipe.write(json.dumps(bench.try_sync(case)).encode() + b"\n")
    os._exit(0)


def _show(result: Result, total: int, elapsed_s: float) -> None:
    left_s = elapsed_s / max(result.cases, 1) * (total - result.cases)
    text = (
        f"{result.cases}/{total} cases, {result.faults} faults, {result.kills} kills, "
        f"{len(result.violations)} violations, {left_s:.0f} s to go"
    )
    end = "\r" if sys.stderr.isatty() else "\n"
    print(text.ljust(90), end=end, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=3060, help="faults to draw (default 3060)")
    parser.add_argument("--kills", type=int, default=510, help="kills to draw (default 510)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where, on which disk")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="only cases whose text has this in it")
    parser.add_argument("--json", type=Path, help="write the result there as well")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    for name in ("tierkv", "tierkv_backends"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # faults are what we came for
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    args.dir.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="tierkv-torture-", dir=args.dir))
    started = time.monotonic()
    try:
        names = {home: _trace(home, place) for home in HOMES}
        gc.freeze()  # what children share stays shared
        cases = drawn(
            (c for h in HOMES for c in faults_of(h, names[h])), names, args.faults, args.seed
        )
        cases += drawn(
            (c for h in HOMES for c in kills_of(h, names[h])), names, args.kills, args.seed
        )
        cases = [case for case in cases if args.only in str(case)]
        random.Random(args.seed).shuffle(cases)  # a run that is stopped has some of everything
        result = run(cases, place, args.workers, quiet=args.quiet)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    summary = {
        "faults": result.faults,
        "kills": result.kills,
        "violations": len(result.violations),
        "blocks_lost_to_lies": result.lost,
        "by_kind": dict(result.kinds),
        "calls": {home: len(trace) for home, trace in names.items()},
        "stopped": result.stopped,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(summary))
    if args.json:
        args.json.write_text(json.dumps({**summary, "what": result.violations}, indent=1) + "\n")
    return int(bool(result.violations) or result.stopped)


def _trace(home: str, place: Path) -> list[str]:
    """The names of all calls of a life without faults."""
    answer = Bench(place / "whole").try_sync(Case(home, 0))
    if answer["violations"]:
        raise SystemExit(f"without any fault: {answer['violations']}")
    trace: list[str] = answer["trace"]
    return trace


if __name__ == "__main__":
    sys.exit(main())
