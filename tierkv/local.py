"""The storage half on the caller's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import Backend
from tierkv.blocks import Event, Move
from tierkv.mover import Mover
from tierkv.pinned import Arena
from tierkv.registry import make_backend
from tierkv.storage import StorageConfig

USAGE_AGE_S = 1.0
"""`stats` asks the backend what it holds no more often than this."""


class LocalStorage:
    """A `StoragePort` over a `Mover` on the running loop, and an async context manager.

    All methods belong to that loop's thread. With ``url=""`` there is no tier: saves end DECLINED,
    loads MISSING, and `Recovered` is empty.
    """

    def __init__(self, backend: Backend | None, config: StorageConfig, arena: Arena) -> None:
        """Use `open`."""
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._wake: Callable[[], None] | None = None
        self._mover = Mover(backend, arena, config, self._emit)
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = 0.0
        self._closed = False

    @classmethod
    async def open(cls, config: StorageConfig, arena: Arena, *, epoch: int = 0) -> Self:
        """Open the tier; the first event that `poll` gives is its `Recovered`.

        Raises `ConfigError` or `StoreError`, one line; then nothing is left open.
        """
        # Finding and importing a backend reads files.
        backend = await asyncio.to_thread(make_backend, config.url) if config.url else None
        self = cls(backend, config, arena)
        self._emit(await self._mover.open(epoch=epoch))
        return self

    def submit(self, move: Move) -> None:
        """See `StoragePort.submit`."""
        self._mover.submit(move)

    def agree(self, retire_id: int) -> None:
        """See `StoragePort.agree`."""
        self._mover.agree(retire_id)

    def appraised(self, question_id: int, worth: NDArray[np.bool_]) -> None:
        """See `StoragePort.appraised`."""
        self._mover.appraised(question_id, worth)

    def rotate(self, epoch: int) -> None:
        """See `StoragePort.rotate`."""
        self._mover.rotate(epoch)

    def poll(self) -> list[Event]:
        """See `StoragePort.poll`."""
        events, self._events = self._events, []
        return events

    def on_event(self, wake: Callable[[], None] | None) -> None:
        """See `StoragePort.on_event`. `wake` is called once per batch of events, from the loop."""
        self._wake = wake
        if wake is not None and self._events:
            self._loop.call_soon(wake)

    def stats(self) -> dict[str, Any]:
        """See `StoragePort.stats`.

        What the backend holds is as it was the last time somebody asked, `USAGE_AGE_S` ago or more.
        """
        now = self._loop.time()
        idle = self._refreshing is None or self._refreshing.done()
        if idle and not self._closed and now - self._refreshed_at >= USAGE_AGE_S:
            self._refreshed_at = now
            self._refreshing = self._loop.create_task(self._mover.refresh_usage())
        return self._mover.stats()

    async def aclose(self, *, deadline_s: float = 10.0) -> bool:
        """Let moves in flight end, then close the tier; see `Mover.close`. Last events remain."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        return await self._mover.close(deadline_s=deadline_s)

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) == 1 and self._wake is not None:
            self._loop.call_soon(self._wake)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
