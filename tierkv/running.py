"""A move on its way through the mover: outcomes so far, deadline, and who touches its slots."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import Outcomes
from tierkv.blocks import Move, MoveKind, Outcome
from tierkv.iosched import Grant

UNSET: Final = 255
"""A row whose outcome is not known yet."""


class End(enum.Enum):
    """Why a run ended, or was not begun."""

    NORMAL = "normal"
    QUEUE = "queue"
    DEADLINE = "deadline"
    ROTATED = "rotated"
    CLOSING = "closing"
    DEGRADED = "degraded"


def refusal(kind: MoveKind, end: End) -> Outcome:
    """The outcome of rows that had none when their move ended for the reason `end`."""
    if end is End.DEADLINE:
        return Outcome.TIMED_OUT
    if end is End.ROTATED:
        return {
            MoveKind.SAVE: Outcome.DECLINED,
            MoveKind.LOAD: Outcome.MISSING,
            MoveKind.DELETE: Outcome.DONE,
        }[kind]
    if kind is MoveKind.SAVE and end is not End.NORMAL:
        return Outcome.DECLINED
    return Outcome.FAILED


@dataclass(slots=True, eq=False)
class Run:
    """The state of one move between submission and release. Used on one event loop.

    outcomes: uint8[n], UNSET where the tier still has to answer.
    ended: set to the reason when the run must end before its tasks do.
    mine: the rows that the tier has to answer. nbytes: int64, the payload bytes of each.
    busy: how many batches may touch the move's slots right now.
    left: tasks that have not ended.
    told: `MoveDone` was sent. answered: and slots were still in use then.
    timeout_s: bound of the wait for the first turn, and again of the work from then on.
    probe: whether the tier's health hangs on this move.
    started: whether the backend was asked for anything.
    """

    move: Move
    outcomes: Outcomes
    ended: asyncio.Future[End]
    mine: NDArray[np.intp] = field(init=False)
    nbytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    grants: set[Grant] = field(default_factory=set)
    busy: int = 0
    left: int = 0
    told: bool = False
    answered: bool = False
    timeout_s: float = 0.0
    probe: bool = False
    started: bool = False
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.mine = np.flatnonzero(self.outcomes == UNSET)

    def end(self, reason: End) -> None:
        """Ask for the run's end; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(reason)

    def restart_timer(self, reason: End) -> None:
        """From now, end in `timeout_s` for `reason`."""
        self.stop_timer()
        self._timer = self.ended.get_loop().call_later(self.timeout_s, self.end, reason)

    def stop_timer(self) -> None:
        """No deadline any more."""
        if self._timer is not None:
            self._timer.cancel()

    def begin(self) -> None:
        """The backend is about to be asked: the deadline runs from the first time."""
        if not self.started:
            self.started = True
            self.restart_timer(End.DEADLINE)

    @contextlib.contextmanager
    def touching(self, grant: Grant) -> Iterator[None]:
        """While inside, the slots are in use. The deadline runs from the first time."""
        self.begin()
        self.busy += 1
        self.grants.add(grant)
        try:
            yield
        finally:
            self.busy -= 1
            self.grants.discard(grant)

    def cancel(self) -> None:
        """Cancel every batch and give its right to do I/O to others; those inside end later.

        A batch that still waits for its turn never begins, so afterwards `busy` only falls.
        """
        for task in self.tasks:
            task.cancel()
        for grant in list(self.grants):
            grant.release()
