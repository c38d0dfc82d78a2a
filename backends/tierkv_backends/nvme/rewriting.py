"""Blocks of a segment that is about to be given up are written again, where they are worth it.

A block lies in both places until the table names the new one: it is not away for an instant. A
process that is killed in between leaves two copies, and the next open serves the later. What is
read is proven before it is written: a block that is not right is not kept.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv import record
from tierkv.backend import BlockBatch, finish
from tierkv.blocks import Keys, Outcome
from tierkv_backends.nvme.counters import Counters
from tierkv_backends.nvme.direct import aligned_buffer
from tierkv_backends.nvme.format import PAGE
from tierkv_backends.nvme.space import Space
from tierkv_backends.nvme.store import Store
from tierkv_backends.nvme.table import Segment, Table, by_segment
from tierkv_backends.nvme.transfer import (
    ReadPart,
    WriteRun,
    Written,
    fill_records,
    plan_extents,
    read_part_sync,
    write_run_sync,
)

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 4 << 20
"""Blocks are copied through a buffer of this many bytes, or of one block where that is larger."""

_EXTENTS: Final = 2
"""Extents that one trip to a thread writes."""


class Rewriter:
    """Copies blocks from a segment that goes into the one that `Space.own` appends to.

    transfer: runs a blocking function where I/O may hang.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        table: Table,
        counters: Counters,
        *,
        transfer: Callable[..., asyncio.Future[Any]],
    ) -> None:
        self._store = store
        self._space = space
        self._table = table
        self._counters = counters
        self._transfer = transfer

    async def keep(self, victim: Segment, keys: Keys) -> None:
        """Write these blocks of `victim` again. Those that cannot be stay where they are.

        If cancelled: the chunk under way is copied to its end, and what was copied is published.
        """
        epoch = self._store.meta.epoch
        for chunk in self._chunks(victim, keys):
            async with self._space.own.lock:  # not while a `clear` is under way
                if self._store.meta.epoch != epoch:
                    return
                if not await finish(self._copy(victim, chunk)):
                    return

    def _chunks(self, victim: Segment, keys: Keys) -> Iterator[Keys]:
        positions, rows = self._in(victim, keys)
        if not len(rows):
            return
        order = np.argsort(victim.rows["offset"][rows], kind="stable")
        ends = np.cumsum(_slots(victim, rows[order]))
        cuts = np.flatnonzero(np.diff((ends - 1) // CHUNK_BYTES)) + 1
        for a, b in itertools.pairwise([0, *cuts.tolist(), len(order)]):
            yield keys.take(positions[order[a:b]])

    def _in(self, segment: Segment, keys: Keys) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Which of these keys lie in a segment now: positions and rows."""
        for number, positions, rows in by_segment(self._table.find(keys)):
            if number == segment.number:
                return positions, rows
        return np.empty(0, np.intp), np.empty(0, np.intp)

    async def _copy(self, victim: Segment, keys: Keys) -> bool:
        """Copy a chunk, or what of it still lies in the victim. False where no more can be."""
        positions, rows = self._in(victim, keys)
        if not len(rows):
            return True
        batch, part = _batch_of(victim, keys.take(positions), rows)
        victim.readers += 1
        try:
            read = await self._transfer(
                partial(
                    read_part_sync,
                    self._store.files,
                    part,
                    batch,
                    _prove_sync,
                    direct=self._store.direct(victim),
                )
            )
        finally:
            victim.readers -= 1
            self._space.released()
        if read.gone:
            await self._space.drop(victim)
            return False
        bad = int((read.outcomes != Outcome.DONE).sum())
        if bad:
            self._counters.read_errors += bad
            log.warning("nvme: %d blocks of %s are not kept: unreadable", bad, victim.path)
        return await self._write(victim, batch.take(part.rows[read.outcomes == Outcome.DONE]))

    async def _write(self, victim: Segment, batch: BlockBatch) -> bool:
        """Write a chunk that was read. False where there is no room, or the disk said no."""
        while len(batch):
            try:
                segment = await self._space.own_room(int(batch.nbytes[0]))
            except OSError as exc:
                self._failed(exc)
                return False
            if segment is None:
                return False
            padded = -(-batch.nbytes // segment.alignment) * segment.alignment
            extents = plan_extents(padded, segment, _EXTENTS)
            planned = extents[-1].last
            run = WriteRun(
                path=segment.path,
                generation=segment.generation,
                sequence=self._space.take_sequence(len(extents)),
                nonce=self._store.nonce,
                link=segment.link,
                extents=extents,
                batch=batch.take(np.arange(planned)),
                padded=padded[:planned],
                seal=None,
            )
            direct = self._store.direct(segment)
            written: Written = await self._transfer(
                partial(write_run_sync, self._store.files, run, direct=direct)
            )
            self._publish(victim, segment, run, written)
            if written.error is not None:
                await self._stop(segment, written)
                return False
            batch = batch.take(np.arange(planned, len(batch)))
        return True

    def _publish(self, victim: Segment, segment: Segment, run: WriteRun, written: Written) -> None:
        """The table names the new place of what still lies in the victim.

        What was deleted or written elsewhere meanwhile stays as it is.
        """
        self._counters.bytes_written += written.nbytes
        if not written.extents:
            return
        last = run.extents[written.extents - 1]
        keys = run.batch.keys.take(np.arange(last.last))
        still, _ = self._in(victim, keys)
        rows = run.rows[still]
        self._table.publish(segment, keys.take(still).hashes, rows)
        segment.end, segment.link = last.start + last.nbytes, written.link
        self._table.touch(segment)
        self._counters.blocks_reinserted += len(rows)
        self._counters.bytes_reinserted += int(rows["stored_bytes"].sum())

    async def _stop(self, segment: Segment, written: Written) -> None:
        assert written.error is not None
        self._failed(written.error)
        if isinstance(written.error, FileNotFoundError):
            await self._space.drop(segment)
        elif written.torn:
            await self._space.seal(self._space.own)  # what lies behind its end is not known

    def _failed(self, error: OSError) -> None:
        self._counters.write_errors += 1
        log.warning("nvme: writing blocks again in %s: %s", self._store.directory, error)


def _prove_sync(batch: BlockBatch) -> NDArray[np.bool_]:
    """See `tierkv.backend.Prove`. Whose it is says the segment, and is proven by who loads it."""
    return record.verify_sync(batch.keys, batch.records, batch.payloads())


def _slots(segment: Segment, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """int64[n]: bytes of the buffer that each of these blocks takes."""
    sizes = segment.rows["stored_bytes"][rows].astype(np.int64)
    slots: NDArray[np.int64] = -(-sizes // PAGE) * PAGE
    return slots


def _batch_of(victim: Segment, keys: Keys, rows: NDArray[np.intp]) -> tuple[BlockBatch, ReadPart]:
    """A batch over a buffer of its own, in the order of the keys, and what to read for it."""
    columns, slots = victim.rows[rows], _slots(victim, rows)
    sizes = columns["stored_bytes"].astype(np.int64)
    ends = np.cumsum(slots)
    memory = memoryview(aligned_buffer(int(ends[-1])))
    batch = BlockBatch(keys, record.blank(len(keys)), memory, ends - slots, sizes)
    order = np.argsort(columns["offset"], kind="stable")
    fill_records(batch, np.arange(len(keys)), columns)
    part = ReadPart(
        path=victim.path,
        rows=order,
        starts=columns["offset"][order].astype(np.int64),
        padded=-(-sizes[order] // victim.alignment) * victim.alignment,
    )
    return batch, part
