"""From marks of a device to futures of a loop: one thread for all copies of one direction."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence

from tierkv.streams import Mark

_Due = tuple[Mark, asyncio.Future[None]]
_End = tuple[asyncio.Future[None], BaseException | None]


class Completions:
    """Waits for marks in the order given, and tells the loop of all that are done at once.

    Marks of one queue end in order, so the thread sleeps on the first and no other is late. It
    starts with the first mark that is not done already: on a CPU there is none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: queue.SimpleQueue[_Due | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ahead: _Due | None = None

    async def wait(self, mark: Mark) -> None:
        """Return when `mark` is done. Raises what the device reports.

        If cancelled: nothing changes; the mark is waited for all the same.
        """
        if mark.done():
            return
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_sync, args=(loop,), name=self._name, daemon=True
            )
            self._thread.start()
        self._due.put((mark, future))
        await future

    def close(self) -> None:
        """End the thread once everything given to it is done. Does not wait for that."""
        if self._thread is not None:
            self._due.put(None)
            self._thread = None

    def _run_sync(self, loop: asyncio.AbstractEventLoop) -> None:
        due: _Due | None = self._due.get()
        while due is not None:
            ended = [_wait_sync(due)]
            while (due := self._next_ready()) is not None:
                ended.append(_wait_sync(due))
            if not _tell(loop, ended):
                return
            due = self._ahead or self._due.get()
            self._ahead = None

    def _next_ready(self) -> _Due | None:
        """The next one if it is done already; another is kept in `_ahead`."""
        if self._ahead is None and not self._due.empty():
            self._ahead = self._due.get()
        if self._ahead is None or not _is_done(self._ahead[0]):
            return None
        ready, self._ahead = self._ahead, None
        return ready


def _is_done(mark: Mark) -> bool:
    try:
        return mark.done()
    except RuntimeError:  # `wait` raises it where it can be passed on
        return True


def _wait_sync(due: _Due) -> _End:
    mark, future = due
    try:
        mark.wait()
    except RuntimeError as exc:  # torch's errors of a device
        return future, exc
    return future, None


def _tell(loop: asyncio.AbstractEventLoop, ended: Sequence[_End]) -> bool:
    """Resolve these on the loop; False if it is closed: then nobody waits any more."""

    def settle() -> None:
        for future, error in ended:
            if future.cancelled():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True
