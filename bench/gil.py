"""Which home for the storage half: the busy process itself, or a keeper beside it?

``python -m bench.gil --dir /mnt/kv`` moves the same blocks through the same tier with the mover at
home (`tierkv.local`) and in a keeper (`tierkv.keeper`), idle and beside a thread that spins in
Python, as an engine's worker does. It prints the throughput of both, and what is left of the
spinning thread's own rate. Rounds are interleaved, values are medians.

Goal (two cores): beside the spinning thread the keeper keeps 0.8 of its idle throughput at 2 MiB
extents, and the thread 0.9 of its rate. ``--check`` exits with 1 where that is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tierkv.blocks import (
    HASH_BYTES,
    Appraise,
    Keys,
    MoveDone,
    MoveKind,
    Outcome,
    Retire,
    planned_move,
)
from tierkv.keeper import KeeperClient
from tierkv.local import LocalStorage
from tierkv.pinned import Arena
from tierkv.storage import StorageConfig, StoragePort

BLOCK_BYTES = (2 << 20, 64 << 10)
MOVE_BYTES = 32 << 20
HOMES = ("local", "keeper")
KEEPER_GOAL = 0.8
SPINNER_GOAL = 0.9


class Spinner:
    """A thread that counts in Python; `rate` is counts per second between enter and exit."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._spin, name="spinner")

    def _spin(self) -> None:
        start = time.perf_counter()
        count = 0
        while not self._stop:
            count += 1
        self.rate = count / (time.perf_counter() - start)

    def cpu_s(self) -> float:
        """CPU seconds that the thread took so far; it must be running."""
        ident = self._thread.ident
        return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))

    def __enter__(self) -> Spinner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


class Driver:
    """Submits saves and loads of fresh blocks to a port and waits for all of them."""

    def __init__(self, port: StoragePort, nbytes: int) -> None:
        self._port = port
        self._nbytes = nbytes
        self._changed = asyncio.Event()
        self._move_id = 0
        port.on_event(self._changed.set)

    async def run(self, kind: MoveKind, group: int, hashes: bytes) -> float:
        """GB/s of `nbytes` in moves of `MOVE_BYTES`; the arena's slots are used in turn."""
        per_move = MOVE_BYTES // BLOCK_BYTES[group]
        waiting = set()
        start = time.perf_counter()
        for first in range(0, self._nbytes // BLOCK_BYTES[group], per_move):
            self._move_id += 1
            waiting.add(self._move_id)
            picked = hashes[first * HASH_BYTES : (first + per_move) * HASH_BYTES]
            self._port.submit(
                planned_move(
                    self._move_id,
                    kind,
                    Keys(np.full(per_move, group, np.uint16), picked),
                    offsets=(first + np.arange(per_move, dtype=np.int64)) * BLOCK_BYTES[group],
                    from_tier=np.full(per_move if kind is MoveKind.LOAD else 0, True),
                )
            )
        while waiting:
            self._changed.clear()
            for event in self._port.poll():
                if isinstance(event, Retire):
                    self._port.agree(event.retire_id)
                elif isinstance(event, Appraise):
                    self._port.appraised(event.question_id, np.zeros(len(event.keys), np.bool_))
                elif isinstance(event, MoveDone):
                    waiting.discard(event.move_id)
                    if (event.outcomes != Outcome.DONE).any():
                        raise RuntimeError(f"{kind.name} ended {set(event.outcomes.tolist())}")
            if waiting:
                await self._changed.wait()
        return self._nbytes / (time.perf_counter() - start) / 1e9


@contextlib.asynccontextmanager
async def open_port(home: str, url: str, arena: Arena) -> AsyncIterator[StoragePort]:
    """The storage half in one of its homes."""
    config = StorageConfig(
        url=url,
        namespace=home.encode().ljust(32, b"\0"),
        namespace_text=f"bench {home}",
        arena_bytes=len(arena),
        block_bytes=BLOCK_BYTES,
    )
    if home == "local":
        async with await LocalStorage.open(config, arena) as local:
            yield local
        return
    client = KeeperClient(config, arena)
    try:
        client.wait_open(30)
        yield client
    finally:
        client.close()


Samples = dict[tuple[str, int, str, str], list[float]]


async def one_round(drivers: dict[str, Driver], nbytes: int, samples: Samples) -> None:
    """Every home, size and direction once idle and once beside the spinner."""
    with Spinner() as alone:
        await asyncio.sleep(0.3)
    for group, block_bytes in enumerate(BLOCK_BYTES):
        for home, driver in drivers.items():
            for beside in (False, True):
                hashes = os.urandom(nbytes // block_bytes * HASH_BYTES)
                for kind in (MoveKind.SAVE, MoveKind.LOAD):
                    spinner = Spinner()
                    with spinner if beside else contextlib.nullcontext():
                        rate = await driver.run(kind, group, hashes)
                    key = (home, block_bytes, kind.name.lower())
                    samples[*key, "beside" if beside else "idle"].append(rate)
                    if beside:
                        samples[*key, "spinner"].append(spinner.rate / alone.rate)


async def measure(url_of: dict[str, str], nbytes: int, rounds: int) -> Samples:
    """All samples of all rounds; the first round warms up and is not counted."""
    samples: Samples = defaultdict(list)
    with Arena.create(nbytes, prefault=True) as arena:
        arena.view[:] = os.urandom(1 << 20) * (nbytes >> 20)
        async with contextlib.AsyncExitStack() as stack:
            drivers = {}
            for home in HOMES:
                port = await stack.enter_async_context(open_port(home, url_of[home], arena))
                drivers[home] = Driver(port, nbytes)
            await one_round(drivers, nbytes, defaultdict(list))
            for _ in range(rounds):
                await one_round(drivers, nbytes, samples)
    return samples


def table(samples: Samples) -> Iterator[dict[str, Any]]:
    """One row a home, size and direction."""
    for home, block_bytes, kind in sorted({key[:3] for key in samples}):
        idle, beside, spinner = (
            statistics.median(samples[home, block_bytes, kind, what])
            for what in ("idle", "beside", "spinner")
        )
        yield {
            "home": home,
            "block_bytes": block_bytes,
            "op": kind,
            "idle_gb_per_s": round(idle, 3),
            "beside_gb_per_s": round(beside, 3),
            "kept": round(beside / idle, 3),
            "spinner_kept": round(spinner, 3),
        }


def reaches_goal(rows: list[dict[str, Any]]) -> bool:
    """Whether the keeper meets the goal at 2 MiB extents, in both directions."""
    return all(
        row["kept"] >= KEEPER_GOAL and row["spinner_kept"] >= SPINNER_GOAL
        for row in rows
        if row["home"] == "keeper" and row["block_bytes"] == BLOCK_BYTES[0]
    )


def show(rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    print("home    block     op    idle GB/s  beside GB/s  kept  spinner kept")
    for r in rows:
        what = f"{r['home']:7s} {r['block_bytes'] >> 10:4d} KiB  {r['op']:5s}"
        rates = f"{r['idle_gb_per_s']:8.2f}  {r['beside_gb_per_s']:11.2f}"
        print(f"{what} {rates}  {r['kept']:4.2f}  {r['spinner_kept']:12.2f}")


def main() -> int:
    """Measure and print; the exit status says whether `--check` held."""
    parser = argparse.ArgumentParser(prog="bench.gil", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--scheme", default="nvme", help="tier to measure (default: nvme)")
    parser.add_argument("--mib", type=int, default=256, help="MiB per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit 1 where the goal is missed")
    args = parser.parse_args()
    # Not the default /tmp, which is RAM on many machines: the point is a disk.
    try:
        scratch = tempfile.TemporaryDirectory(dir=args.dir or "/var/tmp", prefix="tierkv-gil-")
    except OSError as exc:
        sys.exit(f"bench.gil: --dir {args.dir}: {exc.strerror}; name a writable directory")
    with scratch as folder:
        # Room for every round, so that no save waits for another's blocks to be given up.
        mib = 1024 + 4 * args.mib * (args.rounds + 1)
        capacity = "" if args.scheme == "memory" else f"?capacity={mib}MiB"
        urls = {home: f"{args.scheme}://{folder}/{home}{capacity}" for home in HOMES}
        rows = list(table(asyncio.run(measure(urls, args.mib << 20, args.rounds))))
    ok = reaches_goal(rows)
    if args.json:
        print(json.dumps({"ok": ok, "cores": os.cpu_count(), "scheme": args.scheme, "rows": rows}))
    else:
        show(rows)
        print("goal reached" if ok else "goal missed")
    return 0 if ok or not args.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
