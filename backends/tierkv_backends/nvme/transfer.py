"""Blocks between arena and segments. Runs in the pool's threads; touches no table."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import BlockBatch, DeviceMemory, Outcomes, Prove, Seal
from tierkv.blocks import HASH_BYTES, Outcome
from tierkv_backends.nvme.direct import aligned_buffer
from tierkv_backends.nvme.engine import Memory
from tierkv_backends.nvme.files import MAX_VECTORS, Files, write_all_sync
from tierkv_backends.nvme.format import (
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

EXTENT_BYTES: Final = 16 << 20
"""Blocks are coalesced up to this, header and payload in one system call. Large calls cost less
CPU time, and after each of them a thread of a busy process waits for the GIL."""

EXTENT_BLOCKS: Final = 1000
"""Fewer than IOV_MAX, so that the payload of an extent is one system call."""


GAP_BYTES: Final = 64 << 10
"""No more than this between two blocks is read over, instead of asking the disk once more: at
1 GB/s it takes 66 us, about what another call does. An estimate: bench/ does not measure it."""

_SCRATCH: Final = memoryview(aligned_buffer(GAP_BYTES))
"""Where gaps are read to, by all threads. Nobody reads it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """An extent to be written at `start`: the blocks `first` to `last` (not included) of a run."""

    start: int
    nbytes: int
    first: int
    last: int

    @property
    def payload_start(self) -> int:
        """Where the first block goes."""
        return self.start + extent_header_bytes(self.last - self.first)


@dataclass(slots=True, kw_only=True)
class WriteRun:
    """Extents for one segment, one behind the other; the chain goes on from `link`.

    batch: its blocks. padded: int64[n], their bytes on media. seal: makes the batch's records,
    where they are not made yet. rows: of all blocks, as they are published; made with the records.
    """

    path: Path
    generation: int
    sequence: int
    nonce: int
    link: int
    extents: Sequence[Extent]
    batch: BlockBatch
    padded: NDArray[np.int64]
    seal: Seal | None
    rows: Rows = field(default_factory=lambda: np.empty(0, ROW_DTYPE))

    def make_rows_sync(self) -> None:
        """Have the blocks sealed; reads their payload."""
        if self.seal is not None:
            self.seal(self.batch)
            self.seal = None
        self.rows = rows_of(self.batch, self.padded, self.extents)

    def header(self, i: int, link: int) -> tuple[bytes, int]:
        """The header of extent i behind one with checksum `link`, and its own checksum."""
        extent = self.extents[i]
        a, b = extent.first, extent.last
        return ExtentHeader(
            generation=self.generation,
            sequence=self.sequence + i,
            nonce=self.nonce,
            link=link,
            start=extent.start,
            nbytes=extent.nbytes,
            n=b - a,
        ).pack(join_entries(self._hashes(a, b), self.rows[a:b]))

    def _hashes(self, first: int, last: int) -> bytes:
        return self.batch.keys.hashes[first * HASH_BYTES : last * HASH_BYTES]


@dataclass(slots=True, kw_only=True)
class Written:
    """How far a run came. extents: how many are in place. error: what stopped it.

    torn: a header may or may not be on media, so nothing may be written at that place before the
    segment is used anew.
    """

    link: int
    extents: int = 0
    nbytes: int = 0
    error: OSError | None = None
    torn: bool = False


def plan_extents(padded: NDArray[np.int64], segment: Segment, limit: int) -> list[Extent]:
    """Cut blocks of `padded` bytes on media into extents that follow each other in `segment`.

    At most `limit` of them, and no more than there is room for: blocks beyond are not planned.
    """
    extents: list[Extent] = []
    ends = np.cumsum(padded)
    start, first, before = segment.end, 0, 0
    while first < len(padded) and len(extents) < limit:
        n = int(np.searchsorted(ends, before + EXTENT_BYTES, "right")) - first
        n = min(max(n, 1), EXTENT_BLOCKS)
        taken = partial(_extent_bytes, ends, first, before)
        over = partial(_over, segment, start, first, taken)
        n = bisect_right(range(1, n + 1), 0, key=over)
        if not n:
            break
        nbytes = taken(n)
        extents.append(Extent(start, nbytes, first, first + n))
        start, first, before = start + nbytes, first + n, int(ends[first + n - 1])
    return extents


def _over(segment: Segment, start: int, first: int, taken: Callable[[int], int], n: int) -> int:
    """Bytes by which n blocks from `first` on do not fit behind `start`; 0 or less: they do."""
    return taken(n) - segment.room(first + n, end=start)


def _extent_bytes(ends: NDArray[np.int64], first: int, before: int, n: int) -> int:
    return round_up(extent_header_bytes(n) + int(ends[first + n - 1]) - before, PAGE)


def rows_of(batch: BlockBatch, padded: NDArray[np.int64], extents: Sequence[Extent]) -> Rows:
    """The rows of a batch that goes into `extents`, without gaps."""
    rows = np.empty(len(batch), ROW_DTYPE)
    for name in ROW_DTYPE.names or ():
        if name != "offset":
            rows[name] = batch.records[name]
    starts = np.cumsum(padded) - padded
    for extent in extents:
        inside = starts[extent.first : extent.last]
        rows["offset"][extent.first : extent.last] = inside - inside[0] + extent.payload_start
    return rows


def is_aligned(batch: BlockBatch, alignment: int) -> bool:
    """Whether the arena starts where direct I/O may read and write it."""
    if not batch.arena.nbytes:
        return True
    arena: Memory = batch.arena
    if isinstance(arena, DeviceMemory):
        return arena.address % alignment == 0
    address = np.frombuffer(arena, np.uint8).ctypes.data
    return address % alignment == 0


def vectors(
    arena: Memory, starts: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> Sequence[Memory]:
    """Parts of the arena; neighbours in memory are one."""
    cuts = np.flatnonzero(starts[1:] != starts[:-1] + nbytes[:-1]) + 1
    firsts = [0, *cuts.tolist()]
    begins = starts[firsts]
    lengths = np.add.reduceat(nbytes, firsts)
    return [arena[a : a + n] for a, n in zip(begins.tolist(), lengths.tolist(), strict=True)]


def write_run_sync(files: Files, run: WriteRun, *, direct: bool) -> Written:
    """Seal what is not sealed; write extents, one after the other, until one fails."""
    done = Written(link=run.link)
    run.make_rows_sync()
    _go_on_sync(files, run, done, direct=direct)
    if direct and done.error is not None and done.error.errno == errno.EINVAL:
        files.refuse_direct("a write answered EINVAL")
        done.error = None
        _go_on_sync(files, run, done, direct=False)
    return done


def _go_on_sync(files: Files, run: WriteRun, done: Written, *, direct: bool) -> None:
    """Write what is not in place yet."""
    page = aligned_buffer(max(extent_header_bytes(e.last - e.first) for e in run.extents))
    try:
        with files.use_sync(run.path, direct=direct) as fd:
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the segment was deleted", str(run.path))
            while done.extents < len(run.extents):
                _write_extent_sync(files, fd, run, done, memoryview(page))
    except OSError as exc:
        # Its frames refer to `done` and the arena: a ring that would keep both until a collection.
        done.error = exc.with_traceback(None)


def _write_extent_sync(
    files: Files, fd: int, run: WriteRun, done: Written, page: memoryview
) -> None:
    extent = run.extents[done.extents]
    blocks = slice(extent.first, extent.last)
    payload = vectors(run.batch.arena, run.batch.offsets[blocks], run.padded[blocks])
    header, link = run.header(done.extents, done.link)
    page[: len(header)] = header
    head = page[: len(header)]
    if files.engine.writes_in_order:
        _write_at_once_sync(fd, head, payload, extent.start, done)
    else:
        done.nbytes += files.engine.write_all_sync(fd, payload, extent.payload_start)
        done.torn = True
        done.nbytes += write_all_sync(fd, [head], extent.start)
    done.torn = False
    done.link = link
    done.extents += 1


def _write_at_once_sync(
    fd: int, head: memoryview, payload: Sequence[Memory], start: int, done: Written
) -> None:
    """Header and payload in one call. After an error there is no header, or `done.torn` is set."""
    done.torn = True
    try:
        extent: list[Any] = [head, *payload]  # in order, so none of it is a GPU's
        done.nbytes += write_all_sync(fd, extent, start)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # then it is tried again, as a whole, without direct I/O
            head[:PAGE] = bytes(PAGE)
            write_all_sync(fd, [head[:PAGE]], start)
            done.torn = False
        raise


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


def read_part_sync(
    files: Files, part: ReadPart, batch: BlockBatch, prove: Prove | None, *, direct: bool
) -> ReadDone:
    """Fill the slots of a part and prove them. Neighbours on media share a system call."""
    done = _read_sync(files, part, batch, direct=direct)
    if prove is not None:
        read = np.flatnonzero(done.outcomes == Outcome.DONE)
        if len(read):
            good = prove(batch.take(part.rows[read]))
            done.outcomes[read[~good]] = Outcome.CORRUPT
    return done


def _read_sync(files: Files, part: ReadPart, batch: BlockBatch, *, direct: bool) -> ReadDone:
    done = ReadDone(outcomes=np.full(len(part.rows), Outcome.FAILED, np.uint8))
    try:
        with files.use_sync(part.path, direct=direct) as fd:
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "deleted", str(part.path))
            gap_bytes = GAP_BYTES if files.engine.reads_over_gaps else 0
            for first, last in _runs(part, gap_bytes):
                _read_run_sync(files, fd, part, batch, slice(first, last), done.outcomes)
    except FileNotFoundError:
        done.gone = True
        done.outcomes[:] = Outcome.MISSING
    except OSError as exc:
        if direct and exc.errno == errno.EINVAL:
            files.refuse_direct("a read answered EINVAL")
            return _read_sync(files, part, batch, direct=False)
        log.warning("nvme: reading %s failed: %s", part.path, exc)
    return done


def _runs(part: ReadPart, gap_bytes: int) -> Iterator[tuple[int, int]]:
    """Blocks that are read together: with no more than `gap_bytes` of something else between."""
    starts, ends = part.starts, part.starts + part.padded
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > gap_bytes) + 1
    for first, last in itertools.pairwise([0, *cuts.tolist(), len(starts)]):
        while first < last:
            # Within EXTENT_BYTES, and a vector for each block and for each gap.
            end = int(np.searchsorted(ends[first:last], starts[first] + EXTENT_BYTES, "right"))
            end = first + min(max(end, 1), MAX_VECTORS // 2)
            yield first, min(end, last)
            first = min(end, last)


def _buffers_of(part: ReadPart, batch: BlockBatch, run: slice) -> Sequence[Memory]:
    """Where the blocks go, with room for what lies between them."""
    starts, padded, slots = part.starts[run], part.padded[run], batch.offsets[part.rows[run]]
    gaps = starts[1:] - starts[:-1] - padded[:-1]
    if not gaps.any():
        return vectors(batch.arena, slots, padded)
    firsts = [0, *(np.flatnonzero(gaps) + 1).tolist()]
    parts: list[Memory] = []
    for a, b in itertools.pairwise([*firsts, len(slots)]):
        if a:
            parts.append(_SCRATCH[: int(gaps[a - 1])])
        parts += vectors(batch.arena, slots[a:b], padded[a:b])
    return parts


def _read_run_sync(
    files: Files, fd: int, part: ReadPart, batch: BlockBatch, run: slice, outcomes: Outcomes
) -> None:
    buffers = _buffers_of(part, batch, run)
    start = int(part.starts[run.start])
    try:
        got = files.engine.read_into_sync(fd, buffers, start)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise
        if run.stop - run.start == 1:
            log.warning(
                "nvme: reading %d bytes at %d of %s: %s", buffers[0].nbytes, start, part.path, exc
            )
            return
        # One bad sector must not fail its neighbours.
        for i in range(run.start, run.stop):
            _read_run_sync(files, fd, part, batch, slice(i, i + 1), outcomes)
        return
    whole = part.starts[run] + part.padded[run] - start <= got
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
