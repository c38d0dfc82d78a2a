"""``memory://?capacity=1GiB``: blocks in this process's RAM, while the backend is open.

The short example to copy when you write a backend of your own. It shows the four things that need
care: results per key, the loop left alone (bytes are copied in a thread), cancellation (`finish`
waits for that thread), and making room (`context.retire` before a block is given up).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import Backend, BackendContext, BlockBatch, Outcomes, Usage, finish
from tierkv.blocks import Keys, Outcome
from tierkv.errors import StoreError
from tierkv.urls import TierURL, parse_size

_Key = tuple[int, bytes]


class MemoryBackend(Backend):
    """A dict of (record, payload), least recently used first. `close` forgets everything."""

    scheme = "memory"

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._capacity_bytes = capacity_bytes  # 0: no limit
        self._blocks: dict[_Key, tuple[bytes, bytes]] = {}
        self._payload_bytes = 0
        self._context: BackendContext | None = None
        self._making_room = asyncio.Lock()
        self._retiring: set[_Key] = set()

    @classmethod
    def from_url(cls, url: TierURL) -> MemoryBackend:
        """Options: `capacity`, payload bytes to hold at most (default: no limit)."""
        options = url.take(["capacity"])
        return cls(parse_size(options.get("capacity", "0"), f"tier URL {url.text!r}: capacity"))

    async def open(self, context: BackendContext) -> None:
        """Start empty."""
        self._context = context

    async def close(self) -> None:
        """Forget everything."""
        self._context = None
        await self.clear()

    async def write(self, batch: BlockBatch) -> Outcomes:
        """DONE, or DECLINED where a block alone exceeds the capacity."""
        out = np.full(len(batch), Outcome.DONE, np.uint8)
        self._retiring.difference_update(batch.keys)  # wanted again: these stay
        new = np.array([i for i, key in enumerate(batch.keys) if not self._touch(key)], np.intp)
        copies = await finish(asyncio.to_thread(_copy_sync, batch.take(new)))
        for i, (key, block) in zip(new.tolist(), copies.items(), strict=True):
            if not await self._make_room(len(block[1])):
                out[i] = Outcome.DECLINED
            elif key not in self._blocks:  # another call may have been faster meanwhile
                self._blocks[key] = block
                self._payload_bytes += len(block[1])
        return out

    async def read(self, batch: BlockBatch) -> Outcomes:
        """DONE, or MISSING where the key or its length is not what was written."""
        out = np.full(len(batch), Outcome.MISSING, np.uint8)
        found: dict[int, bytes] = {}
        for i, key in enumerate(batch.keys):
            record, payload = self._blocks.get(key, (b"", b""))
            if len(payload) == batch.nbytes[i] and self._touch(key):
                batch.records[i] = np.frombuffer(record, batch.records.dtype)[0]
                found[i] = payload
                out[i] = Outcome.DONE
        await finish(asyncio.to_thread(_fill_sync, batch, found))
        return out

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """One look into the dict per key."""
        return np.fromiter((key in self._blocks for key in keys), np.bool_, len(keys))

    async def lengths(self, keys: Keys) -> NDArray[np.int64]:
        """`tierkv.backend.SupportsLengths`."""
        return np.fromiter((len(self._blocks.get(k, (b"", b""))[1]) for k in keys), np.int64)

    async def delete(self, keys: Keys) -> None:
        """Forget these."""
        for key in keys:
            block = self._blocks.pop(key, None)
            if block is not None:
                self._payload_bytes -= len(block[1])

    async def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        self._payload_bytes = 0

    async def scan(self) -> AsyncIterator[Keys]:
        """One batch."""
        yield Keys.of(list(self._blocks))

    async def usage(self) -> Usage:
        """Payload is all there is."""
        return Usage(
            blocks=len(self._blocks),
            payload_bytes=self._payload_bytes,
            physical_bytes=self._payload_bytes,
            capacity_bytes=self._capacity_bytes,
            modes={"io": "ram"},
        )

    def _touch(self, key: _Key) -> bool:
        """Whether the key is there; if so it is the most recently used now."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._blocks[key] = block
        return block is not None

    async def _make_room(self, nbytes: int) -> bool:
        """Give up the least recently used blocks until `nbytes` fit, asking first."""
        if not self._capacity_bytes:
            return True
        if nbytes > self._capacity_bytes:
            return False
        async with self._making_room:
            while self._payload_bytes + nbytes > self._capacity_bytes:
                if self._context is None:
                    raise StoreError("the memory tier was closed while a write waited for room")
                oldest = next(iter(self._blocks))
                self._retiring.add(oldest)
                await self._context.retire(Keys.of([oldest]))  # readable until this returns
                if oldest in self._retiring:
                    self._retiring.discard(oldest)
                    await self.delete(Keys.of([oldest]))
        return True


def _copy_sync(batch: BlockBatch) -> dict[_Key, tuple[bytes, bytes]]:
    return {
        key: (batch.records[i].tobytes(), bytes(batch.payload(i)))
        for i, key in enumerate(batch.keys)
    }


def _fill_sync(batch: BlockBatch, found: dict[int, bytes]) -> None:
    for i, payload in found.items():
        batch.payload(i)[:] = payload
