"""``tierkv demo``: the main job on this machine, every byte compared."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli.output import AsJson, answering, gib
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to work; what is written is removed again.", metavar="D"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Save prompts through pinned RAM and NVMe, close, open again, load, compare every byte.

    The prompts have the group structure of DeepSeek-V4-Flash, scaled down. Under a minute.
    """
    with answering(as_json=as_json) as screen:
        from rich.console import Console

        from tierkv.demo import run_demo

        with (
            _ending_tidily(),
            _scratch(directory) as path,
            Console(stderr=True).status("saving and loading"),
        ):
            answer = run_demo(Path(path))
        screen.show(answer, lambda: _table(answer), ok=bool(answer["ok"]))


@contextlib.contextmanager
def _ending_tidily() -> Iterator[None]:
    """SIGTERM ends the command like an exception, so that what it wrote is removed."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _scratch(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="tierkv-demo-", dir=directory)
    except OSError as exc:
        raise ConfigError(f"--dir {directory}: {exc.strerror}; name a writable directory") from exc


def _table(answer: Mapping[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(title="tierkv demo", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = (
        ("prompts", f"{answer['prompts']}"),
        ("tokens", f"{answer['tokens']:,}"),
        ("hit tokens", f"{answer['hit_tokens']:,}"),
        ("hit tokens after the restart", f"{answer['hit_tokens_after_restart']:,}"),
        ("stored", gib(answer["bytes_stored"])),
        ("without reachability", gib(answer["bytes_stored"] + answer["bytes_skipped"])),
        ("skipped: no hit could read it", gib(answer["bytes_skipped"])),
        ("per token", gib(round(answer["bytes_per_token"]))),
        ("save", f"{answer['save_gb_per_s']:.2f} GB/s"),
        ("load", f"{answer['load_gb_per_s']:.2f} GB/s"),
        ("mismatched blocks", f"{answer['mismatched_blocks']}"),
        ("", "[green]ok[/]" if answer["ok"] else "[red]not ok[/]"),
    )
    for row in rows:
        table.add_row(*row)
    return table
