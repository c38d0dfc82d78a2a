"""``sluggish://?read=hang``: a memory tier that misbehaves in a keeper, as its URL says.

open, write, read: ``hang`` never ends, cancelled or not; ``block`` stops the event loop; ``exit``
ends the process; ``flip`` (read) damages what it gives. flag: a file; without it the tier behaves,
so that a keeper can be made to misbehave after its first open.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tierkv.backend import BackendContext, BlockBatch, Outcomes
from tierkv.urls import TierURL
from tierkv_backends.memory import MemoryBackend


class SluggishBackend(MemoryBackend):
    scheme = "sluggish"
    orders: dict[str, str]

    @classmethod
    def from_url(cls, url: TierURL) -> SluggishBackend:
        self = cls()
        self.orders = url.take(["open", "write", "read", "flag"])
        return self

    async def _obey(self, call: str) -> None:
        flag = self.orders.get("flag")
        if flag is not None and not Path(flag).exists():
            return
        match self.orders.get(call):
            case "hang":
                while True:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        continue
            case "block":
                signal.pause()
            case "exit":
                os._exit(7)

    async def open(self, context: BackendContext) -> None:
        await self._obey("open")
        await super().open(context)

    async def write(self, batch: BlockBatch) -> Outcomes:
        await self._obey("write")
        return await super().write(batch)

    async def read(self, batch: BlockBatch) -> Outcomes:
        await self._obey("read")
        outcomes = await super().read(batch)
        if self.orders.get("read") == "flip":
            for i in range(len(batch)):
                batch.payload(i)[0] ^= 1
        return outcomes
