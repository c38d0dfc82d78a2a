"""Curves of benchmarks, drawn with matplotlib (extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def draw_tradeoff(path: Path, title: str, runs: Sequence[dict[str, Any]]) -> None:
    """Hit tokens against bytes stored per token, one point a policy."""
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150)
    try:
        for run in runs:
            x, y = run["bytes_per_token"] / 1024, run["hit_fraction_of_dense"]
            color = "#d1813a" if run["policy"] == "auto" else "#3b6ea8"
            axes.scatter([x], [y], color=color)
            axes.annotate(run["policy"], (x, y), (6, -11), textcoords="offset points", fontsize=8)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        axes.set_xlabel("KiB stored per reusable token")
        axes.set_ylabel("hit tokens, as a share of dense")
        axes.set_xlim(0, 1.1 * max(r["bytes_per_token"] for r in runs) / 1024)
        axes.grid(alpha=0.3)
        axes.set_title(title, loc="left", fontsize=10)
        figure.tight_layout()
        figure.savefig(path)
    finally:
        plt.close(figure)


def draw_growth(path: Path, title: str, series: dict[str, list[tuple[int, float]]]) -> None:
    """Milliseconds against tokens, both logarithmic, one line a name."""
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150)
    try:
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_ylabel("milliseconds (median)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        axes.set_title(title, loc="left", fontsize=10)
        figure.tight_layout()
        figure.savefig(path)
    finally:
        plt.close(figure)


def draw_eviction(path: Path, title: str, sizes: Sequence[dict[str, Any]]) -> None:
    """Hit tokens as a share of Belady's against capacity; below, what the default writes again."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 7), dpi=150, sharex=True, height_ratios=(3, 1)
    )
    try:
        shares = [size["capacity_share"] for size in sizes]
        for name in sizes[0]["hit_tokens"]:
            best = [max(1, size["hit_tokens"]["belady"]) for size in sizes]
            hits = [size["hit_tokens"][name] / n for size, n in zip(sizes, best, strict=True)]
            style = {"linewidth": 2.5, "color": "#d1813a"} if name == "default" else {}
            above.plot(shares, hits, marker="o", markersize=3, label=name, **style)
        for at, run in enumerate(sizes[0]["default"]):
            factors = [size["default"][at]["write_amplification"] for size in sizes]
            below.plot(shares, factors, marker="o", markersize=3, label=f"{run['segments']}")
        above.set_ylabel("hit tokens, as a share of Belady's")
        above.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        below.set_ylabel("blocks written\nper block stored")
        below.set_xlabel("capacity, as a share of the footprint")
        below.set_xscale("log")
        below.set_xticks(shares, [f"{share:.3g}" for share in shares], minor=False)
        below.set_xticks([], minor=True)
        below.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        above.legend(fontsize=8)
        below.legend(title="segments", fontsize=7, title_fontsize=7)
        for axes in (above, below):
            axes.grid(alpha=0.3)
        above.set_title(title, loc="left", fontsize=10)
        figure.tight_layout()
        figure.savefig(path)
    finally:
        plt.close(figure)
