"""Looking into a root from outside: what every owner holds, who runs. Reads indexes, no payload."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Final

import numpy as np

from tierkv.backend import (
    BlockPlace,
    Eviction,
    GroupHoldings,
    Inspection,
    Skipped,
    StorePart,
    finish,
)
from tierkv_backends.nvme.eviction import evict_root_sync
from tierkv_backends.nvme.files import close_fd_sync
from tierkv_backends.nvme.format import end_bytes
from tierkv_backends.nvme.lock import LOCK_NAME, owner_sync, root_lock_sync
from tierkv_backends.nvme.options import FREE_SHARE, Options
from tierkv_backends.nvme.quota import META_NAME, segment_paths_sync, stats_sync
from tierkv_backends.nvme.recovery import Found, Meta, recover_sync
from tierkv_backends.nvme.store import unusable
from tierkv_backends.nvme.table import Segment, Table
from tierkv_backends.nvme.verify import stores_sync

_PID: Final = re.compile(r"pid (\d+) ")


class FromOutside:
    """What a backend that is not open tells of its root, and gives up in it."""

    _options: Options

    async def inspect(self) -> Inspection:
        """`tierkv.backend.SupportsInspect`: a root in use can be looked into as well."""
        return await finish(asyncio.to_thread(inspect_root_sync, self._options))

    async def evict(
        self, progress: Callable[[int, int], None], *, namespace: bytes | None, keep_bytes: int
    ) -> Eviction:
        """`tierkv.backend.SupportsEvict`: whole segments go, the coldest first."""
        loop, stop = asyncio.get_running_loop(), Event()

        def tell(freed: int, wanted: int) -> None:
            loop.call_soon_threadsafe(progress, freed, wanted)

        task = asyncio.ensure_future(
            asyncio.to_thread(
                evict_root_sync,
                self._options.root,
                tell,
                stop,
                namespace=namespace,
                keep_bytes=keep_bytes,
            )
        )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            await finish(task)
            raise


def inspect_root_sync(options: Options) -> Inspection:
    """`StoreUnusableError` where `root` is no directory, holds no store or cannot be listed."""
    root, unreadable = options.root, list[Skipped]()
    with unusable(root):
        directories = stores_sync(root)
        owners = _owners_sync(root, directories)
        parts = tuple(_part_sync(path, owners.get(path, ""), unreadable) for path in directories)
        disk = shutil.disk_usage(root)
    physical = sum(part.physical_bytes for part in parts)
    capacity = options.capacity_bytes
    return Inspection(
        parts=parts,
        capacity_bytes=int((disk.free + physical) * FREE_SHARE) if capacity is None else capacity,
        free_bytes=disk.free,
        unreadable=tuple(unreadable),
    )


def _owners_sync(root: Path, directories: list[Path]) -> dict[Path, str]:
    """Who has which directory open, in words.

    Nobody who opens one meanwhile finds us in the way: that takes the root's lock, which we hold
    if this user can.
    """
    may_lock = os.access(root / LOCK_NAME, os.W_OK)
    with root_lock_sync(root) if may_lock else contextlib.nullcontext():
        return {path: owner_sync(path) for path in directories if _is_locked_sync(path)}


def _is_locked_sync(directory: Path) -> bool:
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        close_fd_sync(fd)
    return False


def _part_sync(directory: Path, owner: str, unreadable: list[Skipped]) -> StorePart:
    """One owner's directory.

    Its files may change while they are read: what is taken from them proves itself, so it was true
    at one moment.
    """
    pid = _PID.match(owner)
    used = {path: (at, nbytes) for at, nbytes, path in stats_sync(segment_paths_sync(directory))}
    part = StorePart(
        directory=str(directory),
        namespace="",
        namespace_hex="",
        owner=owner,
        owner_pid=int(pid[1]) if pid else None,
        physical_bytes=sum(nbytes for _, nbytes in used.values()),
    )
    try:
        meta = Meta.read_sync(directory)
        if meta is None:
            there = (directory / META_NAME).exists()
            wrong = "has another format" if there else "is missing"
            return _unread(part, f"{META_NAME} {wrong}", unreadable)
        recovered = recover_sync(directory, meta)
    except OSError as exc:
        return _unread(part, f"{exc.strerror} ({exc.filename})", unreadable)
    unreadable += [
        Skipped(directory=part.directory, reason=f"{path.name} cannot be read")
        for path in recovered.unreadable
    ]
    contents = _Contents.of(recovered.segments)
    times = [used[s.path][0] for s in contents.table.segments.values() if s.live and s.path in used]
    return replace(
        part,
        namespace=meta.namespace_text,
        namespace_hex=meta.namespace.hex(),
        rank=meta.rank,
        data_parallel_rank=meta.data_parallel_rank,
        groups=contents.groups(),
        padding_bytes=contents.padding_bytes,
        unused_bytes=contents.unused_bytes,
        dead_bytes=max(
            part.physical_bytes
            - contents.table.payload_bytes
            - contents.padding_bytes
            - contents.unused_bytes,
            0,
        ),
        oldest_use_s=min(times, default=None),
        newest_use_s=max(times, default=None),
        listing=contents,
    )


def _unread(part: StorePart, problem: str, unreadable: list[Skipped]) -> StorePart:
    unreadable.append(Skipped(directory=part.directory, reason=problem))
    return replace(part, problem=problem)


@dataclass(slots=True, kw_only=True)
class _Contents:
    """The index of a directory, as its owner would take it over. Iterates over the blocks."""

    table: Table
    padding_bytes: int = 0
    unused_bytes: int = 0

    @classmethod
    def of(cls, found: list[Found]) -> _Contents:
        self = cls(table=Table())
        self.table.reserve(sum(len(one.rows) for one in found))
        for one in found:
            header = one.header
            if header is None:
                self.unused_bytes += one.size if one.blank else 0
                continue
            segment = Segment(
                number=one.number, path=one.path, nbytes=one.size, alignment=header.alignment
            )
            self.table.add(segment)
            self.table.adopt(segment, one.hashes, one.rows)
            end = end_bytes(len(one.rows), header.alignment) if one.sealed else 0
            if header.number == one.number:  # a copy of another segment is of no use
                used = one.end + end if len(one.rows) else 0
                self.unused_bytes += max(one.size - used, 0)
        for segment in self.table.segments.values():
            sizes = segment.rows["stored_bytes"][segment.alive].astype(np.int64)
            self.padding_bytes += int((-sizes % segment.alignment).sum())
        return self

    def groups(self) -> tuple[GroupHoldings, ...]:
        """Live blocks by group."""
        blocks, nbytes = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for segment in self.table.segments.values():
            rows = segment.rows[segment.alive]
            groups = rows["group"]
            size = max(len(blocks), int(groups.max(initial=0)) + 1)
            blocks = np.pad(blocks, (0, size - len(blocks)))
            nbytes = np.pad(nbytes, (0, size - len(nbytes)))
            blocks += np.bincount(groups, minlength=size)
            np.add.at(nbytes, groups, rows["stored_bytes"].astype(np.int64))
        return tuple(
            GroupHoldings(group=g, blocks=int(blocks[g]), payload_bytes=int(nbytes[g]))
            for g in np.flatnonzero(blocks).tolist()
        )

    def __iter__(self) -> Iterator[BlockPlace]:
        for segment in self.table.segments.values():
            keys, rows = self.table.keys_of(segment), segment.rows[segment.alive]
            columns = rows["stored_bytes"].tolist(), rows["offset"].tolist()
            for (group, block_hash), nbytes, offset in zip(keys, *columns, strict=True):
                yield BlockPlace(group, block_hash.hex(), nbytes, f"{segment.path}+{offset}")
