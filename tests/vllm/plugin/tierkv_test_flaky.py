"""`flaky:///dir?rate=0.05&seed=1&tally=/file&…`: the nvme backend behind a `FaultyBackend` that
faults at random, for the soak: it runs in the keeper, where no test can reach it. Each fault is a
line of the tally."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path
from urllib.parse import urlencode

from tierkv.backend import Backend, BlockBatch, Outcomes
from tierkv.blocks import Outcome
from tierkv.registry import make_backend
from tierkv.testing.doubles import FaultyBackend, Lie, Op
from tierkv.urls import TierURL

WRITE_FAULTS = (
    errno.EIO,
    errno.ENOSPC,
    Outcome.DECLINED,
    Outcome.FAILED,
    Lie.FLIP_BIT,
    Lie.SHORT,
    Lie.DROP,
)
READ_FAULTS = (
    errno.EIO,
    Outcome.MISSING,
    Outcome.FAILED,
    Lie.FLIP_BIT,
    Lie.SHORT,
)
HANG_S = 3.0


class FlakyBackend(FaultyBackend):
    """Every call goes wrong with probability `rate`, one way or another; some hang."""

    scheme = "flaky"

    def __init__(self, inner: Backend, rate: float, seed: int, tally: str) -> None:
        super().__init__(inner)
        self._rate, self._random, self._tally = rate, random.Random(seed), Path(tally)

    @classmethod
    def from_url(cls, url: TierURL) -> Backend:
        options = dict(url.options)
        rate, seed = float(options.pop("rate")), int(options.pop("seed"))
        tally = options.pop("tally")
        return cls(make_backend(f"nvme://{url.path}?{urlencode(options)}"), rate, seed, tally)

    async def _maybe(self, op: Op, faults: tuple[int | Outcome | Lie, ...]) -> None:
        if self._random.random() < self._rate:
            if self._random.random() < 0.1:
                self._note(op, "HANG")
                await asyncio.sleep(HANG_S)
            fault = self._random.choice(faults)
            if isinstance(fault, Outcome | Lie):
                self._note(op, fault.name)
            else:
                self._note(op, errno.errorcode[fault])
                fault = OSError(fault, "injected")  # a new one each time: it keeps its traces
            self.heal()
            self.fail(op, fault, times=1)

    def _note(self, op: Op, name: str) -> None:
        with self._tally.open("a") as tally:
            tally.write(f"{op.name.lower()} {name}\n")

    async def write(self, batch: BlockBatch) -> Outcomes:
        await self._maybe(Op.WRITE, WRITE_FAULTS)
        return await super().write(batch)

    async def read(self, batch: BlockBatch) -> Outcomes:
        await self._maybe(Op.READ, READ_FAULTS)
        return await super().read(batch)
