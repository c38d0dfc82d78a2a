"""What `bench.disk_tier` measured, as a table and as curves, and the machine it ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
