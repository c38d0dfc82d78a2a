"""The command ``tierkv``. Every command takes ``--json`` and then prints one JSON object.

Exit status: 0 success; 1 the answer is bad news (a required thing is broken, a block is corrupt);
2 the command could not be carried out (one line on stderr says why).
"""

from __future__ import annotations

import typer

from tierkv.cli import demo, doctor, plan, verify

app = typer.Typer(
    name="tierkv",
    help="Keeps the KV cache of LLM inference alive after it leaves the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug's traceback goes into a report: keep it plain
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)


def main() -> None:
    """Run the command line; the entry point of the script ``tierkv``."""
    app()
