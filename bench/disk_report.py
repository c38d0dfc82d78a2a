"""What `bench.disk_tier` measured, as a table and as curves, and the machine it ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")


def stderr() -> Console:
    """Where progress goes."""
    return Console(stderr=True)


def machine(directory: Path) -> dict[str, Any]:
    """Cores, memory, kernel, file system and versions; no names and no paths."""
    cpu = next(
        (s.split(":")[1].strip() for s in _CPUINFO.read_text().splitlines() if "model name" in s),
        platform.machine(),
    )
    ram = next(s.split()[1] for s in _MEMINFO.read_text().splitlines() if "MemTotal" in s)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "ram_gib": round(int(ram) / (1 << 20)),
        "kernel": platform.release().split("-")[0],
        "file_system": _file_system(directory),
        "device": _device(directory),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("vllm", "aiofiles") if _version(name)},
    }


def _file_system(directory: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [m for m in mounts if directory.resolve().is_relative_to(m[0])]
    return max(inside, key=lambda m: len(m[0]), default=["", "unknown"])[1]


def _device(directory: Path) -> str:
    number = os.stat(directory).st_dev
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return "virtual disk (virtio)" if "virtio" in str(path) else path.name


def _version(name: str) -> str | None:
    for distribution in (name, f"{name}-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    console = Console(width=max(Console().width, 140))
    for run in report["runs"]:
        title = f"{run['block_bytes'] >> 10} KiB blocks, {run['jobs']} jobs side by side"
        title += ", beside a spinning thread" if report["gil_load"] else ""
        table = Table(title=title, title_justify="left")
        table.add_column("engine")
        for kind in ("write", "read", "mixed"):
            table.add_column(f"{kind}\nGB/s", justify="right")
            table.add_column("blocks/s", justify="right")
            table.add_column("CPU s/GB", justify="right")
            table.add_column("p99 ms", justify="right")
        table.add_column("direct")
        for name, engine in run["engines"].items():
            cells = [name]
            for kind in ("write", "read", "mixed"):
                k = engine[kind]
                cells += [f"{k['gb_per_s']:.2f}", f"{k['blocks_per_s']:,}"]
                cells += [f"{k['cpu_s_per_gb']:.2f}", f"{k['p99_ms']:.1f}"]
            table.add_row(*cells, engine["modes"].get("direct", "?"))
        console.print(table)
    dropped = "dropped before every read" if report["page_cache_dropped"] else "left alone"
    console.print(f"page cache: {dropped}; medians of {report['rounds']} interleaved rounds")


def draw(report: dict[str, Any], path: Path) -> None:
    """GB/s, CPU seconds per GB and latency against block size, for writes and reads."""
    import matplotlib.pyplot as plt

    jobs = report["runs"][0]["jobs"]
    runs = [run for run in report["runs"] if run["jobs"] == jobs]
    runs.sort(key=lambda run: int(run["block_bytes"]))
    sizes = [run["block_bytes"] / 1024 for run in runs]
    rows = (("gb_per_s", "GB/s"), ("cpu_s_per_gb", "CPU s per GB"), ("p99_ms", "p99 of a job, ms"))
    figure, axes = plt.subplots(len(rows), 2, figsize=(10, 10), dpi=130, sharex=True)
    try:
        for column, kind in enumerate(("write", "read")):
            for row, (what, label) in enumerate(rows):
                ax = axes[row][column]
                for name in runs[0]["engines"]:
                    values = [run["engines"][name][kind][what] for run in runs]
                    style = "--" if name == "raw" else "-"
                    ax.plot(sizes, values, style, marker="o", markersize=3, label=name)
                ax.set_xscale("log", base=2)
                ax.set_yscale("linear" if row == 0 else "log")
                ax.set_ylabel(label)
                ax.grid(alpha=0.3)
            axes[0][column].set_title(kind, loc="left")
            axes[-1][column].set_xlabel("block, KiB")
        axes[0][0].legend(fontsize=8)
        m = report["machine"]
        figure.suptitle(f"{m['cores']} cores, {m['device']}, {m['file_system']}; {jobs} jobs")
        figure.tight_layout()
        figure.savefig(path)
    finally:
        plt.close(figure)


def markdown(report: dict[str, Any]) -> str:
    """The table of README: GB/s, and CPU seconds per GB in brackets."""
    m = report["machine"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, {m['device']}, {m['file_system']}, kernel {m['kernel']}; "
        f"medians of {report['rounds']} interleaved rounds, page cache "
        + ("dropped before every read." if report["page_cache_dropped"] else "left alone."),
        "",
        "| block | engine | write | cold read | both at once | p99 of a 16 MiB read, ms |",
        "|---|---|---|---|---|---|",
    ]
    for run in report["runs"]:
        for name, engine in run["engines"].items():
            cells = [
                f"{engine[kind]['gb_per_s']:.2f} ({engine[kind]['cpu_s_per_gb']:.2f})"
                for kind in ("write", "read", "mixed")
            ]
            cells.append(f"{engine['read']['p99_ms']:.0f}")
            size = f"{run['block_bytes'] >> 10} KiB"
            lines.append(f"| {' | '.join((size, name, *cells))} |")
    return "\n".join(lines)


GOALS: Final = {
    64 << 10: {"write": (3.5, 1 / 5), "read": (1.8, 1 / 3)},
    1 << 20: {"write": (1.0, 0.85), "read": (1.0, 0.85)},
}
"""Block bytes → kind → blocks a second (at least) and CPU seconds per GB without checksums (at
most), both as shares of vllm-fs. Where more than its rate is asked for, `OF_RAW` of the disk's
limit is enough instead; that is due in any case, and so are checksums within `SUM_CPU_S_PER_GB`."""
OF_RAW: Final = 0.9
SUM_CPU_S_PER_GB: Final = 0.13


def verdict(report: dict[str, Any]) -> list[dict[str, Any]]:
    """For each run and goal that the engines measured allow: what was found, and whether it is met.

    Found are ratios of medians.
    """
    found = []
    for run in report["runs"]:
        engines = run["engines"]
        for kind, (rate, cpu) in GOALS.get(run["block_bytes"], {}).items():
            ours, plain, files, raw = (
                engines.get(name, {}).get(kind)
                for name in ("tierkv", "tierkv-nosum", "vllm-fs", "raw")
            )
            of_raw = ours["blocks_per_s"] / raw["blocks_per_s"] if ours and raw else None
            at_limit = of_raw is not None and of_raw >= OF_RAW
            if of_raw is not None:
                found.append(_judged(run, kind, f"blocks/s of raw ({OF_RAW})", of_raw, at_limit))
            if ours and files:
                ratio = ours["blocks_per_s"] / files["blocks_per_s"]
                enough = at_limit and rate > 1
                what = f"blocks/s of vllm-fs (at least {rate}"
                what += f", or {OF_RAW} of raw)" if rate > 1 else ")"
                found.append(_judged(run, kind, what, ratio, enough or ratio >= rate))
            if plain and files:
                share = plain["cpu_s_per_gb"] / files["cpu_s_per_gb"]
                what = f"CPU of vllm-fs without checksums (at most {cpu:.2f})"
                found.append(_judged(run, kind, what, share, share <= cpu))
            if plain and ours:
                cost = ours["cpu_s_per_gb"] - plain["cpu_s_per_gb"]
                what = f"CPU s/GB of checksums (at most {SUM_CPU_S_PER_GB})"
                found.append(_judged(run, kind, what, cost, cost <= SUM_CPU_S_PER_GB))
    return found


def _judged(run: dict[str, Any], kind: str, what: str, value: float, met: bool) -> dict[str, Any]:
    size = {"block_bytes": run["block_bytes"], "jobs": run["jobs"], "kind": kind}
    return {**size, "goal": what, "found": round(value, 3), "met": met}


def show_verdict(judged: list[dict[str, Any]]) -> None:
    """The goals for people."""
    table = Table("block", "kind", "goal", "found", "met", title="goals", title_justify="left")
    for one in judged:
        size = f"{one['block_bytes'] >> 10} KiB"
        met = "yes" if one["met"] else "NO"
        table.add_row(size, one["kind"], one["goal"], f"{one['found']:.3f}", met)
    Console(width=max(Console().width, 140)).print(table)
