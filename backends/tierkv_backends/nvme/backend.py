"""`NvmeBackend`: batches in, batches out. Tables here on the loop, I/O in the pool's threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import (
    Backend,
    BackendContext,
    BlockBatch,
    Outcomes,
    Prove,
    Seal,
    Usage,
    Verification,
    finish,
    in_thread,
)
from tierkv.blocks import Keys, Outcome
from tierkv.errors import StoreError, StoreUnusableError
from tierkv.urls import TierURL
from tierkv_backends.nvme import quota
from tierkv_backends.nvme.assemble import Assembled, assemble_sync, snapshot_of
from tierkv_backends.nvme.counters import Counters
from tierkv_backends.nvme.engine import Engine
from tierkv_backends.nvme.inspection import FromOutside
from tierkv_backends.nvme.options import Options
from tierkv_backends.nvme.rewriting import Rewriter
from tierkv_backends.nvme.space import Space
from tierkv_backends.nvme.store import Store, engine_sync, open_sync, unusable
from tierkv_backends.nvme.table import Segment, Table, by_segment
from tierkv_backends.nvme.transfer import (
    ReadDone,
    ReadPart,
    fill_records,
    read_part_sync,
    split_part,
)
from tierkv_backends.nvme.verify import verify_root_sync
from tierkv_backends.nvme.writing import Writer, aligned

log = logging.getLogger(__name__)

_T = TypeVar("_T")

SPLIT_BYTES: Final = 512 << 10
"""Reads of less than this stay in one thread: a trip costs as much as reading 64 KiB."""

CONTROL_THREADS: Final = 4
"""Threads for what moves no blocks, so that hanging reads and writes do not stand in its way: one
for each lane that begins a segment, and one for whoever makes room."""

CLOSE_WAIT_S: Final = 5.0
"""How long `close` waits for a write under way. A disk that works ends one in milliseconds."""


class NvmeBackend(FromOutside, Backend):
    """``nvme:///DIR?capacity=500GiB``: log-structured segments on a local disk.

    Options: `capacity`, hard quota of DIR in physical bytes (default: a fifth of what is free);
    `segment`, bytes of a segment file (default 256MiB); `direct`, ``auto``, ``on`` or ``off``;
    `threads`, size of the I/O pool (default 4); `engine`, ``threads`` or ``kvikio``. See
    `tierkv_backends.nvme.format` for what lies on media, and `tierkv_backends.nvme.space` for how
    room is made.
    """

    scheme = "nvme"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._counters = Counters()
        self._pool: ThreadPoolExecutor | None = None
        self._control: ThreadPoolExecutor | None = None
        self._opened: Store | None = None
        self._table = Table()
        self._reads = 0
        self._space: Space | None = None
        self._writer: Writer | None = None
        self._ending = asyncio.Lock()

    @classmethod
    def from_url(cls, url: TierURL) -> NvmeBackend:
        """`ConfigError` for an unknown or bad option."""
        return cls(Options.parse(url))

    # Life. -------------------------------------------------------------------------------------

    async def open(self, context: BackendContext) -> None:
        """Own this namespace's and rank's directory, and read its index. No payload is read.

        `StoreBusyError` where another process has it, `StoreUnusableError` where the directory is
        unwritable, full or no directory, `CapacityError` where two segments do not fit.
        """
        if self._opened is not None:
            raise StoreError(f"nvme store {self._options.root} is open already")
        self._pool = ThreadPoolExecutor(self._options.threads, "tierkv-nvme")
        self._control = ThreadPoolExecutor(CONTROL_THREADS, "tierkv-nvme-control")
        try:
            await finish(self._take_over(context))
        except BaseException:
            await self.close()
            raise

    async def _take_over(self, context: BackendContext) -> None:
        engine = await self._run(self._engine_sync)
        try:
            store, recovered = await self._run(open_sync, self._options, context, engine)
        except BaseException:
            engine.close_sync()
            raise
        self._opened = store
        assembled: Assembled = await self._run(assemble_sync, store, recovered)
        self._table = assembled.table
        self._space = Space(
            store,
            assembled,
            self._counters,
            run=self._run,
            retire=context.retire,
            worth=context.worth,
        )
        self._space.rewrite = Rewriter(
            store, self._space, self._table, self._counters, transfer=self._transfer
        ).keep
        self._space.sequence = recovered.sequence
        self._writer = Writer(
            store,
            self._space,
            self._table,
            self._counters,
            transfer=self._transfer,
            is_open=lambda store: self._opened is store,
        )

    def _engine_sync(self) -> Engine:
        """Who moves payload."""
        return engine_sync(self._options)

    async def close(self) -> None:
        """Leave a snapshot behind and give everything back.

        A write that hangs is waited for `CLOSE_WAIT_S`; after that there is no snapshot, and the
        directory stays locked until the process ends, since that thread may still write to it.
        """
        async with self._ending:  # who closes again waits, and takes no pool away from the first
            await finish(self._close())

    async def _close(self) -> None:
        store, space = self._opened, self._space
        self._opened = self._space = self._writer = None
        if space is not None:
            await space.close(CLOSE_WAIT_S)
        idle = space is None or await self._is_idle(space)
        if store is not None:
            if idle and space is not None and not space.partial:
                await self._run(
                    store.save_snapshot_sync, snapshot_of(self._table, store, space.sequence)
                )
            await self._run(store.close_sync, idle)
        for pool in (self._pool, self._control):
            if pool is not None:
                pool.shutdown(wait=False)
        self._pool = self._control = None
        self._table = Table()

    async def _is_idle(self, space: Space) -> bool:
        try:
            async with asyncio.timeout(CLOSE_WAIT_S), space.all_lanes():
                return True
        except TimeoutError:
            log.warning("nvme store %s: a write hangs; closing without it", self._options.root)
            return False

    def _run(self, function: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
        """Run a blocking function that moves no blocks, where no hanging disk I/O is in its way."""
        return self._submit(self._control, function, *arguments)

    def _transfer(self, function: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
        """Run a blocking function that works in a batch's buffers. Wrap it in `finish`."""
        return self._submit(self._pool, function, *arguments)

    def _submit(
        self, pool: ThreadPoolExecutor | None, function: Callable[..., _T], *arguments: object
    ) -> asyncio.Future[_T]:
        if pool is None:
            raise StoreError(f"nvme store {self._options.root} is closed")
        return in_thread(pool, function, *arguments)

    def _live(self) -> tuple[Store, Space]:
        if self._opened is None or self._space is None:
            raise StoreError(f"nvme store {self._options.root} is not open")
        return self._opened, self._space

    def _writing(self) -> Writer:
        self._live()
        assert self._writer is not None  # it comes and goes with the store
        return self._writer

    # Writing. ----------------------------------------------------------------------------------

    async def write(self, batch: BlockBatch) -> Outcomes:
        """DONE, DECLINED (no room, cleared meanwhile) or FAILED (the disk said no) per key.

        DONE means readable after SIGKILL. Blocks are coalesced into extents; writes that overlap
        go into different segments.
        """
        return await self._writing().write(
            batch, batch.records["stored_bytes"].astype(np.int64), None
        )

    async def write_sealing(self, batch: BlockBatch, seal: Seal) -> Outcomes:
        """`write` of blocks that are sealed in the thread that writes them."""
        return await self._writing().write(batch, batch.nbytes, seal)

    # Reading. ----------------------------------------------------------------------------------

    async def read(self, batch: BlockBatch) -> Outcomes:
        """DONE, MISSING (not here, another length, cut short) or FAILED (read error) per key.

        Neighbours on media share a system call; batches of some size are spread over the threads.
        """
        return await self._read(batch, None)

    async def read_proving(self, batch: BlockBatch, prove: Prove) -> Outcomes:
        """`read`, and CORRUPT where a block is not proven in the thread that read it."""
        return await self._read(batch, prove)

    async def _read(self, batch: BlockBatch, prove: Prove | None) -> Outcomes:
        store, space = self._live()
        epoch = store.meta.epoch
        outcomes = np.full(len(batch), Outcome.MISSING, np.uint8)
        places = self._table.find(batch.keys)
        parts: list[tuple[Segment, ReadPart]] = []
        for number, positions, rows in by_segment(places):
            segment = self._table.segments[number]
            if not space.keeps:
                self._table.touch(segment)
            part = self._part(segment, batch, positions, rows)
            parts += [(segment, piece) for piece in self._pieces(part)]
        for segment, _ in parts:
            segment.readers += 1
        self._reads += 1
        try:
            done = await self._read_parts(store, batch, parts, prove)
        finally:
            self._reads -= 1
            for segment, _ in parts:
                segment.readers -= 1
            space.released()
        if store.meta.epoch != epoch:  # cleared meanwhile: whatever was read is nobody's
            return outcomes
        for (segment, part), result in zip(parts, done, strict=True):
            outcomes[part.rows] = result.outcomes
            if self._opened is store:
                await self._note(space, batch, segment, part, result)
        return outcomes

    def _part(
        self,
        segment: Segment,
        batch: BlockBatch,
        positions: NDArray[np.intp],
        rows: NDArray[np.intp],
    ) -> ReadPart:
        """The blocks of one segment whose length is right, as they lie on media; records filled."""
        columns = segment.rows[rows]
        fits = columns["stored_bytes"] == batch.nbytes[positions]
        order = np.argsort(columns["offset"][fits], kind="stable")
        columns, positions = columns[fits][order], positions[fits][order]
        fill_records(batch, positions, columns)
        sizes = columns["stored_bytes"].astype(np.int64)
        return ReadPart(
            path=segment.path,
            rows=positions,
            starts=columns["offset"].astype(np.int64),
            padded=-(-sizes // segment.alignment) * segment.alignment,
        )

    def _pieces(self, part: ReadPart) -> list[ReadPart]:
        """The part, cut for the threads that nobody else keeps busy."""
        if not len(part.rows):
            return []
        idle = self._options.threads // (1 + self._reads)
        pieces = min(idle, 1 + int(part.padded.sum()) // SPLIT_BYTES)
        return list(split_part(part, pieces)) if pieces > 1 else [part]

    async def _read_parts(
        self,
        store: Store,
        batch: BlockBatch,
        parts: list[tuple[Segment, ReadPart]],
        prove: Prove | None,
    ) -> list[ReadDone]:
        if not parts:
            await asyncio.sleep(0)  # a caller that asks in a loop lets others run
            return []
        fit = aligned(store, self._counters, batch)
        jobs = [
            self._transfer(partial(read_part_sync, store.files, part, batch, prove, direct=direct))
            for part, direct in ((p, fit and store.direct(s)) for s, p in parts)
        ]
        if len(jobs) == 1:
            return [await finish(jobs[0])]
        # All of them, before anyone's buffer is given back.
        done = await finish(asyncio.gather(*jobs, return_exceptions=True))
        for one in done:
            if isinstance(one, BaseException):
                raise one
        return [one for one in done if not isinstance(one, BaseException)]

    async def _note(
        self, space: Space, batch: BlockBatch, segment: Segment, part: ReadPart, result: ReadDone
    ) -> None:
        """Count, and forget what is proven to be gone."""
        good = result.outcomes == Outcome.DONE
        lost = part.rows[result.outcomes == Outcome.MISSING]
        self._counters.bytes_read += int(batch.nbytes[part.rows[good]].sum())
        self._counters.read_errors += int((result.outcomes == Outcome.FAILED).sum())
        self._counters.blocks_lost += len(lost)
        if result.gone:
            log.warning("nvme: %s is gone; its blocks are forgotten", segment.path)
            await space.drop(segment)
        elif len(lost):
            log.warning("nvme: %s is cut short; %d blocks forgotten", segment.path, len(lost))
            segment.whole = False
            self._table.forget(batch.keys.take(lost))

    # Asking and forgetting. ----------------------------------------------------------------------

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """From memory."""
        self._live()
        return self._table.find(keys) >= 0

    async def lengths(self, keys: Keys) -> NDArray[np.int64]:
        """`tierkv.backend.SupportsLengths`."""
        self._live()
        return self._table.lengths(keys)

    async def delete(self, keys: Keys) -> None:
        """Forget in memory; for good at a clean close. A kill before that may bring one back."""
        self._live()
        self._table.forget(keys)

    async def clear(self) -> None:
        """Forget everything for good, kills and power loss included.

        `StoreUnusableError` where that cannot be made durable; it is forgotten in memory then.
        """
        self._live()
        await finish(self._clear())

    async def _clear(self) -> None:
        _, space = self._live()
        async with space.all_lanes():
            store, space = self._live()
            try:
                await self._run(store.raise_epoch_sync)
            except OSError as exc:
                raise StoreUnusableError(
                    f"nvme store {store.directory}: clear cannot be made durable: {exc.strerror}"
                ) from exc
            finally:
                self._table.clear()
                space.blank_all()

    async def scan(self) -> AsyncIterator[Keys]:
        """Keys as they were when the iteration began."""
        self._live()
        for keys in self._table.scan():
            yield keys

    async def usage(self) -> Usage:
        """Physical bytes are those of all segment files in the root, whoever's they are."""
        store, _ = self._live()
        mode = store.files.mode
        with unusable(self._options.root):
            physical = await self._run(quota.physical_bytes_sync, self._options.root)
        return Usage(
            blocks=len(self._table),
            payload_bytes=self._table.payload_bytes,
            physical_bytes=physical,
            capacity_bytes=store.capacity_bytes,
            modes={
                "io": store.files.engine.name,
                "threads": str(self._options.threads),
                "direct": "yes" if mode.enabled else f"no ({mode.reason})",
                "alignment": str(mode.alignment),
            }
            | store.files.engine.modes(),
            counters=asdict(self._counters) | {"direct_fallbacks": store.files.direct_fallbacks},
            ratios={"write_amplification": round(self._counters.write_amplification, 4)},
        )

    async def verify(self, progress: Callable[[int, int], None]) -> Verification:
        """Read every published block of every namespace and rank in the root, and prove it.

        Directories whose owner runs are listed in `skipped`: their segments may be used again
        while they are read. Call it on a backend that is not open.
        """
        loop = asyncio.get_running_loop()

        def tell(done: int, total: int) -> None:
            loop.call_soon_threadsafe(progress, done, total)

        return await asyncio.to_thread(verify_root_sync, self._options.root, tell)
