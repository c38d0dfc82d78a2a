"""How a command answers: a table for people or one JSON object, never both, never more."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_BAD_NEWS: Final = 1
EXIT_REFUSED: Final = 2

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
]


class Screen:
    """Where a command's one answer goes. Made by `answering`."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.answer: Mapping[str, Any] | None = None

    def show(
        self,
        answer: Mapping[str, Any],
        draw: Callable[[], RenderableType],
        *,
        ok: bool = True,
        copyable: str = "",
    ) -> None:
        """Give the answer: `answer` as JSON, or what `draw` makes. Not `ok` exits with 1.

        copyable: printed last for people, as it is, on one line however narrow the terminal.
        Ends the command where it is not ok, so nothing after it runs: call it last.
        """
        if self.as_json:
            self.answer = answer
        else:
            from rich.console import Console

            Console().print(draw())
            if copyable:
                print(copyable)
        if not ok:
            raise typer.Exit(EXIT_BAD_NEWS)


@contextlib.contextmanager
def answering(*, as_json: bool) -> Iterator[Screen]:
    """Everything a command does happens in here.

    A `TierKVError` becomes one line on stderr (with `as_json` also ``{"error": …}`` on stdout) and
    exit status 2. With `as_json`, whatever else writes to stdout meanwhile, a library or a child
    process, lands on stderr.
    """
    screen = Screen(as_json=as_json)
    try:
        with _stdout_to_stderr() if as_json else contextlib.nullcontext():
            yield screen
    except TierKVError as exc:
        line = " ".join(str(exc).split())
        print(f"tierkv: {line}", file=sys.stderr)
        screen.answer = {"error": line, "error_type": type(exc).__name__}
        raise typer.Exit(EXIT_REFUSED) from exc
    finally:
        if as_json and screen.answer is not None:
            print(json.dumps(screen.answer, allow_nan=False), flush=True)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    out, err = _fileno(sys.stdout), _fileno(sys.stderr)
    if out is None or err is None:  # a stream that is no file (a test's): no child can reach it
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    saved = os.dup(out)
    os.dup2(err, out)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, out)
        os.close(saved)


def _fileno(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except OSError:  # io.UnsupportedOperation
        return None


def gib(nbytes: int) -> str:
    """``12.3 GiB``, ``4.0 MiB`` or ``512 B``, for tables."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
