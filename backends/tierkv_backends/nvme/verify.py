"""Reading a whole root from outside, every namespace in it, to prove every published block."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tierkv.backend import CorruptBlock, Skipped, Verification
from tierkv.blocks import Keys
from tierkv.errors import StoreUnusableError
from tierkv.record import verify_sync
from tierkv_backends.nvme.files import close_fd_sync, open_quiet_sync
from tierkv_backends.nvme.lock import LOCK_NAME, owner_sync
from tierkv_backends.nvme.quota import META_NAME, directories_sync, segment_paths_sync
from tierkv_backends.nvme.recovery import Found, Last, Meta, records_of, recover_sync

_BATCH_BLOCKS: Final = 256


def verify_root_sync(root: Path, progress: Callable[[int, int], None]) -> Verification:
    """Prove every published block in `root`; what cannot be read is in `skipped`. Writes nothing.

    A directory that is read is locked meanwhile, so a process that wants to open it finds it busy.
    `StoreUnusableError` where `root` is no directory, holds no store or cannot be listed.
    """
    locks: list[int] = []
    skipped: list[Skipped] = []
    try:
        segments = [
            one for path in stores_sync(root) for one in _segments_sync(path, locks, skipped)
        ]
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
    return Verification(
        blocks=sum(len(found.rows) for _, found in segments),
        payload_bytes=total,
        corrupt=tuple(corrupt),
        skipped=tuple(skipped),
    )


def stores_sync(root: Path) -> list[Path]:
    """Directories in `root` that are an owner's; `StoreUnusableError` where there is none."""
    if not root.is_dir():
        what = "is a file, not a directory" if root.exists() else "there is no such directory"
        raise StoreUnusableError(f"nvme store {root}: {what}")
    stores = [
        path
        for path in directories_sync(root)
        if segment_paths_sync(path) or ((path / META_NAME).exists() and (path / LOCK_NAME).exists())
    ]
    if not stores:
        inside = bool(segment_paths_sync(root))
        raise StoreUnusableError(
            f"nvme store {root}: this is one owner's directory in a store; name {root.parent}"
            if inside
            else f"nvme store {root}: this directory holds no nvme store"
        )
    return stores


def _segments_sync(
    directory: Path, locks: list[int], skipped: list[Skipped]
) -> list[tuple[str, Found]]:
    """Segments of one owner that hold blocks; its lock is added to `locks`."""

    def skip(reason: str) -> None:
        skipped.append(Skipped(directory=str(directory), reason=reason))

    try:
        if not _lock_sync(directory, locks):
            skip(f"in use by {owner_sync(directory)}; end it to verify")
            return []
        meta = Meta.read_sync(directory)
        if meta is None:
            there = (directory / META_NAME).exists()
            skip(f"{META_NAME} {'has another format' if there else 'is missing'}")
            return []
        recovered = recover_sync(directory, meta, last=Last.UNCUT)
    except OSError as exc:
        skip(f"{exc.strerror} ({exc.filename})")
        return []
    for path in recovered.unreadable:
        skip(f"{path.name} cannot be read")
    for found in recovered.segments:
        if found.header is None and not found.blank:
            skip(f"the header of {found.path.name} does not prove right")
        elif found.header is not None and found.header.number != found.number:
            skip(f"{found.path.name} is a copy of segment {found.header.number}")
    return [(meta.namespace_text, found) for found in recovered.segments if len(found.rows)]


def _lock_sync(directory: Path, locks: list[int]) -> bool:
    """Keep owners out of `directory`, other readers not; False where an owner is in.

    The lock file is neither made nor written: without one there was no owner.
    """
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    locks.append(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_sync(namespace: str, found: Found) -> Iterator[tuple[int, list[CorruptBlock]]]:
    """(payload bytes, corrupt blocks) of one batch of blocks after the other."""
    hashes = np.frombuffer(found.hashes, "V32")
    order = np.argsort(found.rows["offset"], kind="stable")
    fd = open_quiet_sync(found.path)
    try:
        for at in range(0, len(order), _BATCH_BLOCKS):
            picked = order[at : at + _BATCH_BLOCKS]
            rows = found.rows[picked]
            keys = Keys(rows["group"].astype(np.uint16), hashes[picked].tobytes())
            records = records_of(keys.hashes, rows)
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
