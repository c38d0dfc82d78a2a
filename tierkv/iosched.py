"""Who may do I/O on a tier now: bytes in flight are bounded, and loads go before saves.

A load keeps a request waiting, a save keeps nobody; so no save starts while a load waits. Within
a class it is first come, first served. A save that would wait behind too many bytes is told
`THROTTLED` at once: that is an answer, not an error.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from dataclasses import dataclass
from types import TracebackType


class Lane(enum.Enum):
    """The two classes of I/O."""

    LOAD = "load"
    SAVE = "save"


class Admission(enum.Enum):
    """What the scheduler answers."""

    GRANTED = "granted"
    THROTTLED = "throttled"


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    granted: asyncio.Future[None]


class Grant:
    """The right to have `nbytes` in flight, as an async context manager.

    Entering waits for the right and gives the `Admission`; leaving returns it. If cancelled while
    waiting, nothing is held. `release` returns it early (twice is fine): for I/O that is given up
    but has not ended, so that a hung call does not lock everybody out.
    """

    def __init__(self, sched: IOScheduler, lane: Lane, nbytes: int) -> None:
        self._sched = sched
        self._lane = lane
        self._nbytes = nbytes
        self.held = False

    async def __aenter__(self) -> Admission:
        admission = await self._sched._acquire(self._lane, self._nbytes)
        self.held = admission is Admission.GRANTED
        return admission

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Return the right now."""
        if self.held:
            self.held = False
            self._sched._release(self._lane, self._nbytes)


class _Gate:
    """One lane: a bound, what is in flight, and who waits."""

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self.in_flight_bytes = 0
        self.waiting_bytes = 0
        self.waiters: deque[_Waiter] = deque()

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` may start: inside the bound, or alone where they exceed it."""
        return self.in_flight_bytes == 0 or self.in_flight_bytes + nbytes <= self.bound_bytes

    def grant_waiters(self) -> None:
        """Start waiters in order for as long as they fit."""
        while self.waiters:
            waiter = self.waiters[0]
            if waiter.granted.cancelled():  # its task has not had its turn to leave yet
                self.drop(waiter)
                continue
            if not self.fits(waiter.nbytes):
                return
            self.drop(waiter)
            self.in_flight_bytes += waiter.nbytes
            waiter.granted.set_result(None)

    def drop(self, waiter: _Waiter) -> None:
        """Have it wait no more; nothing if it does not."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)
            self.waiting_bytes -= waiter.nbytes


class IOScheduler:
    """Admission to one tier. Used on one event loop; no method blocks.

    read_bytes_in_flight, write_bytes_in_flight: bounds of the lanes, in bytes. A larger request
        runs when its lane is idle, alone.
    write_queue_bytes: saves are throttled when those that wait would exceed this together.
    """

    def __init__(
        self, *, read_bytes_in_flight: int, write_bytes_in_flight: int, write_queue_bytes: int
    ) -> None:
        self._loads = _Gate(read_bytes_in_flight)
        self._saves = _Gate(write_bytes_in_flight)
        self._write_queue_bytes = write_queue_bytes

    def grant(self, lane: Lane, nbytes: int) -> Grant:
        """Ask for a turn: `async with sched.grant(lane, nbytes) as admission: ...`."""
        return Grant(self, lane, nbytes)

    def stats(self) -> dict[str, int]:
        """Bytes in flight and waiting, per lane."""
        return {
            "load_bytes_in_flight": self._loads.in_flight_bytes,
            "load_bytes_waiting": self._loads.waiting_bytes,
            "save_bytes_in_flight": self._saves.in_flight_bytes,
            "save_bytes_waiting": self._saves.waiting_bytes,
        }

    def _gate(self, lane: Lane) -> _Gate:
        return self._loads if lane is Lane.LOAD else self._saves

    async def _acquire(self, lane: Lane, nbytes: int) -> Admission:
        gate = self._gate(lane)
        blocked = bool(gate.waiters) or (lane is Lane.SAVE and bool(self._loads.waiters))
        if not blocked and gate.fits(nbytes):
            gate.in_flight_bytes += nbytes
            return Admission.GRANTED
        if lane is Lane.SAVE and gate.waiting_bytes + nbytes > self._write_queue_bytes:
            return Admission.THROTTLED
        waiter = _Waiter(nbytes, asyncio.get_running_loop().create_future())
        gate.waiters.append(waiter)
        gate.waiting_bytes += nbytes
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self._release(lane, nbytes)  # granted in the same breath as it was cancelled
            else:
                gate.drop(waiter)
                self._wake()
            raise
        return Admission.GRANTED

    def _release(self, lane: Lane, nbytes: int) -> None:
        self._gate(lane).in_flight_bytes -= nbytes
        self._wake()

    def _wake(self) -> None:
        self._loads.grant_waiters()
        if not self._loads.waiters:
            self._saves.grant_waiters()
