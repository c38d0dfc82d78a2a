"""Reads a whole store from outside, owner or not, and proves every block. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierkv.backend import CorruptBlock
from tierkv.blocks import Keys
from tierkv.errors import StoreUnusableError
from tierkv.record import RECORD_BYTES, RECORD_DTYPE, verify_sync
from tierkv_backends.file import names
from tierkv_backends.file.directory import files_sync


@dataclass(frozen=True, slots=True)
class Found:
    """A published block's file."""

    owner: str
    key: names.Key
    path: Path
    nbytes: int


def list_store_sync(root: Path) -> list[Found]:
    """Every published block of every owner; `StoreUnusableError` where nothing can be read."""
    try:
        owners = [path for path in root.iterdir() if names.namespace_of(path.name)]
        return [found for owner in sorted(owners) for found in _blocks_sync(owner)]
    except OSError as exc:
        raise StoreUnusableError(
            f"file tier {root}: {exc.strerror} ({exc.filename}); name a readable store"
        ) from exc


def _blocks_sync(owner: Path) -> Iterator[Found]:
    numbers = [
        int(path.name.removeprefix("blocks-")) for path in owner.glob("blocks-*") if path.is_dir()
    ]
    if not numbers:
        return
    for path, entry in files_sync(owner / f"blocks-{max(numbers)}"):
        key = names.key_of(path)
        if key is not None:
            yield Found(owner.name, key, Path(entry.path), entry.stat().st_size - RECORD_BYTES)


def check_sync(found: Found) -> CorruptBlock | None:
    """Read one block and prove it; None: it is right, or it has gone meanwhile."""
    try:
        data = memoryview(found.path.read_bytes())
    except FileNotFoundError:
        return None
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
