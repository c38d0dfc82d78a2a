"""The storage half as the deciding side sees it: commands go in, events come out, nothing blocks.

Two implementations run the same `tierkv.mover.Mover`: `tierkv.local.LocalStorage` on the caller's
own loop, and `tierkv.keeper.KeeperClient` in a child process beside an engine's worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import Event, Move


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Everything the storage half needs to open; plain data, so that it fits any wire.

    url: the storage tier. "" means there is none: pinned RAM only.
    namespace, namespace_text: digest (32 bytes) and readable form, this rank's.
    arena_bytes: size of the arena; a multiple of 4096.
    block_bytes: payload bytes per block of each group on this rank.
    read_timeout_s, write_timeout_s: deadline of one move once it has started. It waits for its
        turn no longer than this either, so an answer comes within twice the time.
    hang_timeout_s: a keeper that answers nothing for so long is ended and started anew.
    read_bytes_in_flight, write_bytes_in_flight: bounds of the I/O scheduler.
    write_queue_bytes: saves that wait beyond this are DECLINED (throttled).
    io_threads: size of the pool for checksums, for the codec, and for backends that want threads.
    codec: how blocks are stored from now on, one of `tierkv.codec.CODECS`; all are always read.
    """

    url: str
    namespace: bytes
    namespace_text: str
    arena_bytes: int
    block_bytes: tuple[int, ...]
    rank: int = 0
    data_parallel_rank: int = 0
    read_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    hang_timeout_s: float = 5.0
    read_bytes_in_flight: int = 64 << 20
    write_bytes_in_flight: int = 128 << 20
    write_queue_bytes: int = 1 << 30
    io_threads: int = 4
    codec: str = "none"


class StoragePort(Protocol):
    """What the deciding side may ask of one rank's storage half. Every call returns at once."""

    def submit(self, move: Move) -> None:
        """Start a move whose arena slots are ready. A `MoveDone` always follows, within a bound."""

    def agree(self, retire_id: int) -> None:
        """Answer a `Retire`: these blocks are promised to nobody any more."""

    def appraised(self, question_id: int, worth: NDArray[np.bool_]) -> None:
        """Answer an `Appraise`: bool[n], which of its blocks are worth writing again."""

    def rotate(self, epoch: int) -> None:
        """Forget everything older, durably; moves of older epochs end DECLINED or MISSING."""

    def poll(self) -> list[Event]:
        """Everything that happened since the last call, in order."""

    def on_event(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called on the running asyncio loop when `poll` has something to give."""

    def stats(self) -> dict[str, Any]:
        """The latest counters and modes known, flat, JSON-able. Never waits for the other side."""
