"""The writing half of the backend: which extents go where, and what is published then."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import BlockBatch, Outcomes, Seal, finish, finished
from tierkv.blocks import HASH_BYTES, Keys, Outcome
from tierkv.errors import StoreBusyError
from tierkv_backends.nvme.counters import Counters
from tierkv_backends.nvme.format import largest_block
from tierkv_backends.nvme.space import Lane, Space
from tierkv_backends.nvme.store import Store
from tierkv_backends.nvme.table import Segment, State, Table, by_segment
from tierkv_backends.nvme.transfer import (
    WriteRun,
    Written,
    is_aligned,
    plan_extents,
    write_run_sync,
)

log = logging.getLogger(__name__)

RUN_EXTENTS: Final = 2
"""Extents that one trip to a thread writes: 32 MiB at most, some 20 ms of a fast disk, so that the
trip costs nothing and a cancelled write ends soon."""


class _Some(NamedTuple):
    """What is left to be written of a batch. sizes: int64[n], stored bytes of all its blocks."""

    batch: BlockBatch
    sizes: NDArray[np.int64]
    seal: Seal | None
    left: NDArray[np.intp]


class Writer:
    """Writes batches into a store's segments, on the loop; the I/O itself goes to a thread.

    transfer: runs a blocking function where I/O may hang. is_open: whether a store is still the
    one that is open.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        table: Table,
        counters: Counters,
        *,
        transfer: Callable[..., asyncio.Future[Any]],
        is_open: Callable[[Store], bool],
    ) -> None:
        self._store = store
        self._space = space
        self._table = table
        self._counters = counters
        self._transfer = transfer
        self._is_open = is_open

    async def write(
        self, batch: BlockBatch, sizes: NDArray[np.int64], seal: Seal | None
    ) -> Outcomes:
        """See `NvmeBackend.write`. sizes: int64[n], stored bytes. seal: makes missing records."""
        store, space = self._store, self._space
        epoch = store.meta.epoch
        outcomes = np.full(len(batch), Outcome.DONE, np.uint8)
        async with space.lane() as lane:
            left = self._unwritten(batch.keys)
            self._counters.bytes_asked += int(sizes[left].sum())
            left = self._declined_if_too_large(sizes, left, outcomes)
            while len(left):
                if not self._is_open(store) or store.meta.epoch != epoch:
                    outcomes[left] = Outcome.DECLINED
                    break
                some = _Some(batch, sizes, seal, left)
                left = await self._write_some(store, space, lane, some, outcomes)
        self._counters.blocks_declined += int((outcomes == Outcome.DECLINED).sum())
        return outcomes

    def _unwritten(self, keys: Keys) -> NDArray[np.intp]:
        """Positions of keys that are nowhere, or in a segment that is about to go."""
        places = self._table.find(keys)
        unwritten = places < 0
        for number, positions, _ in by_segment(places):
            if self._table.segments[number].state is State.RETIRING:
                unwritten[positions] = True
        return np.flatnonzero(unwritten)

    def _declined_if_too_large(
        self, sizes: NDArray[np.int64], left: NDArray[np.intp], outcomes: Outcomes
    ) -> NDArray[np.intp]:
        """Decline blocks that no segment can hold; `open` refused such layouts already."""
        fits = sizes[left] <= largest_block(self._store.options.segment_bytes)
        if fits.all():
            return left
        outcomes[left[~fits]] = Outcome.DECLINED
        return left[fits]

    async def _write_some(
        self, store: Store, space: Space, lane: Lane, some: _Some, outcomes: Outcomes
    ) -> NDArray[np.intp]:
        """Write as many blocks as one run and segment take; the positions still to be written."""
        left, batch = some.left, some.batch
        sizes = some.sizes[left]
        try:
            segment = await space.room(lane, int(sizes[0]))
        except StoreBusyError as exc:
            log.warning("nvme: no segment could be made: %s", exc)
            segment = None
        except OSError as exc:
            return self._failed(store, left, outcomes, exc)
        if segment is None:
            outcomes[left] = Outcome.DECLINED
            return left[:0]
        padded = -(-sizes // segment.alignment) * segment.alignment
        extents = plan_extents(padded, segment, RUN_EXTENTS)
        planned = extents[-1].last
        run = WriteRun(
            path=segment.path,
            generation=segment.generation,
            sequence=space.take_sequence(len(extents)),
            nonce=store.nonce,
            link=segment.link,
            extents=extents,
            batch=batch if planned == len(batch) else batch.take(left[:planned]),
            padded=padded[:planned],
            seal=some.seal,
        )
        direct = store.direct(segment) and aligned(store, self._counters, batch)
        done, cancelled = await self._write_run(store, space, lane, segment, run, direct)
        if cancelled:
            raise asyncio.CancelledError
        if done.error is not None:
            published = extents[done.extents - 1].last if done.extents else 0
            return self._failed(store, left[published:], outcomes, done.error)
        return left[planned:]

    def _failed(
        self, store: Store, left: NDArray[np.intp], outcomes: Outcomes, error: OSError
    ) -> NDArray[np.intp]:
        """What is left cannot be written; nothing is left then."""
        self._counters.write_errors += 1
        log.warning("nvme: writing to %s failed: %s", store.directory, error)
        outcomes[left] = Outcome.FAILED
        return left[:0]

    async def _write_run(
        self,
        store: Store,
        space: Space,
        lane: Lane,
        segment: Segment,
        run: WriteRun,
        direct: bool,
    ) -> tuple[Written, bool]:
        """Write extents and publish those that are in place; and whether it was cancelled."""
        written, cancelled = await finished(
            self._transfer(partial(write_run_sync, store.files, run, direct=direct))
        )
        if not self._is_open(store):  # it hung, and we were closed: the next open finds it
            gone = OSError(errno.ESHUTDOWN, "closed while it hung")
            return Written(link=0, error=gone), cancelled
        if written.extents:
            last = run.extents[written.extents - 1]
            self._table.publish(
                segment, run.batch.keys.hashes[: last.last * HASH_BYTES], run.rows[: last.last]
            )
            segment.end = last.start + last.nbytes
            segment.link = written.link
            self._counters.bytes_saved += int(run.rows["stored_bytes"][: last.last].sum())
        self._table.touch(segment)
        self._counters.bytes_written += written.nbytes
        if isinstance(written.error, FileNotFoundError):
            await finish(space.drop(segment))
        elif written.torn:
            await finish(space.seal(lane))  # what lies behind its end is not known
        return written, cancelled


def aligned(store: Store, counters: Counters, batch: BlockBatch) -> bool:
    """Whether the arena is fit for direct I/O; counted and said once where it is not."""
    if is_aligned(batch, store.files.mode.memory_alignment):
        return True
    if not counters.unaligned_batches:
        log.warning("nvme: the arena is not aligned for direct I/O; buffered for such batches")
    counters.unaligned_batches += 1
    return False
