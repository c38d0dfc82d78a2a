"""Reading a whole root from outside, every namespace in it, to prove every published block."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tierkv.backend import CorruptBlock, Verification
from tierkv.blocks import Keys
from tierkv.errors import StoreBusyError, StoreUnusableError
from tierkv.record import blank, verify_sync
from tierkv_backends.nvme.files import close_fd_sync
from tierkv_backends.nvme.format import ROW_DTYPE
from tierkv_backends.nvme.lock import own_sync
from tierkv_backends.nvme.quota import directories_sync, segment_paths_sync
from tierkv_backends.nvme.recovery import Found, Meta, recover_sync

log = logging.getLogger(__name__)

_BATCH_BLOCKS: Final = 256


def verify_root_sync(root: Path, progress: Callable[[int, int], None]) -> Verification:
    """Prove every published block in `root`; directories in use or of another format are left out.

    `StoreUnusableError` where `root` is no directory or cannot be read.
    """
    if not root.is_dir():
        raise StoreUnusableError(f"nvme store {root}: there is no such directory")
    locks: list[int] = []
    try:
        segments = list(_segments_sync(root, locks))
        total = sum(int(found.rows["stored_bytes"].sum()) for _, found in segments)
        progress(0, total)
        done = 0
        corrupt: list[CorruptBlock] = []
        for namespace, found in segments:
            for nbytes, bad in _check_sync(namespace, found):
                done += nbytes
                corrupt += bad
                progress(done, total)
    except OSError as exc:
        raise StoreUnusableError(f"nvme store {root}: {exc.strerror} ({exc.filename})") from exc
    finally:
        for fd in locks:
            close_fd_sync(fd)
    blocks = sum(len(found.rows) for _, found in segments)
    return Verification(blocks=blocks, payload_bytes=total, corrupt=tuple(corrupt))


def _segments_sync(root: Path, locks: list[int]) -> Iterator[tuple[str, Found]]:
    for directory in directories_sync(root):
        if not segment_paths_sync(directory):
            continue
        meta = Meta.read_sync(directory)
        if meta is None:
            log.warning("nvme: %s has another format; not verified", directory)
            continue
        try:
            locks.append(own_sync(directory))
        except StoreBusyError as exc:
            log.warning("not verified: %s", exc)
            continue
        for found in recover_sync(directory, meta).segments:
            if len(found.rows):
                yield meta.namespace_text, found


def _check_sync(namespace: str, found: Found) -> Iterator[tuple[int, list[CorruptBlock]]]:
    """(payload bytes, corrupt blocks) of one batch of blocks after the other."""
    hashes = np.frombuffer(found.hashes, "V32")
    order = np.argsort(found.rows["offset"], kind="stable")
    fd = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(0, len(order), _BATCH_BLOCKS):
            picked = order[at : at + _BATCH_BLOCKS]
            rows = found.rows[picked]
            records = blank(len(rows))
            records["hash"] = hashes[picked]
            for name in ROW_DTYPE.names or ():
                if name != "offset":
                    records[name] = rows[name]
            keys = Keys(rows["group"].astype(np.uint16), hashes[picked].tobytes())
            offsets = rows["offset"].tolist()
            payloads, reasons = _read_sync(fd, offsets, rows["stored_bytes"].tolist())
            good = verify_sync(keys, records, payloads)
            yield (
                int(rows["stored_bytes"].sum()),
                [
                    CorruptBlock(
                        namespace=namespace,
                        group=int(keys.groups[i]),
                        hash_hex=keys.hash_at(i).hex(),
                        where=f"{found.path}+{offsets[i]}",
                        reason=reasons[i] or "checksum",
                    )
                    for i in np.flatnonzero(~good).tolist()
                ],
            )
    finally:
        close_fd_sync(fd)


def _read_sync(fd: int, offsets: list[int], sizes: list[int]) -> tuple[list[memoryview], list[str]]:
    """Payloads, and why one could not be read, where so."""
    payloads, reasons = [], []
    for offset, nbytes in zip(offsets, sizes, strict=True):
        data, reason = b"", ""
        try:
            data = os.pread(fd, nbytes, offset)
            reason = "" if len(data) == nbytes else "cut short"
        except OSError as exc:
            reason = f"read error: {exc.strerror}"
        payloads.append(memoryview(data))
        reasons.append(reason)
    return payloads, reasons
