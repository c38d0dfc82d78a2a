"""A file store is looked into from outside, in use or not, and what a kill left is found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence

import pytest

from tierkv.backend import Backend, Inspection, SupportsInspect
from tierkv.errors import StoreUnusableError
from tierkv.registry import make_backend
from tierkv.testing import make_blocks, make_context, save

SCRIPT = pathlib.Path(sysconfig.get_path("scripts")) / "tierkv"


@contextlib.asynccontextmanager
async def opened(
    directory: pathlib.Path,
    *,
    block_bytes: Sequence[int] = (4096,),
    namespace: bytes = b"\x01" * 32,
    rank: int = 0,
) -> AsyncIterator[Backend]:
    backend = make_backend(f"file://{directory}?capacity=64MiB")
    await backend.open(make_context(block_bytes, namespace=namespace, rank=rank))
    try:
        yield backend
    finally:
        await backend.close()


async def inspected(directory: pathlib.Path) -> Inspection:
    backend = make_backend(f"file://{directory}?capacity=64MiB")
    assert isinstance(backend, SupportsInspect)
    return await backend.inspect()


async def test_a_store_is_listed_by_owner_and_group_and_every_byte_is_accounted_for(
    tmp_path: pathlib.Path,
) -> None:
    blocks = make_blocks(6, [4096, 700])
    async with opened(tmp_path, block_bytes=[4096, 700], rank=2) as backend:
        await save(backend, blocks)
        physical = (await backend.usage()).physical_bytes
        (part,) = (await inspected(tmp_path)).parts
        assert part.owner_pid == os.getpid()
        async with opened(tmp_path, namespace=b"\x02" * 32):  # looking kept nobody out
            pass
    first, second = (await inspected(tmp_path)).parts
    assert (first.namespace, first.namespace_hex, first.rank) == ("test 01010101", "01" * 32, 2)
    assert [(g.group, g.blocks, g.payload_bytes) for g in first.groups] == [
        (0, 3, 3 * 4096),
        (1, 3, 3 * 700),
    ]
    assert first.physical_bytes == physical
    assert physical == (
        first.payload_bytes + first.padding_bytes + first.dead_bytes + first.unused_bytes
    )
    assert (first.owner, first.problem) == ("", "")
    assert second.blocks == 0
    listed = {(p.group, bytes.fromhex(p.hash_hex)): pathlib.Path(p.where) for p in first.listing}
    assert set(listed) == set(blocks)
    assert all(path.read_bytes().endswith(blocks[key]) for key, path in listed.items())


async def test_what_is_of_another_format_or_no_store_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StoreUnusableError, match="holds no file store"):
        await inspected(tmp_path)
    (tmp_path / f"kv2-{'0' * 64}-r0-d0").mkdir()
    found = await inspected(tmp_path)
    assert [part.problem for part in found.parts] == ["another format"]
    assert len(found.unreadable) == 1


KILLED_WHILE_MAKING_ROOM = """
import os, shutil, signal, sys
from pathlib import Path
from tierkv_backends.file import directory

shutil.rmtree = lambda path: os.kill(os.getpid(), signal.SIGKILL)
root = Path(sys.argv[1])
path = next(root.glob("kv1-*"))
directory.drop_foreign_sync(directory.Foreign(path, 0, 0.0))
"""


async def test_what_a_kill_leaves_of_another_namespace_is_shown_and_goes_at_the_next_open(
    tmp_path: pathlib.Path,
) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    command = [sys.executable, "-c", KILLED_WHILE_MAKING_ROOM, str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, command, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("trash-kv1-*")
    assert not list(tmp_path.glob("kv1-*"))
    (tmp_path / f"kv1-{'02' * 32}-r0-d0").mkdir()  # a store, so that it can be looked into
    parts = {pathlib.Path(p.directory).name: p for p in (await inspected(tmp_path)).parts}
    assert parts[left.name].dead_bytes >= 3 * 4096
    async with opened(tmp_path, namespace=b"\x03" * 32):
        assert not list(tmp_path.glob("trash-*"))


async def test_ls_and_du_tell_of_it(tmp_path: pathlib.Path) -> None:
    async with opened(tmp_path) as backend:
        await save(backend, make_blocks(3, [4096]))
    answers = []
    for words in (["ls", "--keys"], ["du"]):
        command = [SCRIPT, *words, "--json", f"file://{tmp_path}"]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, timeout=60, check=True
        )
        answers.append(json.loads(done.stdout))
    ls, du = answers
    assert {k["hash_hex"] for k in ls["parts"][0]["keys"]} == {
        block_hash.hex() for _, block_hash in make_blocks(3, [4096])
    }
    assert (du["payload_bytes"], du["physical_bytes"]) == (3 * 4096, 3 * 8192)
