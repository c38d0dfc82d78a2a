"""A small draw of `make torture`: every kind of fault and kill, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


async def tortured(directory: Path, *options: str) -> tuple[int, dict[str, object], str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.backends.nvme.torture", "--quiet", "--dir", str(directory),
        *options, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    *said, last = out.decode().splitlines()
    return process.returncode, json.loads(last), "\n".join(said)


@pytest.mark.timeout(600)  # a minute where others take the cores
async def test_faults_and_kills_lose_no_acknowledged_block_and_leak_nothing(
    tmp_path: Path,
) -> None:
    code, result, said = await tortured(tmp_path, "--faults", "36", "--kills", "12")
    assert (code, result["violations"]) == (0, 0), said
    assert list(tmp_path.iterdir()) == []
