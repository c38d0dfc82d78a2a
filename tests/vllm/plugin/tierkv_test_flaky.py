"""`flaky:///dir?rate=0.05&seed=1&…`: the nvme backend behind a `FaultyBackend` that faults at
random, for the soak: it runs in the keeper, where no test can reach it."""

from __future__ import annotations

import asyncio
import errno
import random
from urllib.parse import urlencode

from tierkv.backend import Backend, BlockBatch, Outcomes
from tierkv.blocks import Outcome
from tierkv.registry import make_backend
from tierkv.testing.doubles import FaultyBackend, Lie, Op
from tierkv.urls import TierURL

WRITE_FAULTS = (
    OSError(errno.EIO, "injected"),
    OSError(errno.ENOSPC, "injected"),
    Outcome.DECLINED,
    Outcome.FAILED,
    Lie.FLIP_BIT,
    Lie.SHORT,
    Lie.DROP,
)
READ_FAULTS = (
    OSError(errno.EIO, "injected"),
    Outcome.MISSING,
    Outcome.FAILED,
    Lie.FLIP_BIT,
    Lie.SHORT,
)
HANG_S = 3.0


class FlakyBackend(FaultyBackend):
    """Every call goes wrong with probability `rate`, one way or another; some hang."""

    scheme = "flaky"

    def __init__(self, inner: Backend, rate: float, seed: int) -> None:
        super().__init__(inner)
        self._rate, self._random = rate, random.Random(seed)

    @classmethod
    def from_url(cls, url: TierURL) -> Backend:
        options = dict(url.options)
        rate, seed = float(options.pop("rate")), int(options.pop("seed"))
        return cls(make_backend(f"nvme://{url.path}?{urlencode(options)}"), rate, seed)

    async def _maybe(self, op: Op, faults: tuple[object, ...]) -> None:
        if self._random.random() < self._rate:
            if self._random.random() < 0.1:
                await asyncio.sleep(HANG_S)
            self.heal()
            self.fail(op, self._random.choice(faults), times=1)

    async def write(self, batch: BlockBatch) -> Outcomes:
        await self._maybe(Op.WRITE, WRITE_FAULTS)
        return await super().write(batch)

    async def read(self, batch: BlockBatch) -> Outcomes:
        await self._maybe(Op.READ, READ_FAULTS)
        return await super().read(batch)
