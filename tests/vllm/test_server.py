"""vLLM's own server: scheduler and worker in an engine process, a keeper below it, `/metrics`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import BLOCK_TOKENS, ENVIRONMENT, HERE, MAX_TOKENS, ROUND, SMALL_POOL, References
from test_restart import fill, nvme

START_LIMIT_S = 150.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`python -m vllm.entrypoints.openai.api_server` with the connector."""

    def __init__(self, model: str, extra: dict[str, Any], log: Path) -> None:
        self.port = free_port()
        self.log = log
        transfer = {
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "identity": "test",
                "pinned": "64MiB",
                "load": "always",  # models this small are computed as quickly
                **extra,
            },
        }
        options = {
            "model": HERE / "models" / model,
            "served-model-name": "tiny",
            "load-format": "dummy",
            "dtype": "float32",
            "max-model-len": MAX_TOKENS,
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": SMALL_POOL[model],
            "port": self.port,
            "kv-transfer-config": json.dumps(transfer),
        }
        flags = ["skip-tokenizer-init", "enforce-eager", "no-disable-hybrid-kv-cache-manager"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        command += [f"--{flag}" for flag in flags]
        environment = (
            os.environ
            | ENVIRONMENT
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_LOGGING_LEVEL": "INFO",
                "PYTHONPATH": f"{HERE}:{HERE / 'plugin'}",
            }
        )
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def complete(self, tokens: list[int]) -> list[int]:
        answer = self.get(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": tokens,
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "detokenize": False,
                "return_token_ids": True,
            },
        )
        return list(json.loads(answer)["choices"][0]["token_ids"])

    def metrics(self) -> dict[str, float]:
        found = re.findall(r"^(tierkv_\w+)\{.*?\} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def wait_for_metric(self, name: str, value: float) -> dict[str, float]:
        """Metrics once `name` has reached `value`: the engine reports once a second."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            metrics = self.metrics()
            if metrics.get(name, 0) >= value:
                return metrics
            time.sleep(0.1)
        raise AssertionError(f"{name} stays below {value}: {self.metrics()}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def server(model: str, extra: dict[str, Any], log: Path) -> Iterator[Server]:
    made = Server(model, extra, log)
    try:
        made.wait()
        yield made
    finally:
        made.process.terminate()
        try:
            made.process.wait(30)
        except subprocess.TimeoutExpired:
            made.process.kill()
            made.process.wait()


@pytest.mark.timeout(240)
def test_a_server_loads_from_nvme_counts_it_and_leaves_no_keeper_when_it_is_killed(
    store: Path, tmp_path: Path, references: References
) -> None:
    fill("tinygemma3", store)
    plain, cached = references["tinygemma3"]
    hit = sum(a.cached_tokens for a in cached)
    log = tmp_path / "server.log"
    with server("tinygemma3", nvme(store), log) as served:
        answers = [served.complete(p) for p in ROUND]
        metrics = served.wait_for_metric("tierkv_hit_tokens_total", hit)
        [keeper] = [p for p in served.children() if "tierkv.keeper" in p.cmdline()]
        [core] = keeper.parents()[:1]
        core.send_signal(signal.SIGKILL)
        psutil.wait_procs([keeper], timeout=10)
        assert not keeper.is_running()
    assert answers == [list(a.tokens) for a in plain]
    assert metrics["tierkv_hit_tokens_total"] == metrics["tierkv_loaded_tokens_total"] == hit
    assert metrics["tierkv_copied_in_bytes_total"] == metrics["tierkv_loaded_bytes_total"] > 0
    assert metrics["tierkv_failed_tokens_total"] == 0
    assert metrics["tierkv_tier_up"] == 1
    assert metrics["tierkv_tier_blocks"] > 0
    assert "tierkv_never_read_blocks" in metrics
