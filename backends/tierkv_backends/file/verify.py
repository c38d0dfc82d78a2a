"""Reads a whole store from outside, owner or not, and proves every block. Changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tierkv.backend import CorruptBlock, Skipped, Verification, finish
from tierkv.blocks import Keys
from tierkv.errors import StoreUnusableError
from tierkv.record import RECORD_BYTES, RECORD_DTYPE, verify_sync
from tierkv_backends.file import names
from tierkv_backends.file.directory import files_sync

_STORE: Final = re.compile(r"kv\d+-")
"""Owners of this format and of others."""


@dataclass(frozen=True, slots=True)
class Found:
    """A published block's file."""

    owner: str
    key: names.Key
    path: Path
    nbytes: int


async def verify_store(root: Path, progress: Callable[[int, int], None]) -> Verification:
    """`tierkv.backend.SupportsVerify`: read and prove every block of every owner.

    What an owner gave up after it was listed is neither counted nor missed.
    """
    found, skipped = await finish(asyncio.to_thread(list_store_sync, root))
    total = sum(block.nbytes for block in found)
    done = blocks = payload_bytes = 0
    corrupt: list[CorruptBlock] = []
    for block in found:
        try:
            wrong = await finish(asyncio.to_thread(check_sync, block))
        except FileNotFoundError:
            pass
        else:
            blocks += 1
            payload_bytes += block.nbytes
            corrupt += [wrong] if wrong else []
        done += block.nbytes
        progress(done, total)
    return Verification(
        blocks=blocks, payload_bytes=payload_bytes, corrupt=tuple(corrupt), skipped=skipped
    )


def list_store_sync(root: Path) -> tuple[list[Found], tuple[Skipped, ...]]:
    """Every published block of every owner, and what cannot be listed.

    `StoreUnusableError` where `root` cannot be listed or holds no store of this backend.
    """
    found: list[Found] = []
    skipped = []
    for owner in stores_sync(root):
        reason = ""
        if names.namespace_of(owner.name) is None:
            reason = "another format"
        else:
            try:
                found += _blocks_sync(owner)
            except OSError as exc:  # not readable, or cleared by its owner just now
                reason = f"{exc.strerror} ({exc.filename})"
        if reason:
            skipped.append(Skipped(directory=str(owner), reason=reason))
    return found, tuple(skipped)


def stores_sync(root: Path) -> list[Path]:
    """The directories of all owners, other formats included; `StoreUnusableError` without one."""
    try:
        stores = sorted(path for path in root.iterdir() if _STORE.match(path.name))
    except OSError as exc:
        raise StoreUnusableError(
            f"file tier {root}: {exc.strerror} ({exc.filename}); name a readable store"
        ) from exc
    if not stores:
        raise StoreUnusableError(
            f"file tier {root}: this directory holds no file store; name a readable store"
        )
    return stores


def current_blocks_sync(owner: Path) -> Path | None:
    """Where an owner's published blocks lie; None: it has none yet."""
    numbers = [
        int(number)
        for path in owner.iterdir()
        if path.name.startswith("blocks-") and (number := path.name[7:]).isdecimal()
    ]
    return owner / f"blocks-{max(numbers)}" if numbers else None


def _blocks_sync(owner: Path) -> list[Found]:
    out: list[Found] = []
    folder = current_blocks_sync(owner)
    if folder is None:
        return out
    for path, entry in files_sync(folder):
        key = names.key_of(path)
        if key is not None:
            with contextlib.suppress(FileNotFoundError):  # its owner gave it up just now
                nbytes = entry.stat().st_size - RECORD_BYTES
                out.append(Found(owner.name, key, Path(entry.path), nbytes))
    return out


def check_sync(found: Found) -> CorruptBlock | None:
    """Read one block and prove it; None: it is right. `FileNotFoundError`: it has gone."""
    try:
        data = memoryview(found.path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as exc:
        return _corrupt(found, os.strerror(exc.errno or 0))
    if len(data) <= RECORD_BYTES:
        return _corrupt(found, f"{len(data)} bytes, shorter than a record")
    record = np.frombuffer(data[:RECORD_BYTES], RECORD_DTYPE)
    if verify_sync(Keys.of([found.key]), record, [data[RECORD_BYTES:]])[0]:
        return None
    return _corrupt(found, "record or checksum does not match")


def _corrupt(found: Found, reason: str) -> CorruptBlock:
    group, block_hash = found.key
    return CorruptBlock(
        namespace=found.owner,
        group=group,
        hash_hex=block_hash.hex(),
        where=str(found.path),
        reason=reason,
    )
