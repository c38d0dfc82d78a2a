"""Saves and loads as copies in queues: pages → staging → arena, and back.

What is ordered after what, and which byte would be wrong otherwise (tests/device/test_ordering.py
takes each away in turn and sees it):

======== ====================== ===================================================================
queue    goes on after          or else
======== ====================== ===================================================================
GATHER   `after` of the save    it reads pages that the step has not written yet
GATHER   buffer's host copy     it overwrites staging that is still being read
OUT      its gather             it copies what the buffer held before
ENGINE   the last gather        the next step reuses pages that were not read yet (`protect`)
IN       buffer's scatter       it overwrites staging that is still being read
SCATTER  its host copy          it writes what the buffer held before
SCATTER  `after` of the load    pages that are zeroed late lose what was loaded
======== ====================== ===================================================================

Checksums, where they are wanted, are made on OUT, behind the host copy of the same buffer.

Whoever owns the slots keeps them until `Copy.done`: they are read and written until then.

Staging is two buffers for each direction. A batch larger than one is split; from its third part on
a save's gather waits, on the device, for a host copy. So `protect` may stall the engine's stream
for as long as what exceeds the staging takes to reach the host, and never its thread. `has_room`
bounds that: a save that would queue up behind `BACKLOG_BYTES` is better declined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv import device_sums, multilinear
from tierkv.blocks import Move
from tierkv.device import Pages, Part
from tierkv.record import Algorithm
from tierkv.streams import Device, Mark, Queue, wait_all

BACKLOG_BYTES: Final = 1 << 30
"""Of saves that have not reached the host. 20 ms at 50 GB/s, the rate of PCIe 5 with 16 lanes."""

CLOSE_S: Final = 10.0
"""How long a device that owes the end of copies is waited for. A GiB takes 20 ms."""


class Sums:
    """MULTILINEAR of a save's blocks, made where they are; read them when the copy has ended."""

    def __init__(self, seeds: NDArray[np.uint64], *, pinned: bool) -> None:
        self._seeds = seeds
        self._host = torch.zeros(len(seeds), dtype=torch.int64, pin_memory=pinned)
        self._order = np.zeros(len(seeds), np.intp)
        self._filled = 0

    def checksums(self) -> NDArray[np.uint64]:
        """uint64[n], in the order of the batch."""
        out = np.empty(len(self._order), np.uint64)
        out[self._order] = self._host.numpy().view(np.uint64)
        return out

    def of_staging(self, part: Part, buffer: torch.Tensor) -> Callable[[], None]:
        """Work that sums a part while it lies in a buffer, on any device."""
        place = self._place(part)

        def work() -> None:
            found = device_sums.checksums(part.payloads(buffer), self._seeds[part.rows])
            self._host[place].copy_(found, non_blocking=True)

        return work

    def add_slots(self, parts: Sequence[Part], arena: torch.Tensor) -> None:
        """Sum blocks in host memory, now."""
        memory = arena.numpy()
        for part in parts:
            payloads = [memory[at : at + part.payload] for at in part.offsets.tolist()]
            found = multilinear.checksums(payloads, self._seeds[part.rows])
            self._host.numpy().view(np.uint64)[self._place(part)] = found

    def _place(self, part: Part) -> slice:
        first, self._filled = self._filled, self._filled + len(part)
        self._order[first : self._filled] = part.rows
        return slice(first, self._filled)


@dataclass(frozen=True, slots=True)
class _Way:
    """Queues of a direction: the one that touches the pages, and those that `Copy` speaks of."""

    pages: Queue
    read: Queue
    end: Queue


_SAVE: Final = _Way(Queue.GATHER, Queue.GATHER, Queue.OUT)
_LOAD: Final = _Way(Queue.SCATTER, Queue.IN, Queue.SCATTER)
_Rows = tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Copy:
    """A batch on its way.

    nbytes: payload.
    read: done when its source may be overwritten (a save's pages, a load's slots).
    end: done when the bytes are where they should be and nothing touches slots or pages any more.
    sums: of a save that was given seeds: complete when `end` is done.
    """

    nbytes: int
    read: Mark
    end: Mark
    sums: Sums | None = None

    def done(self) -> bool:
        """Whether `end` is done. Never waits."""
        return self.end.done()

    def with_sums(self, move: Move) -> Move:
        """The save that this was, ended, with the checksums that were made on the way, if any."""
        if self.sums is None:
            return move
        return move.summed(Algorithm.MULTILINEAR_64, self.sums.checksums())


class _Staging:
    """Two buffers, in turn; each with the mark behind its last use."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffers = [device.empty(nbytes) for _ in range(2)]
        self._used: list[Mark | None] = [None, None]
        self._next = 0

    def take(self) -> tuple[int, torch.Tensor, Mark | None]:
        """The next buffer, and what must be done before it is written."""
        index, self._next = self._next, 1 - self._next
        return index, self._buffers[index], self._used[index]

    def used_until(self, index: int, mark: Mark) -> None:
        self._used[index] = mark


class Copier:
    """Copies between pages on one device and one arena. One thread at a time.

    arena: uint8, contiguous, host memory; registered with the device, or its host copies are
        neither fast nor asynchronous (`tierkv.registration`).
    cuts: offsets into the arena that no single host copy may span: where registered pieces meet.
    backlog_bytes: see `has_room`.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        device: Device,
        *,
        cuts: Sequence[int] = (),
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self._arena = arena
        self._device = device
        self._cuts = np.array(sorted(cuts), np.int64)
        self._backlog_bytes = backlog_bytes
        self._saving: deque[Copy] = deque()
        self._staging: dict[Queue, _Staging] = {}

    def mark(self) -> Mark:
        """Behind everything that the calling thread has launched on its current stream."""
        return self._device.record(Queue.ENGINE)

    def has_room(self, nbytes: int) -> bool:
        """Whether a save of `nbytes` may queue up behind those under way.

        One alone may be of any size.
        """
        while self._saving and self._saving[0].done():
            self._saving.popleft()
        queued = sum(c.nbytes for c in self._saving)
        return not queued or queued + nbytes <= self._backlog_bytes

    def save(
        self,
        pages: Pages,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        *,
        after: Mark,
        seeds: NDArray[np.uint64] | None = None,
    ) -> Copy:
        """Copy the pages of n blocks into their slots, once `after` is done.

        groups: uint16[n]; block_ids: int32[n]; offsets: int64[n], no slot twice. Bytes between
        the blocks of slots that lie side by side are undefined afterwards.
        seeds: uint64[n] (`tierkv.record.seeds`): have the blocks summed where they are; behind the
        host copy, so that neither the engine's stream nor the arena waits for it.

        Returns once it is launched. `ValueError` for a block id or an offset out of range, before
        anything is launched. Where launching fails, it waits for what was launched and raises.
        """
        rows = (groups, block_ids, offsets)
        sums = None if seeds is None else Sums(seeds, pinned=pages.device.type == "cuda")
        out = partial(self._out, sums=sums)
        copy = self._start(_SAVE, pages, rows, after, pages.gather, out, sums)
        self._saving.append(copy)
        return copy

    def protect(self, copy: Copy) -> None:
        """Have the calling thread's stream go on only when a save has read its pages."""
        self._device.hold(Queue.ENGINE, copy.read)

    def load(
        self,
        pages: Pages,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        *,
        after: Mark,
    ) -> Copy:
        """Copy n slots into the pages of their blocks; only the pages wait for `after`.

        Arguments, errors and return as for `save`; no block id of a group twice. Whatever is
        launched on the pages before `after`, zeroing for one, does not undo it.
        """
        rows = (groups, block_ids, offsets)
        return self._start(_LOAD, pages, rows, after, pages.scatter, self._in, None)

    def _start(
        self,
        way: _Way,
        pages: Pages,
        rows: _Rows,
        after: Mark,
        directly: Callable[..., None],
        launch: Callable[[Pages, Part], None],
        sums: Sums | None,
    ) -> Copy:
        """What `save` and `load` have in common."""
        device, arena, (groups, block_ids, offsets) = self._device, self._arena, rows
        parts = pages.parts(groups, block_ids, offsets, arena.numel(), device.staging_bytes)
        device.hold(way.pages, after)
        if device.direct:
            device.run(way.pages, lambda: directly(groups, block_ids, arena, offsets))
            if sums is not None:
                device.run(way.pages, lambda: sums.add_slots(parts, arena))
        else:
            self._launch(pages, parts, launch)
        read, end = (device.record(way.pages if device.direct else q) for q in (way.read, way.end))
        return Copy(sum(p.payload_bytes for p in parts), read, end, sums)

    def close(self, *, deadline_s: float = CLOSE_S) -> bool:
        """Block until nothing launched here touches pages or arena any more; whether that is so.

        False after `deadline_s`, where the device hangs, or at once where it reports an error:
        then it may still read and write them, and neither may be given to anyone.
        """
        marks = [self._device.record(q) for q in Queue if q is not Queue.ENGINE]
        return wait_all(marks, deadline_s)

    def _launch(
        self, pages: Pages, parts: Sequence[Part], launch: Callable[[Pages, Part], None]
    ) -> None:
        try:
            for part in parts:
                launch(pages, part)
        except BaseException:
            self.close()
            raise

    def _buffers(self, queue: Queue, pages: Pages) -> _Staging:
        """The direction's staging, a buffer of which holds any block of these pages."""
        staging = self._staging.get(queue)
        if staging is None or staging.nbytes < pages.largest_slot:
            # Other pages than before, with larger blocks: nobody uses the old buffers any more.
            if staging is not None and not self.close():
                raise RuntimeError("the device does not end its copies: no larger staging is made")
            nbytes = max(self._device.staging_bytes, pages.largest_slot)
            staging = self._staging[queue] = _Staging(self._device, nbytes)
        return staging

    def _out(self, pages: Pages, part: Part, sums: Sums | None) -> None:
        device, staging = self._device, self._buffers(Queue.OUT, pages)
        index, buffer, drained = staging.take()
        if drained is not None:
            device.hold(Queue.GATHER, drained)
        device.run(Queue.GATHER, lambda: pages.pack(part, buffer))
        device.hold(Queue.OUT, device.record(Queue.GATHER))
        extents, arena = part.extents(self._cuts), self._arena

        def to_arena() -> None:
            for at, offset, nbytes in extents:
                arena[offset : offset + nbytes].copy_(buffer[at : at + nbytes], non_blocking=True)

        device.run(Queue.OUT, to_arena)
        if sums is not None:
            device.run(Queue.OUT, sums.of_staging(part, buffer))
        staging.used_until(index, device.record(Queue.OUT))

    def _in(self, pages: Pages, part: Part) -> None:
        device, staging = self._device, self._buffers(Queue.IN, pages)
        index, buffer, spread = staging.take()
        if spread is not None:
            device.hold(Queue.IN, spread)
        extents, arena = part.extents(self._cuts), self._arena

        def from_arena() -> None:
            for at, offset, nbytes in extents:
                buffer[at : at + nbytes].copy_(arena[offset : offset + nbytes], non_blocking=True)

        device.run(Queue.IN, from_arena)
        device.hold(Queue.SCATTER, device.record(Queue.IN))
        device.run(Queue.SCATTER, lambda: pages.unpack(part, buffer))
        staging.used_until(index, device.record(Queue.SCATTER))
