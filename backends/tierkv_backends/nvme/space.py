"""Which segment takes the next extent, and where the one after it comes from.

Lives on the event loop. Space comes back by whole segments, in three steps. The side that decides
is asked which of a sealed segment's blocks are worth writing again, and those are
(`tierkv_backends.nvme.rewriting`). The rest is announced with `retire`; when that returns they are
promised to nobody. When no load reads the segment any more it is blank. This starts as soon as the
quota is reached and no spare is left, so that a write seldom waits for it.

Segments go in the order in which they were written last. One of which too much is worth keeping
stays as it is and goes to the end of that order. A store of fewer than `LEAST_SEGMENTS`, or one
whose deciding side cannot be asked, has no room for that: it gives up the least recently used.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import finish
from tierkv.blocks import NO_KEYS, Keys
from tierkv_backends.nvme.assemble import Assembled
from tierkv_backends.nvme.counters import Counters
from tierkv_backends.nvme.format import PAGE, single_extent_bytes
from tierkv_backends.nvme.store import Store
from tierkv_backends.nvme.table import Segment, State

log = logging.getLogger(__name__)

_T = TypeVar("_T")

ROOM_WAIT_S: Final = 0.25
"""How long writes wait for a segment that is being given up, counted once from when its last step
ended; then they are declined. A save is worth less than the slots it keeps busy."""

LEAST_SEGMENTS: Final = 8
"""A store of fewer writes nothing again: a segment for that, and a blank one, would be too much of
it."""

PASSES: Final = 16
"""Segments that are looked at to give one up. If too much of each is worth keeping, that goes of
which the least is."""

IN_A_ROW: Final = 4
"""Segments of which blocks are written again to make one spare. Two do; where they do not, since
blocks are as large as a part of a segment, the next goes as a whole."""

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
        worth: Callable[[Keys], Awaitable[NDArray[np.bool_]]] | None = None,
    ) -> None:
        self.lanes = [Lane() for _ in range(store.lanes)]
        for lane, segment in zip(self.lanes, assembled.active, strict=False):
            lane.active = segment
        self.own = Lane()
        """Takes what is written again."""
        self.rewrite: Callable[[Segment, Keys], Awaitable[None]] | None = None
        """Writes blocks of a segment again, in `own`."""
        self.spares: deque[Segment] = assembled.spares
        self.partial = assembled.partial
        self.sequence = 0
        self._store = store
        self._table = assembled.table
        self._counters = counters
        self._run = run
        self._retire = retire
        self._worth = worth
        self._refill: asyncio.Task[bool] | None = None
        self._wait_until_s = 0.0
        self._progress = 0
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
            for lane in self._all:
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
            if not await self._next(lane):
                return None
            await finish(self._activate(lane))  # another lane may have been faster
        if self._usable(lane) is None:
            self._start_refill()
        return lane.active

    async def own_room(self, nbytes: int) -> Segment | None:
        """`room` in `own`, which its lock protects. None where there is no blank segment now.

        It waits for none to be given up: whoever gives one up asks.
        """
        lane = self.own
        if lane.active is not None and lane.active.room(1) < single_extent_bytes(nbytes):
            await self.seal(lane)
        if lane.active is None:
            await self._activate(lane)
        return lane.active

    @property
    def keeps(self) -> bool:
        """Whether blocks are written again: the order of segments is then that of writing."""
        return (
            self._worth is not None
            and self.rewrite is not None
            and len(self._table.segments) >= LEAST_SEGMENTS
        )

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
        for lane in self._all:
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
        for lane in self._all:
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

    @property
    def _all(self) -> list[Lane]:
        return [*self.lanes, self.own]

    async def _next(self, lane: Lane) -> bool:
        """Whether there is a spare for a lane at the end."""
        while True:
            if self._usable(lane) is not None or await finish(self._grow()):
                return True
            self._full = True
            refill = self._start_refill()
            before = self._progress
            left_s = self._wait_until_s - asyncio.get_running_loop().time()
            await asyncio.wait([refill], timeout=max(left_s, 0.0))
            if self._usable(lane) is not None:
                return True
            made = refill.done() and not refill.cancelled() and refill.exception() is None
            if not (made and refill.result()) and self._progress == before:
                return False
            # Another lane was faster, or the quota has room for a new one now.

    def _usable(self, lane: Lane) -> Segment | None:
        """A blank segment for a lane; others leave one to `own` where that needs it next."""
        blank = [s for s in self.spares if s.readers == 0]
        left = 1 if lane is not self.own and self._own_is_short else 0
        return blank[0] if len(blank) > left else None

    @property
    def _own_is_short(self) -> bool:
        """Whether `own` may not take all that is kept of the next segment."""
        active = self.own.active
        return self.keeps and (active is None or active.room(1) < _half(active))

    async def _grow(self) -> bool:
        segment = await self._run(self._store.grow_sync, self._table.next_number())
        if segment is None:
            return False
        self._table.add(segment)
        self.spares.append(segment)
        return True

    async def _activate(self, lane: Lane) -> None:
        segment = self._usable(lane)
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

    def _start_refill(self) -> asyncio.Task[bool]:
        if self._refill is None or self._refill.done():
            self._advance()
            work = self._make_spare()
            self._refill = asyncio.get_running_loop().create_task(work, name="nvme-refill")
            self._refill.add_done_callback(self._refilled)
        return self._refill

    def _advance(self) -> None:
        """A step towards a spare is done: who waits for one waits on."""
        self._progress += 1
        self._wait_until_s = asyncio.get_running_loop().time() + ROOM_WAIT_S

    def _refilled(self, task: asyncio.Task[bool]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._counters.refill_errors += 1
            log.error("nvme: giving up a segment failed", exc_info=error)

    async def _make_spare(self) -> bool:
        """Give segments up until a lane may have a blank one; none while the quota has room.

        False where none can be given up.
        """
        given_up = 0
        while self._usable(self.lanes[0]) is None:
            if await finish(self._run(self._store.may_grow_sync)) and not self._full:
                if self._own_is_short and not self.spares:
                    await finish(self._grow())
                return True
            self._full = False
            if not self.keeps and self.own.active is not None:
                async with self.own.lock:  # it became too small a store: `own` has a part in it
                    await finish(self.seal(self.own))
            if not await self._give_up_one(keep=given_up < IN_A_ROW):
                return False
            given_up += 1
        return True

    async def _give_up_one(self, *, keep: bool) -> bool:
        """Give a segment up; False where there is none.

        keep: write again first what is worth it and for which there is room.
        """
        found = await self._choose(keep=keep and self.keeps)
        if found is None:
            return False
        victim, kept = found
        use = victim.generation
        if self.rewrite is not None and len(kept):
            await self.rewrite(victim, kept)
            self._advance()
        if not self._is_sealed(victim, use):  # cleared or lost meanwhile
            return True
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
        self._advance()
        return True

    async def _choose(self, *, keep: bool) -> tuple[Segment, Keys] | None:
        """The segment that goes, and what of it is written again first.

        At most half of a segment, so that two of them fill one. One of which more is worth it
        stays, and goes to the end of the order; of `PASSES` such that goes of which the least is
        worth it.
        """
        passed: dict[int, tuple[int, Segment, Keys]] = {}
        while len(passed) < PASSES:
            victim = self._coldest(passed)
            if victim is None:
                break
            if self._worth is None or not keep or not victim.live:
                return victim, NO_KEYS
            use, keys = victim.generation, self._table.keys_of(victim)
            kept = keys.take(await self._worth(keys))
            self._advance()
            if not self._is_sealed(victim, use):
                continue
            nbytes = int(self._table.lengths(kept).sum())
            if nbytes <= _half(victim):
                return victim, kept
            passed[victim.number] = nbytes, victim, kept
            self._table.touch(victim)
        for _, victim, kept in sorted(passed.values(), key=lambda entry: entry[0]):
            if victim.state is State.SEALED and self._table.segments.get(victim.number) is victim:
                ends = np.cumsum(self._table.lengths(kept))
                return victim, kept.take(ends <= _half(victim))
        return None

    def _coldest(self, but: Collection[int]) -> Segment | None:
        """The sealed segment that goes first: one without live blocks, or the oldest."""
        fresh = set(but).union(*(lane.fresh for lane in self.lanes))
        sealed = (
            s
            for s in self._table.segments.values()
            if s.state is State.SEALED and s.number not in fresh
        )
        return min(sealed, key=lambda s: (s.live > 0, s.touched), default=None)

    def _is_sealed(self, segment: Segment, generation: int) -> bool:
        """Whether a segment is still in the use that it was in."""
        return (
            self._table.segments.get(segment.number) is segment
            and segment.state is State.SEALED
            and segment.generation == generation
        )

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


def _half(segment: Segment) -> int:
    """Payload bytes of which two fit one segment, its own pages and those of extents left out."""
    return max(segment.nbytes // 2 - 4 * PAGE, 0)
