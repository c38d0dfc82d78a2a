"""The interface behind a storage tier. Small, and the same for everyone.

A backend receives **batches of blocks that the planner has already passed**: aligned
full-attention blocks, boundary window blocks, boundary states. `BlockBatch` is made from a
`tierkv.blocks.Move` (which only the planner's side can make), so nothing that no hit can read
ever reaches a backend. A backend never sees tokens, what a group means, or the engine.

Rules every backend keeps, and `tierkv.testing` checks:

- Results come back **per key**. One bad key never fails its neighbours. An exception from `write`
  or `read` counts as FAILED for the whole batch: it is for what you did not foresee.
- `write` publishes a block only when all of its bytes are in place. Writing a key that exists is a
  success and leaves it as it was.
- `read` fills the caller's buffer or reports that it did not; a short read is MISSING.
- **When a call ends, cancelled or not, nothing touches its buffers any more**: no thread, kernel or
  device. If a thread still works, wait for it before letting `CancelledError` out. The mover has
  deadlines and goes on without you; the buffers stay yours until you return.
- Nothing blocks the event loop. `contains` answers from memory.
- After a process was killed anywhere, the next `open` serves every published block and no torn one.

To write one: subclass `Backend`, register it under entry point group ``tierkv.backends`` with the
URL scheme as the key, and run `tierkv.testing.BackendContract` on it. `tierkv_backends.memory` is
the example to copy.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import Keys
from tierkv.record import Records
from tierkv.urls import TierURL

_P = ParamSpec("_P")
_T = TypeVar("_T")

Outcomes = NDArray[np.uint8]
"""uint8[n] of `tierkv.blocks.Outcome`, one per key of the batch, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """Blocks on their way to or from a backend: columns over one arena.

    keys: n keys, no key twice.
    records: RECORD_DTYPE[n], 64 bytes a block (`tierkv.record`). `write` stores each beside its
        payload; `read` fills in what it found. Opaque to backends, except that
        `records["stored_bytes"]` is the payload's length when writing.
    arena: writable memoryview of bytes over the whole arena.
    offsets: int64[n], where each block's slot starts; multiples of `ARENA_ALIGN` (4096).
    nbytes: int64[n], payload bytes. The slot itself is as long as `slot_bytes(nbytes)`, so an
        I/O may be rounded up to any alignment up to 4096 without leaving the slot.
    """

    keys: Keys
    records: Records
    arena: memoryview
    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def payload(self, i: int) -> memoryview:
        """Exactly the payload bytes of block i."""
        start = int(self.offsets[i])
        return self.arena[start : start + int(self.nbytes[i])]

    def payloads(self) -> list[memoryview]:
        """`payload(i)` for all blocks."""
        arena = self.arena
        return [
            arena[a : a + n]
            for a, n in zip(self.offsets.tolist(), self.nbytes.tolist(), strict=True)
        ]

    def take(self, rows: NDArray[np.intp]) -> BlockBatch:
        """The blocks at positions `rows`. `records` is a copy: write results back yourself."""
        return BlockBatch(
            self.keys.take(rows),
            self.records[rows],
            self.arena,
            self.offsets[rows],
            self.nbytes[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What a backend is told at `open`.

    namespace: digest of everything that decides what the bytes mean. Blocks of two namespaces
        never meet: a backend keeps them apart by this value (all 32 bytes of it).
    namespace_text: the readable form, for people who look into a store.
    rank, data_parallel_rank: which process of an engine this is; part of where things lie.
    block_bytes: payload bytes per block, one entry a group; where a codec is at work, the most.
    retire: `await retire(keys)` before giving up published blocks to make room. Returns when the
        side that decides has stopped promising them and no load holds them; only then may the
        space be used again. It may take as long as a load; never hold a lock that a read needs.
    """

    namespace: bytes
    namespace_text: str
    rank: int = 0
    data_parallel_rank: int = 0
    block_bytes: tuple[int, ...]
    retire: Callable[[Keys], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a backend holds.

    blocks: published blocks of this namespace and rank.
    payload_bytes: their payload. physical_bytes: what the quota counts (padding, headers,
        preallocated space; all namespaces of the root included). capacity_bytes: the quota;
        0 where there is none.
    modes: which path is really in force, in words: `{"io": "threads", "direct": "yes", …}`.
    counters: monotonic counts of the backend's own (`bytes_written`, …).
    """

    blocks: int
    payload_bytes: int
    physical_bytes: int
    capacity_bytes: int
    modes: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


class Backend(ABC):
    """A storage tier's code. One instance serves one namespace and rank on one event loop."""

    scheme: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_url(cls, url: TierURL) -> Backend:
        """Parse options once. `ConfigError` for an unknown or bad one. No I/O here."""

    @abstractmethod
    async def open(self, context: BackendContext) -> None:
        """Take ownership and recover. Raises `StoreError` or `ConfigError`, one clear line."""

    @abstractmethod
    async def close(self) -> None:
        """Give everything back. Safe to call twice, and after a failed `open`."""

    @abstractmethod
    async def write(self, batch: BlockBatch) -> Outcomes:
        """Store a batch: DONE, DECLINED or FAILED per key."""

    @abstractmethod
    async def read(self, batch: BlockBatch) -> Outcomes:
        """Fill buffers and `batch.records`: DONE, MISSING, CORRUPT or FAILED per key."""

    @abstractmethod
    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """bool[n]: which keys are published. Right away after a `write` or `delete`."""

    @abstractmethod
    async def delete(self, keys: Keys) -> None:
        """Forget these keys; unknown ones are fine. A kill right after may bring one back."""

    @abstractmethod
    async def clear(self) -> None:
        """Forget every block of this namespace and rank for good, kills included."""

    @abstractmethod
    def scan(self) -> AsyncIterator[Keys]:
        """All published keys, in batches of any size."""

    @abstractmethod
    async def usage(self) -> Usage:
        """What is held right now."""


async def finish(work: Awaitable[_T]) -> _T:
    """Await `work` to its end even when cancelled, and only then let the cancellation out.

    For what works in a caller's buffers from a thread: `await finish(asyncio.to_thread(copy))`.
    A plain await would return at once and leave the thread writing. However often it is
    cancelled, it waits; an exception of `work` is raised in place of the cancellation.
    """
    result, cancelled = await finished(work)
    if cancelled:
        raise asyncio.CancelledError
    return result


async def finished(work: Awaitable[_T]) -> tuple[_T, bool]:
    """`finish` for who has something to note first: the result, and whether to raise then."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    cancelled = False
    while not task.done():
        waiter = loop.create_future()
        task.add_done_callback(partial(_wake, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


def _wake(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def in_thread(
    pool: Executor, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> asyncio.Future[_T]:
    """Run `function` in the pool, for half of what `run_in_executor` costs.

    Like there, cancelling the future does not stop the thread: await it through `finish`. If the
    pool is shut down before the function began, the future is cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def work() -> None:
        try:
            end: Callable[[], None] = partial(_set_result, future, function(*args, **kwargs))
        except BaseException as exc:  # noqa: BLE001 - it goes to whoever awaits the future
            end = partial(_set_exception, future, exc)
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(end)

    def ended(submitted: Future[None]) -> None:
        if submitted.cancelled():
            future.cancel()

    pool.submit(work).add_done_callback(ended)
    return future


def _set_result(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[_T], exc: BaseException) -> None:
    if not future.done():
        future.set_exception(exc)


@runtime_checkable
class SupportsSharedLookup(Protocol):
    """Others write to the same store, so what it holds is a question, not a table."""

    async def probe(self, keys: Keys) -> NDArray[np.bool_]:
        """bool[n]: which keys the store has now, asked of the store itself."""
        ...


@runtime_checkable
class SupportsLengths(Protocol):
    """Says how long its blocks are, so that they may be shorter than their group's `block_bytes`.

    A tier with a codec needs it: it stores some blocks encoded, and reads those into a buffer that
    is as long as they are.
    """

    async def lengths(self, keys: Keys) -> NDArray[np.int64]:
        """int64[n]: payload bytes of each published block, 0 for a key that is not. From memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptBlock:
    """One block that `SupportsVerify.verify` could not prove.

    namespace: the directory, prefix or name it was found under. group, hash_hex: its key.
    where: file and byte offset, or what the backend calls a place. reason: in words.
    """

    namespace: str
    group: int
    hash_hex: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What `SupportsVerify.verify` did not read, though it belongs to the store.

    directory: the directory or prefix that it lies in. reason: in words, with the file where it
    is only one.
    """

    directory: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What reading a whole store showed.

    blocks, payload_bytes: what was read and either proven or found `corrupt`. skipped: what was
    not read, so that nothing is known of it. A store is sound where both are empty.
    """

    blocks: int
    payload_bytes: int
    corrupt: tuple[CorruptBlock, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@runtime_checkable
class SupportsVerify(Protocol):
    """The store behind a URL can be read from outside, by `tierkv verify`."""

    async def verify(self, progress: Callable[[int, int], None]) -> Verification:
        """Read every published block of every namespace and prove it. Changes nothing.

        Called on a backend that is made from a URL but not open. `progress(done, total)` counts
        payload bytes and is called on the loop. What cannot be read is listed in `skipped`. Raises
        `StoreError` where there is no store of this kind. Cancellation leaves nothing behind.
        """
        ...
