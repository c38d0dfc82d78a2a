"""Which segment takes the next extent, and where the one after it comes from.

Lives on the event loop. Space comes back in two phases: a sealed segment's keys are announced with
`retire`; when that returns they are promised to nobody; when no load reads the segment any more it
is blank. This starts as soon as the quota is reached and no spare is left, so that a write seldom
waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from tierkv.backend import finish
from tierkv.blocks import Keys
from tierkv_backends.nvme.assemble import Assembled
from tierkv_backends.nvme.counters import Counters
from tierkv_backends.nvme.format import PAGE, single_extent_bytes
from tierkv_backends.nvme.store import Store
from tierkv_backends.nvme.table import Segment, State

log = logging.getLogger(__name__)

_T = TypeVar("_T")

ROOM_WAIT_S: Final = 0.25
"""How long writes wait for a segment that is being given up, counted once from when that began;
then they are declined. A save is worth less than the slots it keeps busy."""

RunSync = Callable[..., Awaitable[Any]]
"""Runs a blocking function in the pool: `await run(function, *arguments)`."""


@dataclass(slots=True, eq=False)
class Lane:
    """A segment that one write at a time appends to. Several lanes keep a disk busy.

    users: writes that hold the lock or wait for it. fresh: segments that the latest write wrote
    to; without it a write larger than the spare room would give up its own first blocks, and then
    say that they are done.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    active: Segment | None = None
    users: int = 0
    fresh: set[int] = field(default_factory=set)


class Space:
    """The writer's side of the segments."""

    def __init__(
        self,
        store: Store,
        assembled: Assembled,
        counters: Counters,
        *,
        run: RunSync,
        retire: Callable[[Keys], Awaitable[None]],
    ) -> None:
        self.lanes = [Lane() for _ in range(store.lanes)]
        for lane, segment in zip(self.lanes, assembled.active, strict=False):
            lane.active = segment
        self.spares: deque[Segment] = assembled.spares
        self.partial = assembled.partial
        self.sequence = 0
        self._store = store
        self._table = assembled.table
        self._counters = counters
        self._run = run
        self._retire = retire
        self._refill: asyncio.Task[None] | None = None
        self._wait_until_s = 0.0
        self._idle = asyncio.Event()
        self._full = False  # a write found that no segment can be made

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[Lane]:
        """A lane for one write, the first that is free; waits for its turn where none is.

        What the write before it wrote in that lane may be given up from now on.
        """
        lane = min(self.lanes, key=lambda lane: lane.users)
        lane.users += 1
        try:
            async with lane.lock:
                lane.fresh.clear()
                yield lane
        finally:
            lane.users -= 1

    @asynccontextmanager
    async def all_lanes(self) -> AsyncIterator[None]:
        """Nothing is being written."""
        async with AsyncExitStack() as stack:
            for lane in self.lanes:
                await stack.enter_async_context(lane.lock)
            yield

    def take_sequence(self, n: int) -> int:
        """The first of n sequence numbers that nobody else gets."""
        first = self.sequence + 1
        self.sequence += n
        return first

    async def room(self, lane: Lane, nbytes: int) -> Segment | None:
        """The lane's segment, with room for a block of `nbytes` at least; None: no space.

        `OSError` where the next segment cannot be written. Cancellation leaves nothing behind.
        """
        if lane.active is not None:
            if lane.active.room(1) >= single_extent_bytes(nbytes):
                lane.fresh.add(lane.active.number)
                return lane.active
            await finish(self.seal(lane))
        while lane.active is None:
            if not await self._next():
                return None
            await finish(self._activate(lane))  # another lane may have been faster
        if not self.spares:
            self._start_refill()
        return lane.active

    async def seal(self, lane: Lane) -> None:
        """Close the lane's segment for writing, with a footer where that succeeds."""
        segment, lane.active = lane.active, None
        if segment is None:
            return
        segment.trim()
        segment.state = State.SEALED
        self._table.touch(segment)
        try:
            self._counters.bytes_written += await self._run(
                self._store.seal_sync, segment, segment.hashes.tobytes(), self.sequence
            )
        except OSError as exc:  # the next open walks its extents instead
            log.warning("nvme: no footer in %s: %s", segment.path, exc)

    def released(self) -> None:
        """A load let go of its segment."""
        self._idle.set()

    async def drop(self, segment: Segment) -> None:
        """Forget a segment whose file is gone, or must not be written any more."""
        for lane in self.lanes:
            if lane.active is segment:
                lane.active = None
        if segment.number not in self._table.segments:
            return
        if segment.state is State.RETIRING:  # who gives it up removes it
            self._table.forget(self._table.keys_of(segment))
            return
        if segment in self.spares:
            self.spares.remove(segment)
        self._table.drop(segment)
        self._counters.segments_lost += 1
        await self._run(self._store.files.forget_sync, segment.path)

    def blank_all(self) -> None:
        """All segments are blank now (`clear`); one that is being given up finishes on its own."""
        for lane in self.lanes:
            lane.active = None
        self.spares.clear()
        for segment in self._table.segments.values():
            if segment.state is not State.RETIRING:
                segment.state = State.SPARE
                self.spares.append(segment)

    async def close(self, wait_s: float) -> None:
        """Stop giving up segments; one that was not agreed on stays as it is."""
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait([self._refill], timeout=wait_s)

    async def _next(self) -> bool:
        """Whether there is a spare at the end."""
        while True:
            if self._usable() is not None or await finish(self._grow()):
                return True
            self._full = True
            before = self._given_up
            refill = self._start_refill()
            left_s = self._wait_until_s - asyncio.get_running_loop().time()
            await asyncio.wait([refill], timeout=max(left_s, 0.0))
            if self._usable() is not None:
                return True
            if self._given_up == before:
                return False
            # Another lane was faster, or the quota has room for a new one now.

    @property
    def _given_up(self) -> int:
        return self._counters.segments_recycled + self._counters.segments_deleted

    def _usable(self) -> Segment | None:
        return next((s for s in self.spares if s.readers == 0), None)

    async def _grow(self) -> bool:
        segment = await self._run(self._store.grow_sync, self._table.next_number())
        if segment is None:
            return False
        self._table.add(segment)
        self.spares.append(segment)
        return True

    async def _activate(self, lane: Lane) -> None:
        segment = self._usable()
        if segment is None:
            return
        self.spares.remove(segment)
        try:
            header = await self._run(self._store.use_sync, segment, self._store.meta.epoch)
        except FileNotFoundError:
            await self.drop(segment)
            raise
        except OSError:
            self.spares.append(segment)
            raise
        self._counters.bytes_written += PAGE
        segment.generation, segment.alignment = header.generation, header.alignment
        segment.root = segment.link = header.root
        segment.end, segment.state = PAGE, State.ACTIVE
        self._table.touch(segment)
        lane.fresh.add(segment.number)
        lane.active = segment

    def _start_refill(self) -> asyncio.Task[None]:
        if self._refill is None or self._refill.done():
            loop = asyncio.get_running_loop()
            self._wait_until_s = loop.time() + ROOM_WAIT_S
            self._refill = loop.create_task(self._give_up_coldest(), name="nvme-refill")
            self._refill.add_done_callback(self._refilled)
        return self._refill

    def _refilled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._counters.refill_errors += 1
            log.error("nvme: giving up a segment failed", exc_info=error)

    async def _give_up_coldest(self) -> None:
        if await finish(self._run(self._store.may_grow_sync)) and not self._full:
            return
        self._full = False
        fresh = set().union(*(lane.fresh for lane in self.lanes))
        sealed = [
            s
            for s in self._table.segments.values()
            if s.state is State.SEALED and s.number not in fresh
        ]
        if not sealed:
            return
        victim = min(sealed, key=lambda s: (s.live > 0, s.touched))
        victim.state = State.RETIRING
        try:
            keys = self._table.keys_of(victim)
            if len(keys):
                await self._retire(keys)
            await self._quiet(victim)
        except BaseException:
            victim.state = State.SEALED
            raise
        await finish(self._recycle(victim))

    async def _quiet(self, victim: Segment) -> None:
        """Forget what is still in the victim, and wait until no load reads it.

        What was written again meanwhile lies elsewhere by now.
        """
        gone = self._table.keys_of(victim)
        self._table.forget(gone)
        self._counters.blocks_evicted += len(gone)
        while victim.readers:
            self._idle.clear()
            await self._idle.wait()

    async def _recycle(self, victim: Segment) -> None:
        victim.blank()
        if await self._run(self._store.keep_sync, victim):
            victim.state = State.SPARE
            self.spares.append(victim)
            self._counters.segments_recycled += 1
        else:
            del self._table.segments[victim.number]
            self._counters.segments_deleted += 1
