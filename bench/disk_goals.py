"""Which goals of the disk tier a run of `bench.disk_tier` met.

Compared is round by round, because a machine drifts and engines of one round ran side by side:
found is the median of the rounds' ratios, not the ratio of two medians. Judged are runs with the
first number of jobs that was asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

GOALS: Final = {
    64 << 10: {"write": (3.5, 1 / 5), "read": (1.8, 1 / 3)},
    1 << 20: {"write": (1.0, 0.85), "read": (1.0, 0.85)},
}
"""Block bytes → kind → blocks a second (at least) and CPU seconds per GB without checksums (at
most), both as shares of vllm-fs. Where more than its rate is asked for, `OF_RAW` of the disk's
limit is enough instead; that is due in any case."""
OF_RAW: Final = 0.9
SUM_CPU_S_PER_GB: Final = 0.13
SUM_THROUGHPUT: Final = 0.05
"""What checksums may cost at most, from `SUM_BLOCK_BYTES` on."""
SUM_BLOCK_BYTES: Final = 64 << 10
KEPT: Final = 0.8
"""What the keeper keeps of its throughput beside a thread that spins in the caller's process."""
OURS: Final = ("tierkv", "tierkv-keeper")

Judged = dict[str, Any]
"""block_bytes, jobs, engine, kind, goal (in words), found, met (None: told, not asked for)."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What one engine showed in one kind, an entry a round."""

    seconds: list[float]
    cpu_s: list[float]

    def speed(self, other: _Shown) -> float:
        """How many times as fast as `other`."""
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))

    def cpu_share(self, other: _Shown, *, less_s: float = 0.0) -> float:
        """CPU time as a share of `other`'s; `less_s` of it does not count."""
        pairs = zip(self.cpu_s, other.cpu_s, strict=True)
        return statistics.median((a - less_s) / b for a, b in pairs)

    def cpu_more_s(self, other: _Shown) -> float:
        """CPU seconds more than `other`."""
        return statistics.median(a - b for a, b in zip(self.cpu_s, other.cpu_s, strict=True))


class _Kind:
    """One kind of one run: who showed what, and what is said of it."""

    def __init__(self, run: dict[str, Any], kind: str) -> None:
        self._run = run
        self._kind = kind
        self.gb = run["blocks"] * run["block_bytes"] / 1e9

    def shown(self, engine: str, part: str = "engines") -> _Shown | None:
        """What an engine showed; None: it did not take part."""
        found = self._run.get(part, {}).get(engine, {}).get(self._kind)
        return found and _Shown(found["seconds"], found["cpu_s"])

    def judged(self, engine: str, goal: str, found: float, met: bool | None) -> Judged:
        """One line of the verdict."""
        where = {name: self._run[name] for name in ("block_bytes", "jobs")}
        words = {"engine": engine, "kind": self._kind, "goal": goal}
        return {**where, **words, "found": round(found, 3), "met": met}


def verdict(report: dict[str, Any]) -> list[Judged]:
    """For each run and goal that the engines measured allow: what was found, and if it is met."""
    jobs = report["runs"][0]["jobs"]
    kinds = [
        (run["block_bytes"], _Kind(run, kind))
        for run in report["runs"]
        if run["jobs"] == jobs
        for kind in ("write", "read")
    ]
    found: list[Judged] = []
    for block_bytes, kind in kinds:
        goals = GOALS.get(block_bytes, {}).get(kind._kind)
        for engine in OURS:
            if goals is not None:
                found += _against_others(kind, engine, *goals)
            found += _beside_load(kind, engine)
        if block_bytes >= SUM_BLOCK_BYTES:
            found += _checksums(kind)
    return found


def _against_others(kind: _Kind, engine: str, rate: float, cpu: float) -> Iterator[Judged]:
    ours, plain = kind.shown(engine), kind.shown("tierkv-nosum")
    files, raw, small = (kind.shown(name) for name in ("vllm-fs", "raw", "raw-2m"))
    if ours is None:
        return
    at_limit = False
    if raw:
        of_raw = ours.speed(raw)
        at_limit = of_raw >= OF_RAW
        yield kind.judged(engine, f"blocks/s of raw (at least {OF_RAW})", of_raw, at_limit)
    if small:
        yield kind.judged(engine, "blocks/s of raw-2m", ours.speed(small), None)
    if files:
        speed = ours.speed(files)
        words = f"blocks/s of vllm-fs (at least {rate}"
        words += f", or {OF_RAW} of raw)" if rate > 1 else ")"
        yield kind.judged(engine, words, speed, speed >= rate or (at_limit and rate > 1))
    if files and engine == "tierkv" and plain:
        share = plain.cpu_share(files)
        words = f"CPU of vllm-fs, without checksums (at most {cpu:.2f})"
        yield kind.judged(engine, words, share, share <= cpu)
    if files and engine == "tierkv-keeper":
        # Checksums cannot be switched off in another process: what they may cost is taken off.
        share = ours.cpu_share(files, less_s=SUM_CPU_S_PER_GB * kind.gb)
        words = f"CPU of vllm-fs, {SUM_CPU_S_PER_GB} s/GB off for checksums (at most {cpu:.2f})"
        yield kind.judged(engine, words, share, share <= cpu)


def _beside_load(kind: _Kind, engine: str) -> Iterator[Judged]:
    idle, beside = kind.shown(engine), kind.shown(engine, "beside_load")
    if idle and beside:
        kept, asked = beside.speed(idle), engine == "tierkv-keeper"
        words = "throughput kept beside a spinning thread"
        words += f" (at least {KEPT})" if asked else ""
        yield kind.judged(engine, words, kept, kept >= KEPT if asked else None)


def _checksums(kind: _Kind) -> Iterator[Judged]:
    ours, plain = kind.shown("tierkv"), kind.shown("tierkv-nosum")
    if ours and plain:
        cost = ours.cpu_more_s(plain) / kind.gb
        words = f"CPU s/GB of checksums (at most {SUM_CPU_S_PER_GB})"
        yield kind.judged("tierkv", words, cost, cost <= SUM_CPU_S_PER_GB)
        slower = 1 - ours.speed(plain)
        words = f"throughput that checksums cost (at most {SUM_THROUGHPUT})"
        yield kind.judged("tierkv", words, slower, slower <= SUM_THROUGHPUT)
