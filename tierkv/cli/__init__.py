"""The command ``tierkv``. Every command takes ``--json`` and then prints one JSON object.

Exit status: 0 success; 1 the answer is bad news (a required thing is broken, a block is corrupt);
2 the command could not be carried out (one line on stderr says why).
"""

from __future__ import annotations

from typing import Annotated

import typer

from tierkv.cli import demo, doctor, machine, plan, store, verify

app = typer.Typer(
    name="tierkv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug's traceback goes into a report: keep it plain
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tierkv {machine.installed('tierkv')}")
        raise typer.Exit


@app.callback()
def _tierkv(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Keeps the KV cache of LLM inference alive after it leaves the GPU."""


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("du")(store.du)
app.command("evict")(store.evict)
app.command("ls")(store.ls)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)


def main() -> None:
    """Run the command line; the entry point of the script ``tierkv``."""
    app()
