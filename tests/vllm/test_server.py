"""`vllm serve` as README has it: an engine process, a keeper below it, `/metrics`, a restart."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import BLOCK_TOKENS, ENVIRONMENT, HERE, MAX_TOKENS, ROUND, SMALL_POOL, References
from vllm import __version__

START_LIMIT_S = 400.0
"""Where the machine is busy; otherwise half a minute."""
README = HERE.parents[1] / "README.md"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def readme_command(model: str, store: Path) -> list[str]:
    """README's line; the model, the store and its size are the test's, and so is the RAM."""
    [line] = re.findall(r"^vllm serve MODEL .*$", README.read_text(), re.MULTILINE)
    words = shlex.split(line)
    assert words[:3] == ["vllm", "serve", "MODEL"]
    transfer = json.loads(words[-1])
    extra = transfer["kv_connector_extra_config"]
    scheme = extra["url"].partition("://")[0]
    extra |= {
        "url": f"{scheme}://{store}?capacity=256MiB&segment=8MiB",
        "pinned": "64MiB",
        "identity": "test",  # these weights are in no file
        "load": "always",  # models this small are computed as quickly
    }
    program = str(Path(sys.executable).parent / "vllm")
    return [program, "serve", str(HERE / "models" / model), *words[3:-1], json.dumps(transfer)]


def as_vllm(folder: Path) -> Path:
    """A folder that makes the CPU wheel known as vllm: the command `vllm` asks for its version."""
    made = folder / f"vllm-{__version__.partition('+')[0]}+cpu.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    version = made.name.removeprefix("vllm-").removesuffix(".dist-info")
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


class Server:
    """`vllm serve` with the connector."""

    def __init__(self, model: str, store: Path, log: Path) -> None:
        self.port = free_port()
        self.log = log
        options = {
            "served-model-name": "tiny",
            "load-format": "dummy",
            "dtype": "float32",
            "max-model-len": MAX_TOKENS,
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": SMALL_POOL[model],
            "port": self.port,
        }
        flags = ["skip-tokenizer-init", "enforce-eager", "no-disable-hybrid-kv-cache-manager"]
        command = readme_command(model, store)
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        command += [f"--{flag}" for flag in flags]
        known = as_vllm(log.parent / "known")
        environment = (
            os.environ
            | ENVIRONMENT
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_LOGGING_LEVEL": "INFO",
                "PYTHONPATH": f"{HERE}:{HERE / 'plugin'}:{known}",
            }
        )
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
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
        """Name → value, and `name{source}` of what the engine tells apart by source."""
        found = {}
        lines = re.findall(r"^([\w:]+)\{(.*?)\} (\S+)$", self.get("/metrics"), re.MULTILINE)
        for name, labels, value in lines:
            source = re.search(r'source="(\w+)"', labels)
            found[f"{name}{{{source[1]}}}" if source else name] = float(value)
        return found

    def wait_for_metric(self, name: str, value: float) -> dict[str, float]:
        """Metrics once `name` has reached `value`, with nothing asked of the engine meanwhile."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            metrics = self.metrics()
            if metrics.get(name, 0) >= value:
                return metrics
            time.sleep(0.5)
        raise AssertionError(f"{name} stays below {value}: {self.metrics()}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def server(model: str, store: Path, log: Path) -> Iterator[Server]:
    made = Server(model, store, log)
    try:
        made.wait()
        yield made
    finally:
        family = [made.process, *made.children()] if made.process.poll() is None else []
        made.process.terminate()
        try:
            made.process.wait(30)
        except subprocess.TimeoutExpired:  # the engine's processes would outlive it
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            made.process.wait()


def hits(metrics: dict[str, float], source: str) -> float:
    """Prompt tokens that the engine counts as found there."""
    return metrics[f"vllm:prompt_tokens_cached_by_source_total{{{source}}}"]


@pytest.mark.timeout(900)
def test_the_command_in_readme_hits_ram_then_after_a_restart_the_disk_and_metrics_say_so(
    store: Path, tmp_path: Path, references: References
) -> None:
    plain, cached = references["tinygemma3"]
    expected = [list(a.tokens) for a in plain]
    hit = sum(a.cached_tokens for a in cached)
    log = tmp_path / "server.log"
    with server("tinygemma3", store, log) as served:
        assert [served.complete(p) for p in ROUND] == expected
        assert [served.complete(p) for p in ROUND] == expected
        metrics = served.wait_for_metric("tierkv_loaded_tokens_total", hit)
        assert (hits(metrics, "host"), hits(metrics, "disk")) == (hit, 0)
        assert metrics["tierkv_hit_tokens_total"] == hit
        assert metrics["tierkv_loaded_bytes_total"] == 0  # from the tier
        served.wait_for_metric("tierkv_stored_bytes_total", metrics["tierkv_saved_bytes_total"])
    with server("tinygemma3", store, log) as served:
        assert [served.complete(p) for p in ROUND] == expected
        metrics = served.wait_for_metric("tierkv_loaded_tokens_total", hit)
        assert (hits(metrics, "host"), hits(metrics, "disk")) == (0, hit)
        assert metrics["tierkv_hit_tokens_total"] == hit
        assert metrics["tierkv_copied_in_bytes_total"] == metrics["tierkv_loaded_bytes_total"] > 0
        assert metrics["tierkv_failed_tokens_total"] == 0
        assert metrics["tierkv_tier_up"] == 1
        assert metrics["tierkv_tier_blocks"] == metrics["tierkv_recovered_blocks_total"] > 0
        assert "tierkv_never_read_blocks" in metrics
        leaves_no_keeper_when_it_is_killed(served)


def leaves_no_keeper_when_it_is_killed(served: Server) -> None:
    [keeper] = [p for p in served.children() if "tierkv.keeper" in p.cmdline()]
    [core] = keeper.parents()[:1]
    core.send_signal(signal.SIGKILL)
    psutil.wait_procs([keeper], timeout=10)
    assert not keeper.is_running()
