"""The books of a root: who uses how much, and what may be deleted to make room.

All of this blocks and happens under the root's lock. The sum of all segment files stays within the
capacity, whoever made them; owners that are alive share it equally.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.errors import CapacityError, StoreUnusableError
from tierkv_backends.nvme.files import close_fd_sync
from tierkv_backends.nvme.lock import LOCK_NAME, is_owned_sync
from tierkv_backends.nvme.options import FREE_SHARE, Options

log = logging.getLogger(__name__)

META_NAME: Final = "meta.json"
SNAPSHOT_NAME: Final = "snapshot"
SEGMENT_GLOB: Final = "seg-*.tkv"
MIN_SEGMENTS: Final = 2
"""One to write while the other is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One directory in the books. live: its owner runs. segments: (last use in s, bytes, path)."""

    directory: Path
    live: bool
    segments: tuple[tuple[float, int, Path], ...]

    @property
    def nbytes(self) -> int:
        """Physical bytes of its segments."""
        return sum(nbytes for _, nbytes, _ in self.segments)


def segment_paths_sync(directory: Path) -> list[Path]:
    """All segment files in a directory, of whatever format, by number."""
    return sorted(directory.glob(SEGMENT_GLOB))


def directories_sync(root: Path) -> list[Path]:
    """All directories in a root, by name."""
    return sorted(path for path in root.iterdir() if path.is_dir())


def survey_sync(root: Path, own: Path | None) -> list[Share]:
    """The books of `root`. `own` counts as live; its lock is ours. None: none of them is ours."""
    shares = []
    for directory in directories_sync(root):
        segments = tuple(stats_sync(segment_paths_sync(directory)))
        live = directory == own or is_owned_sync(directory)
        if live or segments:
            shares.append(Share(directory=directory, live=live, segments=segments))
    if own is not None and all(share.directory != own for share in shares):  # deleted under us
        shares.append(Share(directory=own, live=True, segments=()))
    return shares


def stats_sync(paths: Iterable[Path]) -> Iterable[tuple[float, int, Path]]:
    """(last use in s, bytes, path) of each file that is there."""
    for path in paths:
        try:
            stat = path.stat()
        except FileNotFoundError:  # deleted by somebody else just now
            continue
        yield max(stat.st_mtime, stat.st_atime), stat.st_size, path


def physical_bytes_sync(root: Path) -> int:
    """Bytes of all segment files in a root, of all namespaces and formats."""
    if not root.is_dir():
        return 0
    return sum(
        nbytes
        for directory in directories_sync(root)
        for _, nbytes, _ in stats_sync(segment_paths_sync(directory))
    )


def capacity_sync(options: Options) -> int:
    """The quota in bytes. `CapacityError` where no two segments fit, or the disk is smaller."""
    root, need = options.root, MIN_SEGMENTS * options.segment_bytes
    disk = shutil.disk_usage(root)
    there = physical_bytes_sync(root)
    capacity = options.capacity_bytes
    if capacity is None:
        capacity = int((disk.free + there) * FREE_SHARE)
        log.info(
            "nvme store %s: no capacity given, so it takes %d bytes (%.0f %% of what is free)",
            root,
            capacity,
            FREE_SHARE * 100,
        )
    elif disk.total and capacity > disk.total:
        raise CapacityError(
            f"nvme store {root}: capacity is {capacity} bytes, but the disk has {disk.total}; "
            "write a smaller one"
        )
    if capacity < need:
        raise CapacityError(
            f"nvme store {root}: capacity is {capacity} bytes, below two segments of "
            f"{options.segment_bytes}; write capacity={need} or more, or a smaller segment="
        )
    if disk.free + there < need:
        raise StoreUnusableError(
            f"nvme store {root}: the disk is full ({disk.free} bytes free); two segments of "
            f"{options.segment_bytes} must fit"
        )
    return capacity


def check_share_sync(root: Path, own: Path, *, capacity: int, segment_bytes: int) -> None:
    """`CapacityError` where too many owners are alive for two segments each."""
    live = sum(share.live for share in survey_sync(root, own))
    if capacity // live < MIN_SEGMENTS * segment_bytes:
        raise CapacityError(
            f"nvme store {root}: {live} processes share a capacity of {capacity} bytes, which is "
            f"below two segments of {segment_bytes} each; write capacity="
            f"{live * MIN_SEGMENTS * segment_bytes} or more"
        )


def over_share_sync(root: Path, own: Path, *, capacity: int) -> bool:
    """Whether we hold more than our share now that others came."""
    shares = survey_sync(root, own)
    live = sum(share.live for share in shares)
    return _own(shares, own).nbytes > capacity // live


def _fits(shares: list[Share], own: Path, *, capacity: int, segment_bytes: int) -> bool:
    """Whether one segment more fits our share and the quota, if all cold segments went."""
    live = sum(share.live for share in shares)
    if _own(shares, own).nbytes + segment_bytes > capacity // live:
        return False
    return sum(share.nbytes for share in shares if share.live) + segment_bytes <= capacity


def may_grow_sync(root: Path, own: Path, *, capacity: int, segment_bytes: int) -> bool:
    """Whether one segment more fits quota and disk, if cold segments of dead owners go."""
    shares = survey_sync(root, own)
    if not _fits(shares, own, capacity=capacity, segment_bytes=segment_bytes):
        return False
    cold = sum(share.nbytes for share in shares if not share.live)
    return shutil.disk_usage(root).free + cold >= segment_bytes


def grow_sync(root: Path, path: Path, *, capacity: int, segment_bytes: int) -> bool:
    """Make a preallocated segment file at `path` within the quota; False where none fits.

    Segments of owners that are gone make room first, coldest first. `OSError` (ENOSPC) where the
    disk is full before the quota is.
    """
    shares = survey_sync(root, path.parent)
    if not _fits(shares, path.parent, capacity=capacity, segment_bytes=segment_bytes):
        return False
    total = sum(share.nbytes for share in shares)
    victims = sorted(
        (segment for share in shares if not share.live for segment in share.segments), reverse=True
    )
    while total + segment_bytes > capacity:
        total -= delete_sync(victims.pop())
    while True:
        try:
            return _create_sync(path, segment_bytes)
        except OSError as exc:
            path.unlink(missing_ok=True)
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT) or not victims:
                raise
            delete_sync(victims.pop())


def _own(shares: Iterable[Share], own: Path) -> Share:
    return next(share for share in shares if share.directory == own)


def _create_sync(path: Path, nbytes: int) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        close_fd_sync(fd)
    return True


def delete_sync(segment: tuple[float, int, Path]) -> int:
    """Delete a segment of an owner that is gone, and its directory after the last. Its bytes."""
    _, nbytes, path = segment
    log.info("nvme: deleting %s of an owner that is gone, to make room", path)
    path.unlink(missing_ok=True)
    remove_if_empty_sync(path.parent)
    return nbytes


def remove_if_empty_sync(directory: Path) -> None:
    """Remove the directory of an owner that is gone, where it has no segment."""
    if segment_paths_sync(directory):
        return
    for name in (SNAPSHOT_NAME, META_NAME, LOCK_NAME):
        (directory / name).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError:  # something in it is not ours
        log.info("nvme: %s holds more than our files and stays", directory)


def excess_sync(root: Path, own: Path, *, capacity: int) -> int:
    """Bytes that we must give up at open, after cold segments of dead owners went."""
    shares = survey_sync(root, own)
    live = sum(share.live for share in shares)
    total = sum(share.nbytes for share in shares)
    victims = sorted(
        (segment for share in shares if not share.live for segment in share.segments), reverse=True
    )
    while total > capacity and victims:
        total -= delete_sync(victims.pop())
    return max(_own(shares, own).nbytes - capacity // live, total - capacity)
