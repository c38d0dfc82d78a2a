"""``tierkv plan``: what would be kept of a prompt, in numbers and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierkv.cli.output import AsJson, answering, gib

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.layout import Layout

BAR_COLUMNS: Final = 56

MOST_TOKENS: Final = 1 << 24
"""More than any model takes; the plan of such a prompt still takes only seconds."""


def plan(
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the prompt.", metavar="N")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="A model whose layout is known.", metavar="NAME"),
    ] = None,
    layout: Annotated[
        Path | None, typer.Option("--layout", help="A layout file (JSON).", metavar="F")
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", help="auto, dense, end or interval:TOKENS.", metavar="P")
    ] = "auto",
    capacity: Annotated[
        str | None,
        typer.Option("--capacity", help="Also say how many such prompts fit.", metavar="SIZE"),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", help="Also draw it into a file (extra: plot).", metavar="F"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what would be kept of a prompt, group by group, and what hits that gives."""
    with answering(as_json=as_json) as screen:
        from tierkv.errors import ConfigError
        from tierkv.plan import plan_prompt
        from tierkv.urls import parse_size

        if tokens > MOST_TOKENS:
            raise ConfigError(f"--tokens {tokens}: write {MOST_TOKENS} or less")
        answer = plan_prompt(
            _layout(model, layout),
            tokens,
            policy,
            model=model if layout is None else str(layout),
            capacity_bytes=None if capacity is None else parse_size(capacity, "--capacity"),
        )
        if png is not None:
            _draw(answer, png)
        screen.show(answer, lambda: _picture(answer))


def _draw(answer: Mapping[str, Any], path: Path) -> None:
    from tierkv.errors import ConfigError

    try:
        from tierkv.cli.picture import draw_plan
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--png: {exc.name} is not installed; pip install 'tierkv[plot]'"
        ) from exc
    try:
        draw_plan(answer, path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--png {path}: {exc}") from exc


def _layout(model: str | None, path: Path | None) -> Layout:
    from tierkv.errors import ConfigError
    from tierkv.layout import Layout
    from tierkv.presets import load_preset, preset_names

    if (model is None) == (path is None):
        names = ", ".join(preset_names())
        raise ConfigError(f"name a model with --model or a file with --layout; models: {names}")
    return Layout.from_file(path) if path is not None else load_preset(str(model))


def _picture(answer: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    title = f"{answer['model']}: {answer['tokens']:,} tokens, policy {answer['policy']}"
    table = Table("group", "kind", "block", "kept", "bytes")
    bars = Table.grid(padding=(0, 1))
    for group in answer["groups"]:
        table.add_row(
            group["name"],
            group["kind"],
            str(group["block_tokens"]),
            f"{group['stored_blocks']:,} of {group['blocks']:,}",
            f"{gib(group['stored_bytes'])} of {gib(group['all_blocks_bytes'])}",
        )
        drawn = bar(
            group["stored_ranges"], group["blocks"], group["block_tokens"], answer["tokens"]
        )
        bars.add_row(group["name"], f"│{drawn}│")
    return Group(title, table, bars, *_sums(answer))


def _sums(answer: Mapping[str, Any]) -> list[str]:
    lines = [
        f"stored {gib(answer['stored_bytes'])} of {gib(answer['all_blocks_bytes'])} "
        f"({answer['saved_fraction']:.0%} saved), {answer['bytes_per_token']:,.0f} bytes per token",
        f"hit: {answer['hit_tokens_resend']:,} tokens when the same prompt comes again, "
        f"{answer['hit_tokens_longer']:,} when a longer one begins with it",
    ]
    lost = answer["lost_tokens_at_most"]
    if lost:
        lines.append(f"a prompt that branches off loses at most {lost:,} tokens of a hit")
    if "sessions" in answer:
        fit = answer["sessions"]
        many = "any number" if fit is None else f"{fit:,}"
        lines.append(f"{many} of such prompts fit in {gib(answer['capacity_bytes'])}")
    return [*lines, *(f"note: {note}" for note in answer["notes"])]


def bar(ranges: list[list[int]], blocks: int, block_tokens: int, tokens: int) -> str:
    """A prompt in `BAR_COLUMNS` columns: ``█`` kept, ``▒`` in part, ``·`` not kept, `` `` no block.

    ranges: half-open ranges of kept block indices, ascending.
    """
    kept = [(first * block_tokens, end * block_tokens) for first, end in ranges]
    made = blocks * block_tokens
    columns = []
    for i in range(BAR_COLUMNS):
        start, stop = tokens * i // BAR_COLUMNS, tokens * (i + 1) // BAR_COLUMNS
        inside = sum(max(0, min(stop, b) - max(start, a)) for a, b in kept)
        whole = max(0, min(stop, made) - start)
        columns.append("█" if 0 < whole <= inside else "▒" if inside else "·" if whole else " ")
    return "".join(columns)
