"""How a command answers: a table for people or one JSON object, never both, never more."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        lines: Iterable[str] = (),
    ) -> None:
        """Give the answer: `answer` as JSON, or what `draw` makes. Not `ok` exits with 1.

        answer: an iterator in it becomes a list that is written while it is made.
        lines: printed last for people, as they are, however narrow the terminal.
        Ends the command where it is not ok, so nothing after it runs: call it last.
        """
        if self.as_json:
            self.answer = answer
        else:
            from rich.console import Console

            Console().print(draw())
            for line in lines:
                print(line)
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
            for text in json_text(screen.answer):
                sys.stdout.write(text)
            print(flush=True)


_AT_ONCE: Final = 1000


def json_text(value: Any) -> Iterator[str]:
    """`value` as JSON in pieces. What an iterator in it yields is never held all at once."""
    if isinstance(value, Mapping):
        yield from _joined("{}", (_entry(name, inner) for name, inner in value.items()))
    elif isinstance(value, list):
        yield from _joined("[]", map(json_text, value))
    elif isinstance(value, Iterator):
        parts = iter(lambda: list(itertools.islice(value, _AT_ONCE)), [])
        yield from _joined("[]", ([_dumps(part)[1:-1]] for part in parts))
    else:
        yield _dumps(value)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield _dumps(name) + ": "
    yield from json_text(value)


def _joined(brackets: str, parts: Iterable[Iterable[str]]) -> Iterator[str]:
    yield brackets[0]
    for number, part in enumerate(parts):
        if number:
            yield ", "
        yield from part
    yield brackets[1]


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


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


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on stderr, where that is a terminal. Yields what to call: (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def gib(nbytes: int) -> str:
    """``12.3 GiB``, ``4.0 MiB`` or ``512 B``, for tables."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
