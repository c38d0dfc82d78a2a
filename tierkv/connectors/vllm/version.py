"""What of the engine's version and settings the connector needs, checked once at start."""

from __future__ import annotations

import re
from typing import Any, Final

from tierkv.errors import ConfigError

FIRST: Final = (0, 32)
END: Final = (0, 33)
"""Supported engine versions: FIRST <= version < END. The interface changes between minor ones."""


def check_version(version: str) -> None:
    """`ConfigError` unless `version` (like ``0.32.0+cpu``) is one the connector was tested with."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not FIRST <= found < END:
        first, end = (".".join(map(str, v)) for v in (FIRST, END))
        raise ConfigError(
            f"vLLM {version} is not supported by this tierkv; "
            f"install 'vllm>={first},<{end}' or another tierkv"
        )


def check_settings(vllm_config: Any) -> None:
    """`ConfigError`, one line with what to write, for engine settings that cannot work."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that cannot "
            'be loaded would fail the client; add "kv_load_failure_policy": "recompute" to '
            "--kv-transfer-config"
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f"kv_role is {transfer.kv_role!r}: a cache saves and loads; "
            'write "kv_role": "kv_both" in --kv-transfer-config'
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}: not supported, set it to 1")
