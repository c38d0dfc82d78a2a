"""One owner's directory: lock, meta, segments. The blocking half of the backend; no table here."""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import xxhash

from tierkv.backend import BackendContext
from tierkv.errors import CapacityError, StoreUnusableError
from tierkv_backends.nvme import quota
from tierkv_backends.nvme.direct import DirectMode, probe_sync
from tierkv_backends.nvme.engine import Engine
from tierkv_backends.nvme.files import (
    THREADS,
    Files,
    as_aligned,
    close_fd_sync,
    replace_sync,
    write_all_sync,
)
from tierkv_backends.nvme.format import (
    PAGE,
    SegmentHeader,
    Snapshot,
    Trailer,
    join_entries,
    largest_block,
    round_up,
)
from tierkv_backends.nvme.lock import own_sync, root_lock_sync
from tierkv_backends.nvme.options import Direct, EngineName, Options
from tierkv_backends.nvme.quota import META_NAME, SNAPSHOT_NAME
from tierkv_backends.nvme.recovery import Last, Meta, Recovered, has_other_format_sync, recover_sync
from tierkv_backends.nvme.table import Segment

log = logging.getLogger(__name__)

FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT)

MAX_LANES: Final = 3
"""Segments that are written at the same time. One system call keeps a disk busy for some ms; the
others hide what happens between two of them (bench/disk_tier.py)."""

SEGMENTS_PER_LANE: Final = 3
"""A small store has fewer lanes, so that most of it can be given up."""


@dataclass(slots=True, kw_only=True)
class Store:
    """A directory that we own, opened. All methods block: run them in the pool."""

    options: Options
    directory: Path
    meta: Meta
    capacity_bytes: int
    files: Files
    lock_fd: int
    nonce: int
    disk_full: bool = False

    @property
    def lanes(self) -> int:
        """How many segments take extents at the same time."""
        segments = self.capacity_bytes // self.options.segment_bytes
        return max(min(segments // SEGMENTS_PER_LANE, MAX_LANES), 1)

    def segment_path(self, number: int) -> Path:
        """Where segment `number` lies."""
        return self.directory / f"seg-{number:08d}.tkv"

    def grow_sync(self, number: int) -> Segment | None:
        """A new blank segment within the quota, or None."""
        path, nbytes = self.segment_path(number), self.options.segment_bytes
        try:
            with root_lock_sync(self.options.root):
                if not quota.grow_sync(
                    self.options.root, path, capacity=self.capacity_bytes, segment_bytes=nbytes
                ):
                    return None
        except OSError as exc:
            if exc.errno not in FULL_DISK:
                raise
            if not self.disk_full:
                log.warning("nvme store %s: the disk is full; old blocks make room", self.directory)
            self.disk_full = True
            return None
        self.disk_full = False
        alignment = self.files.mode.alignment
        return Segment(number=number, path=path, nbytes=nbytes, alignment=alignment)

    def may_grow_sync(self) -> bool:
        """Whether `grow_sync` would find room within the quota."""
        with root_lock_sync(self.options.root):
            return quota.may_grow_sync(
                self.options.root,
                self.directory,
                capacity=self.capacity_bytes,
                segment_bytes=self.options.segment_bytes,
            )

    def keep_sync(self, segment: Segment) -> bool:
        """Whether a segment that was given up may be used again; its file is deleted if not."""
        with root_lock_sync(self.options.root):
            keep = (
                segment.whole
                and segment.path.exists()
                and not quota.over_share_sync(
                    self.options.root, self.directory, capacity=self.capacity_bytes
                )
            )
            if not keep:
                segment.path.unlink(missing_ok=True)
        if not keep:
            self.files.forget_sync(segment.path)
        return keep

    def direct(self, segment: Segment) -> bool:
        """Whether I/O on a segment passes the page cache by: not if it was written for less."""
        mode = self.files.mode
        return mode.enabled and segment.alignment % mode.alignment == 0

    def use_sync(self, segment: Segment, epoch: int) -> SegmentHeader:
        """Write the header that makes a blank segment usable, whatever it held before."""
        header = SegmentHeader.new(
            alignment=self.files.mode.alignment,
            number=segment.number,
            generation=segment.generation + 1,
            epoch=epoch,
            nbytes=segment.nbytes,
            namespace=self.meta.namespace,
        )
        self._write_sync(segment, header.pack(), 0)
        return header

    def seal_sync(self, segment: Segment, hashes: bytes, sequence: int) -> int:
        """Write footer and trailer of a full segment. Returns the bytes."""
        entries = join_entries(hashes, segment.rows)
        trailer = Trailer(
            generation=segment.generation,
            root=segment.root,
            sequence=sequence,
            n=len(segment.rows),
            end=segment.end,
            footer_sum=xxhash.xxh3_64_intdigest(entries),
        )
        # In one write: the trailer proves the footer, so their order on media does not matter.
        footer = entries.ljust(round_up(len(entries), segment.alignment), b"\0")
        start = segment.nbytes - PAGE - len(footer)
        return self._write_sync(segment, footer + trailer.pack(), start)

    def _write_sync(self, segment: Segment, data: bytes, offset: int) -> int:
        """Write a header, footer or trailer; buffered where direct I/O stopped working."""
        buffers = [as_aligned(data, segment.alignment)]
        direct = self.direct(segment)
        try:
            with self.files.use_sync(segment.path, direct=direct) as fd:
                return write_all_sync(fd, buffers, offset)
        except OSError as exc:
            if not direct or exc.errno != errno.EINVAL:
                raise
        self.files.refuse_direct("writing a header answered EINVAL")
        with self.files.use_sync(segment.path, direct=False) as fd:
            return write_all_sync(fd, buffers, offset)

    def raise_epoch_sync(self) -> None:
        """Make everything older than now unreadable for good, power loss included."""
        meta = replace(self.meta, epoch=self.meta.epoch + 1)
        try:
            replace_sync(self.directory / META_NAME, meta.pack(), durable=True)
        except OSError:
            # It may be there all the same; what is written from now on must be of its epoch.
            if Meta.read_sync(self.directory) == meta:
                self.meta = meta
            raise
        self.meta = meta

    def save_snapshot_sync(self, snapshot: Snapshot) -> None:
        """Leave a snapshot behind; without one the next open reads footers."""
        try:
            replace_sync(self.directory / SNAPSHOT_NAME, snapshot.pack(), durable=False)
        except OSError as exc:
            log.warning("nvme: no snapshot of %s: %s", self.directory, exc)
            (self.directory / SNAPSHOT_NAME).unlink(missing_ok=True)

    def close_sync(self, unlock: bool) -> None:
        """Close descriptors and give the lock back; without `unlock` it ends with the process."""
        self.files.close_sync()
        if unlock:
            close_fd_sync(self.lock_fd)


def engine_sync(options: Options) -> Engine:
    """The engine that `options` ask for. kvikio is loaded for that, and not otherwise."""
    if options.engine is EngineName.THREADS:
        return THREADS
    from tierkv_backends.gds.backend import host_engine_sync

    return host_engine_sync(options)


def open_sync(
    options: Options, context: BackendContext, engine: Engine = THREADS
) -> tuple[Store, Recovered]:
    """Own the directory of this namespace and rank, and read what it holds.

    Raises `StoreError` or `ConfigError`, one line; nothing is held then.
    """
    check_block_bytes(options, context.block_bytes)
    with unusable(options.root):
        _make_root_sync(options.root)
        with root_lock_sync(options.root):
            capacity = quota.capacity_sync(options)
            directory = _directory_sync(options.root, context)
            lock_fd = own_sync(directory)
        try:
            return _open_owned_sync(options, context, engine, directory, capacity, lock_fd)
        except BaseException:
            close_fd_sync(lock_fd)
            raise


def _make_root_sync(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as exc:
        file = next((p for p in (root, *root.parents) if p.exists() and not p.is_dir()), root)
        what = "" if file == root else f"{file} "
        raise StoreUnusableError(
            f"nvme store {root}: {what}is a file, not a directory; write a directory"
        ) from exc


@contextmanager
def unusable(root: Path) -> Iterator[None]:
    """Foreign errors become `StoreUnusableError`, one line."""
    try:
        yield
    except OSError as exc:
        where = f" ({exc.filename})" if exc.filename else ""
        raise StoreUnusableError(f"nvme store {root}: {exc.strerror or exc}{where}") from exc


def check_block_bytes(options: Options, block_bytes: tuple[int, ...]) -> None:
    """`CapacityError` where a block does not fit a segment."""
    largest = max(block_bytes, default=0)
    over = largest - largest_block(options.segment_bytes)
    if over > 0:
        enough = round_up(options.segment_bytes + over, 1 << 20)
        raise CapacityError(
            f"nvme store {options.root}: a block of {largest} bytes does not fit a segment of "
            f"{options.segment_bytes}; write segment={enough} or more"
        )


def _open_owned_sync(
    options: Options,
    context: BackendContext,
    engine: Engine,
    directory: Path,
    capacity: int,
    lock_fd: int,
) -> tuple[Store, Recovered]:
    with root_lock_sync(options.root):
        quota.check_share_sync(
            options.root, directory, capacity=capacity, segment_bytes=options.segment_bytes
        )
    meta = Meta.read_sync(directory)
    if meta is None:
        # It was there a moment ago, or the directory is new. A new one over old segments would
        # begin at the first epoch, and what was cleared since would be served again.
        if (directory / META_NAME).exists() or quota.segment_paths_sync(directory):
            raise StoreUnusableError(f"nvme store {directory}: {META_NAME} cannot be read now")
        meta = _meta_of(context)
        # Durable: after a power loss, one that is there but empty could not be told from ours.
        replace_sync(directory / META_NAME, meta.pack(), durable=True)
    for stale in (*directory.glob("*.tmp"), *directory.glob("probe-*")):
        stale.unlink(missing_ok=True)
    recovered = recover_sync(directory, meta, last=Last.PROVEN)
    mode = _probe_sync(options, directory, recovered)
    mode = replace(mode, alignment=max(mode.alignment, engine.alignment))
    (directory / SNAPSHOT_NAME).unlink(missing_ok=True)
    store = Store(
        options=options,
        directory=directory,
        meta=meta,
        capacity_bytes=capacity,
        files=Files(mode, engine),
        lock_fd=lock_fd,
        nonce=secrets.randbits(64),
    )
    return store, recovered


def _probe_sync(options: Options, directory: Path, recovered: Recovered) -> DirectMode:
    """A full disk with blocks on it is still good for reading, and for writing over old ones."""
    try:
        return probe_sync(directory, options.direct)
    except OSError as exc:
        if exc.errno not in FULL_DISK or not recovered.segments:
            raise
    if options.direct is Direct.ON:
        raise StoreUnusableError(f"nvme store {directory}: direct=on, but the disk is full")
    return DirectMode(enabled=False, reason="the disk was full at open, so it was not tried")


def _meta_of(context: BackendContext) -> Meta:
    return Meta(
        namespace=context.namespace,
        namespace_text=context.namespace_text,
        rank=context.rank,
        data_parallel_rank=context.data_parallel_rank,
        epoch=1,
    )


def _directory_sync(root: Path, context: BackendContext) -> Path:
    """The directory of this owner, made if missing. Foreign ones of its name are passed over."""
    name = f"{context.namespace.hex()[:16]}-r{context.rank}-d{context.data_parallel_rank}"
    number = 0
    while True:
        directory = root / (f"{name}.{number}" if number else name)
        number += 1
        directory.mkdir(exist_ok=True)
        meta = Meta.read_sync(directory)
        if meta is not None and meta.namespace == context.namespace:
            return directory
        there = (directory / META_NAME).exists()
        if not there and not quota.segment_paths_sync(directory):
            return directory
        if there and meta is None and not has_other_format_sync(directory):
            # It may be ours. Passed over now and read again later, it would not know of clears
            # that were written down in another directory meanwhile.
            raise StoreUnusableError(
                f"nvme store {directory}: {META_NAME} cannot be read, so it does not say what was "
                "cleared; restore it, or delete this directory"
            )
        log.warning("nvme: %s has another format or namespace; ignored", directory)
