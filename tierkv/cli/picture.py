"""A plan as a picture: a row per group, tokens along x, kept blocks filled, skipped ones outlined.

Heavy: this module draws with matplotlib (extra ``plot``), so it is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from tierkv.cli.output import gib

_WIDTH_INCHES, _ROW_INCHES, _DPI = 13.0, 0.55, 150

_DRAWN: Final = 320
"""More rectangles than this in a row are too narrow to be told apart (three of 1,000 pixels)."""

_HEIGHT: Final = 0.7
_LEAST_SHARE: Final = 0.05
_COLORS: Final = ("#3b6ea8", "#d1813a", "#4f9a64", "#8a63a6", "#b3504f", "#6f7479")
_OUTLINE: Final = "#9a9a9a"


def draw_plan(answer: Mapping[str, Any], path: Path) -> None:
    """Write the picture of what `tierkv.plan.plan_prompt` answered; the suffix names the format.

    Where a prompt has more blocks than can be drawn, a second panel shows its end block by block.
    Raises `OSError` where the file cannot be written, `ValueError` for a suffix nobody knows.
    """
    groups, tokens = answer["groups"], answer["tokens"]
    height = _ROW_INCHES * len(groups) + 1.5
    end = max(512, 2 * answer["alignment_tokens"])
    zoomed = any(g["blocks"] > _DRAWN for g in groups) and 2 * end < tokens
    figure, panels = plt.subplots(
        1,
        1 + zoomed,
        squeeze=False,
        figsize=(_WIDTH_INCHES, height),
        dpi=_DPI,
        gridspec_kw={"width_ratios": [2.2, 1][: 1 + zoomed], "wspace": 0.04},
    )
    try:
        spans = [(0, tokens), (tokens - end, tokens)]
        legend = "filled: kept; outlined: not kept"
        for axes, (low, high) in zip(panels[0], spans, strict=False):
            shares = [_row(axes, n, g, low, high) for n, g in enumerate(groups)]
            _scale(axes, groups, low, high)
            if any(shares):
                legend = (
                    "filled: kept; outlined: not kept; where blocks are too narrow, "
                    "the filled height is the share kept"
                )
        _labels(panels[0], answer)
        figure.text(0.01, 0.02, legend, fontsize=8, color="#555555")
        figure.subplots_adjust(left=0.12, right=0.9, top=1 - 0.62 / height, bottom=0.72 / height)
        figure.savefig(path)
    finally:
        plt.close(figure)


def _row(axes: Axes, n: int, group: Mapping[str, Any], low: int, high: int) -> bool:
    """Draw the part of one group in tokens [low, high); True where heights stand for shares."""
    color, size = _COLORS[n % len(_COLORS)], group["block_tokens"]
    ranges = np.array(group["stored_ranges"], np.int64).reshape(-1, 2)
    ranges = ranges[(ranges[:, 1] * size > low) & (ranges[:, 0] * size < high)]
    top = n - _HEIGHT / 2
    first, end = low // size, min(group["blocks"], -(-high // size))
    if end - first <= _DRAWN:
        kept = {b for a, z in ranges.tolist() for b in range(a, z)}
        for block in range(first, end):
            face, edge = (color, "white") if block in kept else ("white", _OUTLINE)
            axes.add_patch(_box(block * size, size, top, face, edge))
        return False
    axes.add_patch(_box(first * size, (end - first) * size, top, "white", _OUTLINE))
    if len(ranges) <= _DRAWN:
        for a, z in ranges.tolist():
            axes.add_patch(_box(a * size, (z - a) * size, top, color, color))
        return False
    edges = np.linspace(low, high, _DRAWN + 1)
    share = np.diff(_kept_before(ranges * size, edges)) / np.diff(edges)
    heights = np.where(share > 0, np.maximum(share, _LEAST_SHARE), 0) * _HEIGHT
    # The y axis is turned over, so a row's foot has the larger y.
    axes.bar(edges[:-1], -heights, np.diff(edges), n + _HEIGHT / 2, align="edge", color=color)
    return True


def _box(start: int, width: int, top: float, face: str, edge: str) -> Rectangle:
    return Rectangle((start, top), width, _HEIGHT, facecolor=face, edgecolor=edge, linewidth=0.4)


def _kept_before(ranges: NDArray[np.int64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens of the ascending half-open `ranges` (k, 2), k > 0, that lie before each edge."""
    lengths = ranges[:, 1] - ranges[:, 0]
    after = np.cumsum(lengths)
    known = np.stack([after - lengths, after], axis=1)
    before: NDArray[np.float64] = np.interp(edges, ranges.reshape(-1), known.reshape(-1))
    return before


def _scale(axes: Axes, groups: list[Mapping[str, Any]], low: int, high: int) -> None:
    axes.set_xlim(low, high)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_xlabel("tokens" if not low else f"the last {high - low:,} tokens", fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _labels(panels: NDArray[Any], answer: Mapping[str, Any]) -> None:
    groups, left, right = answer["groups"], panels[0], panels[-1]
    left.set_yticks(
        range(len(groups)), [f"{g['name']}\n{g['kind']}, {g['block_tokens']}" for g in groups]
    )
    left.tick_params(axis="y", length=0, labelsize=8)
    for n, group in enumerate(groups):
        sizes = f"{gib(group['stored_bytes'])}\nof {gib(group['all_blocks_bytes'])}"
        place = right.get_yaxis_transform()
        right.text(1.015, n, sizes, transform=place, va="center", fontsize=8)
    left.set_title(
        f"{answer['model']}, {answer['tokens']:,} tokens, policy {answer['policy']}: "
        f"{gib(answer['stored_bytes'])} of {gib(answer['all_blocks_bytes'])} stored, "
        f"{answer['bytes_per_token'] / 1024:.2f} KiB per token",
        fontsize=10,
        loc="left",
    )
