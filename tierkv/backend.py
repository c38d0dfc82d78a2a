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

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import Keys
from tierkv.outside import BlockPlace as BlockPlace
from tierkv.outside import CorruptBlock as CorruptBlock
from tierkv.outside import Evicted as Evicted
from tierkv.outside import Eviction as Eviction
from tierkv.outside import GroupHoldings as GroupHoldings
from tierkv.outside import Inspection as Inspection
from tierkv.outside import Skipped as Skipped
from tierkv.outside import StorePart as StorePart
from tierkv.outside import SupportsEvict as SupportsEvict
from tierkv.outside import SupportsInspect as SupportsInspect
from tierkv.outside import SupportsVerify as SupportsVerify
from tierkv.outside import Verification as Verification
from tierkv.record import Records
from tierkv.threads import finish as finish
from tierkv.threads import finished as finished
from tierkv.threads import in_thread as in_thread
from tierkv.urls import TierURL

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
    worth: `await worth(keys)`: bool[n], which of these published blocks are worth writing again
        before their space is used for others; changes no promise. All false where nobody answers
        in time. None: there is nobody to ask.
    """

    namespace: bytes
    namespace_text: str
    rank: int = 0
    data_parallel_rank: int = 0
    block_bytes: tuple[int, ...]
    retire: Callable[[Keys], Awaitable[None]]
    worth: Callable[[Keys], Awaitable[NDArray[np.bool_]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a backend holds.

    blocks: published blocks of this namespace and rank.
    payload_bytes: their payload. physical_bytes: what the quota counts (padding, headers,
        preallocated space; all namespaces of the root included). capacity_bytes: the quota;
        0 where there is none.
    modes: which path is really in force, in words: `{"io": "threads", "direct": "yes", …}`.
    counters: monotonic counts of the backend's own (`bytes_written`, …).
    ratios: what follows from them and is no whole number (`write_amplification`, …).
    """

    blocks: int
    payload_bytes: int
    physical_bytes: int
    capacity_bytes: int
    modes: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)


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


Seal = Callable[[BlockBatch], None]
"""Makes `batch.records` of a batch, or of a part of it. Reads every byte: in a thread."""

Prove = Callable[[BlockBatch], NDArray[np.bool_]]
"""bool[n]: which blocks of a batch, or of a part of it, are right. In a thread, too."""


@runtime_checkable
class SupportsInlineProof(Protocol):
    """Has blocks sealed and proven in the threads that move them, in one trip instead of two."""

    async def write_sealing(self, batch: BlockBatch, seal: Seal) -> Outcomes:
        """`write`, but `batch.records` are blank until the backend calls `seal` with each part.

        It does so in a thread before records or payload of the part are stored. The stored length
        of each block is `batch.nbytes`.
        """
        ...

    async def read_proving(self, batch: BlockBatch, prove: Prove) -> Outcomes:
        """`read`, but what was read is CORRUPT unless `prove` says it is right.

        `prove` is called in a thread with payload and records in place, once for every block that
        ends DONE or CORRUPT.
        """
        ...


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


@runtime_checkable
class SupportsProbe(Protocol):
    """Which of several ways a backend would take can be asked before it is open."""

    async def probe(self) -> dict[str, str]:
        """`mode`: the way an `open` would take. `reason`: why that one. By `tierkv doctor`.

        Called on a backend that is made from a URL but not open, where its directory is there.
        Leaves nothing behind.
        """
        ...


class DevicePath(enum.StrEnum):
    """How blocks get from a GPU's memory to a tier."""

    DIRECT = "direct"
    """Past host memory, on the stream that their owner names."""
    BOUNCE = "bounce"
    """Through host memory of a library's own. The arena is no slower, and waits for no stream."""
    NONE = "none"
    """Through the arena only."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A stretch of GPU memory, valid in the process that opened the backend.

    base, base_nbytes: the allocation, as it was registered. stream: raw handle of the CUDA stream
        on which it is read and written; 0 is the default stream. start: where the stretch begins.
        length: its bytes; None: all from `start`. ``memory[a:b]`` is a part of it, as of a
        memoryview.
    """

    base: int
    base_nbytes: int
    stream: int = 0
    start: int = 0
    length: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the stretch."""
        return self.base_nbytes - self.start if self.length is None else self.length

    @property
    def address(self) -> int:
        """Where the stretch begins, as a device pointer."""
        return self.base + self.start

    def __getitem__(self, part: slice) -> DeviceMemory:
        first, last, step = part.indices(self.nbytes)
        if step != 1:
            raise ValueError("a part of device memory has no step")
        length = max(last - first, 0)
        return DeviceMemory(self.base, self.base_nbytes, self.stream, self.start + first, length)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """A `BlockBatch` whose slots lie in device memory: the same columns, the same rules.

    arena: the staging memory; offsets count from its first byte and are multiples of 4096, and
        every slot is `slot_bytes(nbytes)` long.
    """

    keys: Keys
    records: Records
    arena: DeviceMemory
    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: NDArray[np.intp]) -> DeviceBatch:
        """The blocks at positions `rows`. `records` is a copy: write results back yourself."""
        return DeviceBatch(
            self.keys.take(rows),
            self.records[rows],
            self.arena,
            self.offsets[rows],
            self.nbytes[rows],
        )


@runtime_checkable
class SupportsDeviceIO(Protocol):
    """Blocks can go between a GPU's memory and the tier without passing the arena.

    For the process that owns the GPU memory, which opens the backend itself: a pointer means
    nothing in a keeper. Checksums are the caller's: they are made where the bytes are, before
    `write_device` and after `read_device`.
    """

    @property
    def device_path(self) -> DevicePath:
        """What `open` found. Where it is not ``direct``, the arena is the better way."""
        ...

    async def register_device(self, memory: DeviceMemory) -> None:
        """Map a staging allocation once, for many transfers. `StoreError` where it cannot."""
        ...

    async def unregister_device(self, memory: DeviceMemory) -> None:
        """Undo that, before the memory is freed. No transfer may be under way."""
        ...

    async def write_device(self, batch: DeviceBatch) -> Outcomes:
        """As `Backend.write`. What lies in the slots was put there on the batch's stream.

        Cancelled or not: when this ends, neither a thread nor the device reads the slots.
        """
        ...

    async def read_device(self, batch: DeviceBatch) -> Outcomes:
        """As `Backend.read`. The bytes are there for everyone when this ends."""
        ...
