"""The keeper's own side: a `Mover` behind a socket, on an event loop of its own."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
from typing import Any, Final, cast

import msgspec
import numpy as np

from tierkv.blocks import Event, Move, pack_event
from tierkv.errors import TierKVError
from tierkv.keeper.wire import FrameReader, encode
from tierkv.mover import Mover
from tierkv.pinned import Arena
from tierkv.registry import make_backend
from tierkv.storage import StorageConfig

STATS_DELAY_S: Final = 0.2
"""Counters follow activity after so long, once, however much happened."""

_log = logging.getLogger(__name__)


class _Forward(logging.Handler):
    """Sends log records to the client, whose logging decides what becomes of them."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self._keeper = keeper

    def emit(self, record: logging.LogRecord) -> None:
        message = ("log", record.name, record.levelno, self.format(record))
        self._keeper.loop.call_soon_threadsafe(self._keeper.send, message)


class Keeper(asyncio.Protocol):
    """Takes commands, runs the mover, sends events; one flush a turn of the loop.

    Ends the process when the client is gone: nobody is left to save for, and what was published
    is safe.
    """

    def __init__(self, arena_fd: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._arena_fd = arena_fd
        self._reader = FrameReader()
        self._out: list[tuple[Any, ...]] = []
        self._transport: asyncio.Transport | None = None
        self._mover: Mover | None = None
        self._early: list[list[Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats_due = False

    # asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.send(("hello",))

    def data_received(self, data: bytes) -> None:
        """Act on every complete command."""
        for message in self._reader.feed(data):
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the process."""
        os._exit(0)

    # Messages. --------------------------------------------------------------------------------

    def send(self, message: tuple[Any, ...]) -> None:
        """Send with everything else of this turn of the loop."""
        self._out.append(message)
        if len(self._out) == 1:
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and out:
            self._transport.write(encode(out))

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["ping", number]:
                self.send(("pong", number))
            case ["open", config, epoch, clear, first_retire_id, log_level]:
                self._forward_logs(log_level)
                self._spawn(self._open(config, epoch, clear, first_retire_id))
            case _ if self._mover is None:
                self._early.append(message)
            case _:
                self._command(self._mover, message)

    def _command(self, mover: Mover, message: list[Any]) -> None:
        match message:
            case ["move", *packed]:
                mover.submit(Move.unpack(tuple(packed)))
            case ["agree", int(retire_id)]:
                mover.agree(retire_id)
            case ["appraised", int(question_id), bytes(worth)]:
                mover.appraised(question_id, np.frombuffer(worth, np.bool_))
            case ["rotate", int(epoch)]:
                mover.rotate(epoch)
            case ["close", deadline_s]:
                self._spawn(self._close(mover, deadline_s))
            case _:
                raise ValueError(f"not a command: {str(message)[:80]}")
        self._stats_soon()

    async def _open(self, config_data: Any, epoch: int, clear: bool, first_retire_id: int) -> None:
        config = msgspec.convert(config_data, StorageConfig)
        try:
            arena = Arena.attach(self._arena_fd, config.arena_bytes)
            # An import may be slow, and a ping wants its answer.
            backend = await asyncio.to_thread(make_backend, config.url) if config.url else None
            mover = Mover(backend, arena, config, self._emit)
            recovered = await mover.open(epoch=epoch, clear=clear, first_retire_id=first_retire_id)
            gc.freeze()  # what is there now stays: no collection looks through it again
        except TierKVError as exc:
            self.send(("error", type(exc).__name__, str(exc)))
            self._end()
            return
        self._mover = mover
        self.send(("stats", mover.stats()))
        self._emit(recovered)
        del recovered
        early, self._early = self._early, []
        for message in early:
            self._command(mover, message)
        await asyncio.to_thread(_trim_heap_sync)

    async def _close(self, mover: Mover, deadline_s: float) -> None:
        clean = await mover.close(deadline_s=deadline_s)
        self.send(("stats", mover.stats()))
        self.send(("closed", clean))
        self._end()

    def _end(self) -> None:
        """Send what is left; the client hangs up when it has read it."""
        self._flush()
        if self._transport is not None:
            self._transport.write_eof()

    def _emit(self, event: Event) -> None:
        self.send(("event", pack_event(event)))
        self._stats_soon()

    def _stats_soon(self) -> None:
        if not self._stats_due:
            self._stats_due = True
            self.loop.call_later(STATS_DELAY_S, lambda: self._spawn(self._push_stats()))

    async def _push_stats(self) -> None:
        self._stats_due = False
        if self._mover is not None:
            await self._mover.refresh_usage()
            self.send(("stats", self._mover.stats()))

    def _forward_logs(self, level: int) -> None:
        root = logging.getLogger()
        root.setLevel(level)
        root.addHandler(_Forward(self))

    def _spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A command that failed in a way nobody foresaw ends the keeper: the client restarts it."""
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.send(("error", type(exc).__name__, f"{type(exc).__name__}: {exc}"))
            self._end()


def _trim_heap_sync() -> None:
    """Give the system back what reading a store's index took and the C library holds on to.

    Of a million blocks that is 80 MB (`bench.restart`). Only glibc has the call.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
