"""Blocks between arena and segments. Runs in the pool's threads; touches no table."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import BlockBatch, Outcomes
from tierkv.blocks import Outcome
from tierkv_backends.nvme.files import (
    MAX_VECTORS,
    Files,
    as_aligned,
    read_into_sync,
    write_all_sync,
)
from tierkv_backends.nvme.format import (
    ENTRY_BYTES,
    PAGE,
    ROW_DTYPE,
    ExtentHeader,
    Rows,
    extent_header_bytes,
    join_entries,
    round_up,
)
from tierkv_backends.nvme.table import Segment

log = logging.getLogger(__name__)

EXTENT_BYTES: Final = 2 << 20
"""Blocks are coalesced up to this: 64 KiB blocks in 2 MiB writes reach the limit of the disks
seen so far (DESIGN section 4)."""

EXTENT_BLOCKS: Final = 1000
"""Fewer than IOV_MAX, so that the payload of an extent is one system call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """An extent to be written. rows: positions in the batch. starts: of payloads in the segment."""

    start: int
    nbytes: int
    rows: NDArray[np.intp]
    starts: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRun:
    """Extents for one segment, one behind the other; the chain goes on from `link`."""

    path: Path
    alignment: int
    generation: int
    sequence: int
    nonce: int
    link: int
    extents: tuple[Extent, ...]


@dataclass(slots=True, kw_only=True)
class Written:
    """How far a run came. blocks: hashes and rows of each extent in place. error: what stopped it.

    torn: a header may or may not be on media, so nothing may be written at that place before the
    segment is used anew.
    """

    link: int
    blocks: list[tuple[bytes, Rows]] = field(default_factory=list)
    nbytes: int = 0
    error: OSError | None = None
    torn: bool = False


def plan_extents(
    padded: NDArray[np.int64], rows: NDArray[np.intp], segment: Segment
) -> Iterator[Extent]:
    """Cut blocks of `padded` bytes on media into extents that follow each other in `segment`.

    Ends where the segment is full; blocks beyond are not planned.
    """
    sizes = padded.tolist()
    start, first = segment.end, 0
    while first < len(sizes):
        room = segment.room(first + 1, end=start)
        n, total = 0, 0
        for size in sizes[first : first + EXTENT_BLOCKS]:
            if n and total + size > EXTENT_BYTES:
                break
            need = round_up(extent_header_bytes(n + 1) + total + size, PAGE)
            if need > room - n * ENTRY_BYTES:
                break
            n, total = n + 1, total + size
        if not n:
            return
        picked = padded[first : first + n]
        header = extent_header_bytes(n)
        yield Extent(
            start=start,
            nbytes=round_up(header + total, PAGE),
            rows=rows[first : first + n],
            starts=start + header + np.cumsum(picked) - picked,
        )
        start += round_up(header + total, PAGE)
        first += n


def rows_of(batch: BlockBatch, extent: Extent) -> tuple[bytes, Rows]:
    """Hashes and rows of an extent's blocks."""
    records = np.ascontiguousarray(batch.records[extent.rows])
    rows = np.empty(len(records), ROW_DTYPE)
    for name in ROW_DTYPE.names or ():
        rows[name] = extent.starts if name == "offset" else records[name]
    return batch.keys.take(extent.rows).hashes, rows


def is_aligned(batch: BlockBatch, alignment: int) -> bool:
    """Whether the arena starts where direct I/O may read and write it."""
    if not batch.arena.nbytes:
        return True
    address = np.frombuffer(batch.arena, np.uint8).ctypes.data
    return address % alignment == 0


def write_run_sync(files: Files, run: WriteRun, batch: BlockBatch, *, direct: bool) -> Written:
    """Write extents, each payload before its header, until one fails."""
    done = Written(link=run.link)
    try:
        with files.use_sync(run.path, direct=direct) as fd:
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the segment was deleted", str(run.path))
            for extent in run.extents:
                _write_extent_sync(fd, run, batch, extent, done)
    except OSError as exc:
        if direct and exc.errno == errno.EINVAL and not done.torn:
            files.refuse_direct("a write answered EINVAL")
            return _continue_buffered_sync(files, run, batch, done)
        done.error = exc
    return done


def _continue_buffered_sync(
    files: Files, run: WriteRun, batch: BlockBatch, done: Written
) -> Written:
    rest = WriteRun(
        path=run.path,
        alignment=run.alignment,
        generation=run.generation,
        sequence=run.sequence + len(done.blocks),
        nonce=run.nonce,
        link=done.link,
        extents=run.extents[len(done.blocks) :],
    )
    again = write_run_sync(files, rest, batch, direct=False)
    again.blocks = done.blocks + again.blocks
    again.nbytes += done.nbytes
    return again


def _write_extent_sync(
    fd: int, run: WriteRun, batch: BlockBatch, extent: Extent, done: Written
) -> None:
    hashes, rows = rows_of(batch, extent)
    header, link = ExtentHeader(
        generation=run.generation,
        sequence=run.sequence + len(done.blocks),
        nonce=run.nonce,
        link=done.link,
        start=extent.start,
        nbytes=extent.nbytes,
        n=len(rows),
    ).pack(join_entries(hashes, rows))
    arena, unit = batch.arena, run.alignment
    payload = [
        arena[a : a + round_up(n, unit)]
        for a, n in zip(
            batch.offsets[extent.rows].tolist(), rows["stored_bytes"].tolist(), strict=True
        )
    ]
    done.nbytes += write_all_sync(fd, payload, int(extent.starts[0]))
    done.torn = True
    done.nbytes += write_all_sync(fd, [as_aligned(header, PAGE)], extent.start)
    done.torn = False
    done.link = link
    done.blocks.append((hashes, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """Blocks of one segment, in the order of media. rows: positions in the batch.

    starts: of payloads in the segment. padded: their bytes on media.
    """

    path: Path
    rows: NDArray[np.intp]
    starts: NDArray[np.int64]
    padded: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class ReadDone:
    """outcomes: of the part's rows. gone: the segment's file is not there any more."""

    outcomes: Outcomes
    gone: bool = False


def read_part_sync(files: Files, part: ReadPart, batch: BlockBatch, *, direct: bool) -> ReadDone:
    """Fill the slots of a part. Neighbours on media share a system call."""
    done = ReadDone(outcomes=np.full(len(part.rows), Outcome.FAILED, np.uint8))
    try:
        with files.use_sync(part.path, direct=direct) as fd:
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "deleted", str(part.path))
            for first, last in _runs(part):
                _read_run_sync(fd, part, batch, slice(first, last), done.outcomes)
    except FileNotFoundError:
        done.gone = True
        done.outcomes[:] = Outcome.MISSING
    except OSError as exc:
        if direct and exc.errno == errno.EINVAL:
            files.refuse_direct("a read answered EINVAL")
            return read_part_sync(files, part, batch, direct=False)
        log.warning("nvme: reading %s failed: %s", part.path, exc)
    return done


def _runs(part: ReadPart) -> Iterator[tuple[int, int]]:
    starts, padded = part.starts.tolist(), part.padded.tolist()
    first = total = 0
    for i, (start, nbytes) in enumerate(zip(starts, padded, strict=True)):
        joins = i > first and starts[i - 1] + padded[i - 1] == start
        if i > first and not (joins and total + nbytes <= EXTENT_BYTES and i - first < MAX_VECTORS):
            yield first, i
            first, total = i, 0
        total += nbytes
    if starts:
        yield first, len(starts)


def _read_run_sync(
    fd: int, part: ReadPart, batch: BlockBatch, run: slice, outcomes: Outcomes
) -> None:
    slots = batch.offsets[part.rows[run]].tolist()
    padded = part.padded[run]
    buffers = [batch.arena[a : a + n] for a, n in zip(slots, padded.tolist(), strict=True)]
    start = int(part.starts[run.start])
    try:
        got = read_into_sync(fd, buffers, start)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise
        if len(buffers) == 1:
            log.warning(
                "nvme: reading %d bytes at %d of %s: %s", buffers[0].nbytes, start, part.path, exc
            )
            return
        # One bad sector must not fail its neighbours.
        for i in range(run.start, run.stop):
            _read_run_sync(fd, part, batch, slice(i, i + 1), outcomes)
        return
    whole = np.cumsum(padded) <= got
    outcomes[run] = np.where(whole, Outcome.DONE, Outcome.MISSING)


def fill_records(batch: BlockBatch, positions: NDArray[np.intp], rows: Rows) -> None:
    """Write the records of blocks at `positions` into the batch."""
    records = batch.records[positions]
    for name in ROW_DTYPE.names or ():
        if name != "offset":
            records[name] = rows[name]
    hashes = np.frombuffer(batch.keys.hashes, records.dtype["hash"])
    records["hash"] = hashes[positions]
    batch.records[positions] = records


def split_part(part: ReadPart, pieces: int) -> Sequence[ReadPart]:
    """Cut a part into at most `pieces` of about equal bytes, for as many threads."""
    n, total = len(part.rows), np.cumsum(part.padded)
    cuts = np.searchsorted(total, total[-1] * np.arange(1, pieces) / pieces) + 1
    edges = sorted({0, n, *cuts.tolist()})
    return [
        ReadPart(
            path=part.path, rows=part.rows[a:b], starts=part.starts[a:b], padded=part.padded[a:b]
        )
        for a, b in itertools.pairwise(edges)
    ]
