"""SIGKILL at numbered system calls: what was acknowledged is served, nothing corrupt is listed."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.backend import SupportsVerify
from tierkv.registry import make_backend
from tierkv.testing import Key, load, sizes

CHILD = Path(__file__).with_name("doomed.py")
OPTIONS = "capacity=512KiB&segment=64KiB&threads=2"

KILLS = [(acks, calls, part) for acks, calls, part in zip(
    [0, 0, 0, 1, 2, 3, 3, 4, 5, 8, 10, 12, 15, 18, 21, 24, 30, 36, 45, 52],
    [0, 3, 5, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 3, 1, 0],
    [0, 1] * 10,
    strict=True,
)]  # fmt: skip
"""Twenty: in headers, payloads, extent headers of one and two pages, footers, while recycling."""


def doomed() -> Any:
    spec = importlib.util.spec_from_file_location("doomed", CHILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def killed_child(url: str, acks: int, calls: int, part: int) -> tuple[int, list[str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), url, str(acks), str(calls), str(part),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().splitlines()


def promised(lines: list[str], batch: Callable[[int], dict[Key, bytes]]) -> dict[Key, bytes]:
    """What was acknowledged and not given up since."""
    must: dict[Key, bytes] = {}
    for line in lines:
        sign, _, rest = line.partition(" ")
        if sign == "+":
            must |= batch(int(rest))
        else:
            gone = {bytes.fromhex(word) for word in rest.split()}
            must = {key: data for key, data in must.items() if key[1] not in gone}
    return must


@pytest.mark.parametrize(("acks", "calls", "part"), KILLS)
async def test_killed_anywhere_it_serves_what_it_acknowledged(
    tmp_path: Path, opened: Any, acks: int, calls: int, part: int
) -> None:
    child = doomed()
    code, lines = await killed_child(f"nvme://{tmp_path}?{OPTIONS}", acks, calls, part)
    assert code == -signal.SIGKILL
    must = promised(lines, child.batch)
    assert sum(line[0] == "+" for line in lines) >= acks > 0 or acks == 0
    everything = {k: v for n in range(child.BATCHES) for k, v in child.batch(n).items()}

    outside = make_backend(f"nvme://{tmp_path}?{OPTIONS}")
    assert isinstance(outside, SupportsVerify)
    verified = await outside.verify(lambda done, total: None)
    assert verified.corrupt == ()
    assert verified.blocks >= len(must)

    async with opened(tmp_path, OPTIONS, block_bytes=child.BLOCK_BYTES) as backend:
        found = await load(backend, sizes(everything))
        there = {key: data for key, data in found.items() if isinstance(data, bytes)}
        assert there.items() <= everything.items()
        assert must.items() <= there.items()
        assert sum(f.stat().st_size for f in tmp_path.glob("*/seg-*")) <= 512 << 10


async def test_the_child_lives_when_it_is_not_killed(tmp_path: Path) -> None:
    code, lines = await killed_child(f"nvme://{tmp_path}?{OPTIONS}", 1000, 0, 0)
    assert code == 0
    assert sum(line[0] == "+" for line in lines) == doomed().BATCHES
    assert any(line[0] == "-" for line in lines), "nothing was recycled"
