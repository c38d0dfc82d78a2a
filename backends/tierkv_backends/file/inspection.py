"""Looking into a root from outside: what every owner holds, who runs. Reads no payload."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tierkv.backend import BlockPlace, GroupHoldings, Inspection, Skipped, StorePart
from tierkv.record import RECORD_BYTES
from tierkv_backends.file import names
from tierkv_backends.file.directory import files_sync, on_disk, owner_sync, root_lock_sync
from tierkv_backends.file.verify import current_blocks_sync, stores_sync

_PID: Final = re.compile(r"process (\d+) ")
_NOT_COUNTED: Final = ("lock", "about.json")
"""Files of an owner that are as small as the quota's error."""


def inspect_root_sync(root: Path, capacity_bytes: int | None, default_share: float) -> Inspection:
    """`StoreUnusableError` where `root` holds no store of this backend or cannot be listed."""
    unreadable: list[Skipped] = []
    parts = tuple(_part_sync(path, unreadable) for path in stores_sync(root))
    left = tuple(_left_behind_sync(path) for path in sorted(root.glob(names.TRASH_GLOB)))
    disk = shutil.disk_usage(root)
    physical = sum(part.physical_bytes for part in (*parts, *left))
    capacity = capacity_bytes
    if capacity is None:
        capacity = int((disk.free + physical) * default_share)
    return Inspection(
        parts=parts + left,
        capacity_bytes=capacity,
        free_bytes=disk.free,
        unreadable=tuple(unreadable),
    )


def _left_behind_sync(path: Path) -> StorePart:
    """What a kill left of a directory that was being removed; the next open removes the rest."""
    nbytes = sum(on_disk(size - RECORD_BYTES) for _, size in _sizes_sync(path))
    return StorePart(
        directory=str(path),
        namespace="",
        namespace_hex="",
        physical_bytes=nbytes,
        dead_bytes=nbytes,
    )


def _part_sync(path: Path, unreadable: list[Skipped]) -> StorePart:
    """One owner's directory. It may change meanwhile: what is counted was there at one moment."""
    found = names.owner_parts(path.name)
    part = StorePart(directory=str(path), namespace="", namespace_hex="", physical_bytes=0)
    if found is None:
        return _unread(part, "another format", unreadable)
    namespace, rank, data_parallel_rank = found
    with root_lock_sync(path.parent):
        owner = owner_sync(path)
    pid = _PID.match(owner)
    part = replace(
        part,
        namespace=_text_sync(path),
        namespace_hex=namespace,
        rank=rank,
        data_parallel_rank=data_parallel_rank,
        owner=owner,
        owner_pid=int(pid[1]) if pid else None,
    )
    try:
        return _counted_sync(part, path)
    except OSError as exc:  # not readable, or cleared by its owner just now
        return _unread(part, f"{exc.strerror} ({exc.filename})", unreadable)


def _counted_sync(part: StorePart, path: Path) -> StorePart:
    blocks, nbytes = defaultdict[int, int](int), defaultdict[int, int](int)
    times: list[float] = []
    padding = dead = 0
    listing = _Listing(current_blocks_sync(path))
    for key, size, used_s in listing.entries_sync():
        payload = size - RECORD_BYTES
        blocks[key[0]] += 1
        nbytes[key[0]] += payload
        padding += on_disk(payload) - size
        dead += RECORD_BYTES
        times = [min(used_s, *times[:1]), max(used_s, *times[1:])] if times else [used_s, used_s]
    every = sum(
        on_disk(size - RECORD_BYTES) for name, size in _sizes_sync(path) if name not in _NOT_COUNTED
    )
    live = sum(nbytes.values()) + padding + dead
    return replace(
        part,
        groups=tuple(
            GroupHoldings(group=group, blocks=blocks[group], payload_bytes=nbytes[group])
            for group in sorted(blocks)
        ),
        physical_bytes=max(every, live),
        padding_bytes=padding,
        dead_bytes=dead + max(every - live, 0),
        oldest_use_s=times[0] if times else None,
        newest_use_s=times[1] if times else None,
        listing=listing,
    )


@dataclass(frozen=True, slots=True)
class _Listing:
    """The blocks of an owner, found anew each time it is iterated."""

    folder: Path | None

    def entries_sync(self) -> Iterator[tuple[names.Key, int, float]]:
        """Key, bytes of the file, Unix time of the last use of each published block."""
        if self.folder is None:
            return
        for path, entry in files_sync(self.folder):
            key = names.key_of(path)
            if key is not None:
                with contextlib.suppress(FileNotFoundError):  # its owner gave it up just now
                    status = entry.stat()
                    if status.st_size > RECORD_BYTES:
                        yield key, status.st_size, status.st_mtime

    def __iter__(self) -> Iterator[BlockPlace]:
        for key, size, _ in self.entries_sync():
            where = f"{self.folder}/{names.path_of(key)}"
            yield BlockPlace(key[0], key[1].hex(), size - RECORD_BYTES, where)


def _sizes_sync(top: Path) -> Iterator[tuple[str, int]]:
    for path, entry in files_sync(top):
        with contextlib.suppress(FileNotFoundError):
            yield path, entry.stat().st_size


def _text_sync(path: Path) -> str:
    """The namespace in words; it is for people, so nothing depends on it."""
    try:
        about: Any = json.loads((path / "about.json").read_text())
        return str(about["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _unread(part: StorePart, problem: str, unreadable: list[Skipped]) -> StorePart:
    unreadable.append(Skipped(directory=part.directory, reason=problem))
    return replace(part, problem=problem)
