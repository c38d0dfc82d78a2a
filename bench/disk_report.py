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


BESIDE: Final = " beside a busy thread"
"""What stands behind an engine's name in the rows of ``--gil-load both``."""


def rows(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every line of a run's table; those beside a spinning thread below their engine."""
    beside = run.get("beside_load", {})
    lines = {}
    for name, engine in run["engines"].items():
        lines[name] = engine
        if name in beside:
            lines[name + BESIDE] = beside[name]
    return lines


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    console = Console(width=max(Console().width, 168))
    for run in report["runs"]:
        title = f"{run['block_bytes'] >> 10} KiB blocks, {run['jobs']} jobs side by side"
        title += BESIDE if report["gil_load"] == "on" else ""
        table = Table(title=title, title_justify="left")
        table.add_column("engine", no_wrap=True)
        for kind in ("write", "read", "mixed"):
            table.add_column(f"{kind}\nGB/s", justify="right")
            table.add_column("blocks/s", justify="right")
            table.add_column("CPU s/GB", justify="right")
            table.add_column("p99 ms", justify="right")
        table.add_column("direct")
        for name, engine in rows(run).items():
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
    """GB/s, CPU seconds per GB and latency against block size; latency against jobs as well."""
    import matplotlib.pyplot as plt

    jobs = report["runs"][0]["jobs"]
    by_size = [run for run in report["runs"] if run["jobs"] == jobs]
    by_size.sort(key=lambda run: int(run["block_bytes"]))
    by_jobs = _most_jobs(report["runs"])
    names = report["runs"][0]["engines"]
    style = {name: {"color": f"C{i}", "label": name} for i, name in enumerate(names)}
    figure, axes = plt.subplots(4 if by_jobs else 3, 2, figsize=(11, 13), dpi=130)
    try:
        for column, kind in enumerate(("write", "read")):
            _draw_sizes(axes[:3, column], by_size, kind, style)
            if by_jobs:
                _draw_jobs(axes[3, column], by_jobs, kind, style)
            axes[0, column].set_title(kind, loc="left")
        axes[0, 0].legend(fontsize=8)
        m = report["machine"]
        figure.suptitle(f"{m['cores']} cores, {m['device']}, {m['file_system']}; {jobs} jobs")
        figure.tight_layout()
        figure.savefig(path)
    finally:
        plt.close(figure)


def _most_jobs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of the block size with the most numbers of jobs, if it has more than one."""
    of_size = [[r for r in runs if r["block_bytes"] == run["block_bytes"]] for run in runs]
    most = max(of_size, key=len)
    return sorted(most, key=lambda run: int(run["jobs"])) if len(most) > 1 else []


def _draw_sizes(axes: Any, runs: list[dict[str, Any]], kind: str, style: dict[str, Any]) -> None:
    sizes = [run["block_bytes"] / 1024 for run in runs]
    whats = (("gb_per_s", "GB/s"), ("cpu_s_per_gb", "CPU s per GB"), ("p99_ms", "p99 of a job, ms"))
    for ax, (what, label) in zip(axes, whats, strict=True):
        for name, words in style.items():
            values = [run["engines"][name][kind][what] for run in runs]
            dash = "--" if name.startswith("raw") else "-"
            ax.plot(sizes, values, dash, marker="o", markersize=3, **words)
        ax.set_xscale("log", base=2)
        ax.set_yscale("linear" if what == "gb_per_s" else "log")
        ax.set_ylabel(label)
        ax.set_xlabel("block, KiB")
        ax.grid(alpha=0.3)


def _draw_jobs(ax: Any, runs: list[dict[str, Any]], kind: str, style: dict[str, Any]) -> None:
    jobs = [run["jobs"] for run in runs]
    for name, words in style.items():
        for what, dash in (("p50_ms", "-"), ("p99_ms", ":")):
            values = [run["engines"][name][kind][what] for run in runs]
            ax.plot(jobs, values, dash, marker="o", markersize=3, color=words["color"])
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylabel("a job, ms: p50, p99 dotted")
    ax.set_xlabel(f"jobs side by side, {runs[0]['block_bytes'] >> 10} KiB blocks")
    ax.grid(alpha=0.3)


def markdown(report: dict[str, Any]) -> str:
    """The table of README: GB/s, and CPU seconds per GB in brackets."""
    m = report["machine"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, {m['device']}, {m['file_system']}, kernel {m['kernel']}; "
        f"medians of {report['rounds']} interleaved rounds, page cache "
        + ("dropped before every read." if report["page_cache_dropped"] else "left alone."),
        "",
        *([f"`{report['command']}`", ""] if "command" in report else []),
        "| block | engine | write | cold read | both at once | p99 of a 16 MiB read, ms |",
        "|---|---|---|---|---|---|",
    ]
    for run in report["runs"]:
        for name, engine in rows(run).items():
            cells = [
                f"{engine[kind]['gb_per_s']:.2f} ({engine[kind]['cpu_s_per_gb']:.2f})"
                for kind in ("write", "read", "mixed")
            ]
            cells.append(f"{engine['read']['p99_ms']:.0f}")
            size = f"{run['block_bytes'] >> 10} KiB"
            if run["jobs"] != report["runs"][0]["jobs"]:
                size += f", {run['jobs']} jobs"
            lines.append(f"| {' | '.join((size, name, *cells))} |")
    return "\n".join(lines)


def show_verdict(judged: list[dict[str, Any]]) -> None:
    """The goals for people."""
    columns = ("block", "engine", "kind", "goal", "found", "met")
    table = Table(*columns, title="goals", title_justify="left")
    for one in judged:
        size = f"{one['block_bytes'] >> 10} KiB"
        met = {True: "yes", False: "NO", None: "-"}[one["met"]]
        row = (size, one["engine"], one["kind"], one["goal"], f"{one['found']:.3f}", met)
        table.add_row(*row)
    Console(width=max(Console().width, 168)).print(table)
