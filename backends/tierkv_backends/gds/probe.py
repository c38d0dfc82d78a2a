"""Which way really works in a directory: tried in a child process, which may hang or crash.

``python -m tierkv_backends.gds.probe DIRECTORY TRY`` prints one JSON object, an `Attempt`. It
writes a file of two pages in DIRECTORY, for a moment.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tierkv_backends.gds import cuda
from tierkv_backends.gds.modes import Attempt, Mode, Try, Verdict, judge, next_try
from tierkv_backends.nvme.format import PAGE

PROBE_S: Final = 30.0
"""A CUDA context on a machine with eight GPUs takes some seconds; a cuFile driver too."""

_KILLED_S: Final = 1.0
"""A child in an uninterruptible call is left to the system after this."""

EXTRA: Final = "install it with: pip install 'tierkv[gpu]'"

_ENVIRONMENT: Final = {
    Try.STRICT: {"CUFILE_ALLOW_COMPAT_MODE": "false"},
    Try.LOOSE: {},
    Try.BOUNCE: {"KVIKIO_COMPAT_MODE": "ON"},
}

_known: dict[int, Verdict] = {}
_known_lock: Final = threading.Lock()


def find_mode_sync(directory: Path) -> Verdict:
    """The best mode that is proven in `directory`, by file system and once a process.

    Ends within `PROBE_S` for each of at most three probes.
    """
    device = directory.stat().st_dev
    with _known_lock:
        verdict = _known.get(device)
        if verdict is None:
            verdict = _known[device] = decide_sync(lambda tried: _in_child_sync(directory, tried))
        return verdict


def decide_sync(attempt: Callable[[Try], Attempt]) -> Verdict:
    """Probe until the answer is clear."""
    attempts: list[Attempt] = []
    while (tried := next_try(attempts)) is not None:
        attempts.append(attempt(tried))
    return judge(attempts)


def _in_child_sync(directory: Path, tried: Try) -> Attempt:
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, str(directory), tried],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | _ENVIRONMENT[tried],
    )
    try:
        out, err = child.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_KILLED_S)
        return Attempt(tried=tried, no_kvikio=f"a probe did not answer within {PROBE_S:g} s")
    try:
        return Attempt(**json.loads(out.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        said = err.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else "it said nothing"
        return Attempt(tried=tried, error=f"the probe ended with {child.returncode}: {why}")


def attempt_sync(directory: Path, tried: Try) -> Attempt:
    """One probe, in this process."""
    try:
        importlib.metadata.version("kvikio-cu13")
    except importlib.metadata.PackageNotFoundError:
        try:
            importlib.import_module("kvikio")  # built by hand, or for another CUDA
        except ModuleNotFoundError:
            return Attempt(tried=tried, no_kvikio=f"kvikio is not installed; {EXTRA}", missing=True)
    if reason := cuda.why_no_cuda_sync():
        return Attempt(tried=tried, no_cuda=reason)
    try:
        kvikio_defaults = importlib.import_module("kvikio.defaults")
        driver = importlib.import_module("kvikio.cufile_driver")
    except (ImportError, OSError, RuntimeError) as exc:  # it is there, its libraries are not
        return Attempt(tried=tried, no_kvikio=f"kvikio cannot be imported: {exc}")
    compat = bool(kvikio_defaults.is_compat_mode_preferred())
    error = _transfer_sync(directory, compat=compat)
    return Attempt(
        tried=tried,
        compat=compat,
        gds_available=not compat and bool(driver.get("is_gds_available")),
        allow_compat=compat or bool(driver.get("allow_compat_mode")),
        error=error,
    )


def _transfer_sync(directory: Path, *, compat: bool) -> str:
    """Write device memory to a file and read it back with the engine itself; why not, in words."""
    from tierkv_backends.gds.engine import KvikioEngine, Settings

    mode = Mode.COMPAT if compat else Mode.GDS
    data = os.urandom(2 * PAGE)
    try:
        engine = KvikioEngine(Settings(threads=1, direct=True, compat=compat), mode)
        with (
            tempfile.NamedTemporaryFile(dir=directory, prefix="probe-") as file,
            cuda.device_memory_sync(4 * PAGE) as memory,
        ):
            file.truncate(len(data))
            engine.register_sync(memory)
            there, back = memory[: len(data)], memory[len(data) : 2 * len(data)]
            cuda.put_sync(there, data)
            cuda.put_sync(back, bytes(len(data)))
            engine.write_all_sync(file.fileno(), [there], 0)
            engine.read_into_sync(file.fileno(), [back], 0)
            same = cuda.get_sync(back) == data
            engine.unregister_sync(memory)
            engine.forget_sync(file.fileno())
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is the answer, and said in full
        return f"{type(exc).__name__}: {' '.join(str(exc).split())}"
    return "" if same else "it gave back other bytes"


if __name__ == "__main__":
    print(json.dumps(asdict(attempt_sync(Path(sys.argv[1]), Try(sys.argv[2])))), flush=True)
    os._exit(0)  # a cuFile driver that hangs at exit is none of our business
