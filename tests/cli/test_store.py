"""`tierkv ls`, `du` and `evict` on real stores, as users type them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierkv.cli import app
from tierkv.cli.output import gib
from tierkv.registry import make_backend
from tierkv.testing import make_blocks, make_context, save

BYTES = (4096, 700)
SCRIPT = Path(sysconfig.get_path("scripts")) / "tierkv"


def fill(root: Path, *, namespace: bytes = b"\x01" * 32, blocks: int = 6, rank: int = 0) -> None:
    async def run() -> None:
        backend = make_backend(f"nvme://{root}?capacity=2MiB&segment=64KiB")
        await backend.open(make_context(BYTES, namespace=namespace, rank=rank))
        await save(backend, make_blocks(blocks, BYTES))
        await backend.close()

    asyncio.run(run())


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def told(*words: str) -> dict[str, Any]:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture
def url(tmp_path: Path) -> str:
    fill(tmp_path)
    fill(tmp_path, namespace=b"\x02" * 32, blocks=4, rank=1)
    return f"nvme://{tmp_path}?capacity=2MiB"


def test_ls_names_every_namespace_rank_and_group(url: str) -> None:
    answer = told("ls", url)
    assert answer["blocks"] == 10
    by_rank = {part["rank"]: part for part in answer["parts"]}
    assert by_rank[0]["groups"] == [
        {"group": 0, "blocks": 3, "payload_bytes": 3 * 4096},
        {"group": 1, "blocks": 3, "payload_bytes": 3 * 700},
    ]
    assert by_rank[1]["namespace"] == "test 02020202"
    assert "keys" not in by_rank[0]
    text = call("ls", url).output
    assert "test 01010101" in text
    assert "nobody" in text


def test_ls_lists_every_key_where_that_is_asked(url: str) -> None:
    listed = {k["hash_hex"] for part in told("ls", url, "--keys")["parts"] for k in part["keys"]}
    assert listed == {h.hex() for _, h in make_blocks(6, BYTES)}
    assert next(iter(listed))[:6] in call("ls", url, "--keys").output.replace("\n", "")


def test_du_says_where_every_physical_byte_goes(url: str, tmp_path: Path) -> None:
    answer = told("du", url)
    assert answer["physical_bytes"] == sum(f.stat().st_size for f in tmp_path.glob("*/seg-*"))
    assert answer["capacity_bytes"] == 2 << 20
    for part in answer["parts"]:
        names = ("payload_bytes", "padding_bytes", "dead_bytes", "unused_bytes")
        assert part["physical_bytes"] == sum(part[name] for name in names)
    assert "of a quota of 2.0 MiB" in call("du", url).output


def test_du_adds_up_all_parts(url: str) -> None:
    answer = told("du", url)
    names = ("physical_bytes", "payload_bytes", "padding_bytes", "dead_bytes", "unused_bytes")
    for name in names:
        assert answer[name] == sum(part[name] for part in answer["parts"]) > 0
    assert answer["physical_bytes"] == sum(answer[name] for name in names[1:])
    shown = CliRunner().invoke(app, ["du", url], env={"COLUMNS": "150"})
    lines = shown.output.splitlines()
    (total,) = (line for line in lines if "total" in line)
    for name in names:
        assert gib(answer[name]) in total


LISTS = """
import resource, sys
from tierkv.cli import app
from tierkv.cli.output import gib

try:
    app()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def test_ls_writes_keys_as_it_goes_and_holds_no_list_of_them(tmp_path: Path) -> None:
    count = 20_000

    async def fill_many() -> None:
        backend = make_backend(f"nvme://{tmp_path}?capacity=64MiB&segment=8MiB")
        await backend.open(make_context((16,)))
        await save(backend, make_blocks(count, (16,)))
        await backend.close()

    asyncio.run(fill_many())

    def peak_kib(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-c", LISTS, "ls", f"nvme://{tmp_path}", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return int(done.stderr), done.stdout

    plain, _ = peak_kib()
    as_lines, lines = peak_kib("--keys")
    as_json, text = peak_kib("--keys", "--json")
    assert sum(".tkv+" in line for line in lines.splitlines()) == count
    assert len(json.loads(text)["parts"][0]["keys"]) == count
    # 20,000 entries as dicts of strings take 15 MiB.
    assert max(as_lines, as_json) - plain < 7 << 10


def test_evict_shows_how_far_it_is_on_a_terminal(url: str) -> None:
    master, terminal = pty.openpty()
    command = [SCRIPT, "evict", url, "--all", "--yes", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True) as child:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other side is gone
            while some := os.read(master, 4096):
                shown += some
        assert child.stdout is not None
        answer = json.loads(child.stdout.read())
    os.close(master)
    freed = sum(part["freed_bytes"] for part in answer["evicted"])
    assert f"{freed / 1000:.1f}/{freed / 1000:.1f} kB" in shown.decode()


def test_a_size_for_one_namespace_is_compared_with_that_one(url: str) -> None:
    before = {part["rank"]: part["physical_bytes"] for part in told("du", url)["parts"]}
    words = ("--yes", "--namespace", "test 02020202", "--to", str(before[1]))
    done = subprocess.run(
        [SCRIPT, "evict", url, *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"namespace test 02020202 takes {gib(before[1])}, the store takes" in done.stdout
    answer = told("evict", url, *words[:3], "--to", str(before[1] - 1))
    assert answer["left_bytes"] < before[1]
    assert answer["physical_bytes"] == before[0] + answer["left_bytes"]


def test_evict_gives_up_one_namespace_by_its_text_or_its_digest(url: str) -> None:
    answer = told("evict", url, "--all", "--yes", "--namespace", "test 02020202")
    assert [part["namespace"] for part in answer["evicted"]] == ["test 02020202"]
    assert told("ls", url)["blocks"] == 6
    told("evict", url, "--all", "--yes", "--namespace", "01" * 32)
    assert "holds no nvme store" in call("ls", url).stderr


def test_evict_brings_a_store_down_to_a_size(url: str) -> None:
    answer = told("evict", url, "--to", "64KiB", "--yes")
    assert answer["physical_bytes"] <= 64 << 10
    assert told("du", url)["physical_bytes"] == answer["physical_bytes"]


def test_what_a_running_process_owns_stays_and_that_is_bad_news(url: str, tmp_path: Path) -> None:
    async def run() -> Any:
        backend = make_backend(f"nvme://{tmp_path}?capacity=2MiB&segment=64KiB")
        await backend.open(make_context(BYTES))
        try:
            words = ("evict", url, "--all", "--yes", "--json")
            return await asyncio.to_thread(call, *words)
        finally:
            await backend.close()

    result = asyncio.run(run())
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["ok"], len(answer["skipped"])) == (False, 1)
    assert [part["namespace"] for part in answer["evicted"]] == ["test 02020202"]
    assert told("ls", url)["blocks"] == 6


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--yes",), "either --to SIZE"),
        (("--yes", "--all", "--to", "1GiB"), "either --to SIZE"),
        (("--all",), "write --yes"),
        (("--all", "--yes", "--namespace", "unknown"), "is not in"),
        (("--all", "--yes", "--namespace", "0101"), "is not in"),
        (("--all", "--yes", "--namespace", ""), "is not in"),
        (("--to", "much", "--yes"), "--to"),
    ],
)
def test_a_wrong_word_is_one_line_and_gives_nothing_up(
    url: str, words: tuple[str, ...], line: str
) -> None:
    result = call("evict", url, *words)
    assert result.exit_code == 2
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert told("ls", url)["blocks"] == 10


@pytest.mark.parametrize("command", ["ls", "du"])
def test_a_tier_that_cannot_be_listed_is_named(command: str) -> None:
    result = call(command, "memory://")
    assert result.exit_code == 2
    assert "'memory' cannot be listed" in result.stderr
