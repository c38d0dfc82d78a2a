"""Ends a benchmark that stands still, and says where it stood.

Two limits. What is awaited inside `Watchdog.limited` has its time; then the stacks of all threads
are printed with one line that says what did not end, and `Stalled` is raised. A loop that does not
even turn any more, or a clean-up after `Stalled` that does not end either, is ended with the whole
process, by a thread that needs no GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import sys
from collections.abc import AsyncIterator
from typing import Final, Self

LIMIT_S: Final = 120.0
"""For a job of 16 MiB, or another step that takes seconds at most."""

GRACE_S: Final = 20.0
"""Time to clean up after `Stalled`, and how late a loop may be before it counts as standing."""

_BEAT_S: Final = 10.0


class Stalled(Exception):
    """Something took longer than it may; the message says what."""


class Watchdog:
    """Watches the running loop while it is entered."""

    def __init__(self, limit_s: float = LIMIT_S, grace_s: float = GRACE_S) -> None:
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._stalled = False

    async def __aenter__(self) -> Self:
        self._beat = asyncio.create_task(self._beats())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beat.cancel()
        if not self._stalled:  # else the alarm stays, until the process has really ended
            faulthandler.cancel_dump_traceback_later()

    @contextlib.asynccontextmanager
    async def limited(self, what: str) -> AsyncIterator[None]:
        """Cancel what is awaited inside when its time is up, and raise `Stalled`."""
        timer = asyncio.timeout(self._limit_s)
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            line = f"{what} was not done after {self._limit_s:g} s"
            if not self._stalled:  # the first says it all; others of its batch fall with it
                self._tell(line)
            raise Stalled(line) from None

    def _tell(self, line: str) -> None:
        """At once, because what follows may not end either."""
        self._stalled = True
        print(f"{line}; the stacks of all threads:", file=sys.__stderr__, flush=True)
        faulthandler.dump_traceback(sys.__stderr__)
        self._beat.cancel()
        self._arm(self._grace_s)

    async def _beats(self) -> None:
        while True:
            self._arm(self._limit_s + self._grace_s)
            await asyncio.sleep(_BEAT_S)

    @staticmethod
    def _arm(seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
