"""A child that writes to an nvme store and kills itself at a numbered system call.

``python doomed.py URL ACKS CALLS PART``: after ACKS batches were acknowledged, the CALLS-th system
call that changes the store is the last: nothing of it happens (PART 0), or the first part of it
(PART 1, writes only). Every acknowledged batch is told to the parent as ``+ number``, everything
that is asked to retire as ``- hash hash …`` before the answer. Imports no torch, no pytest.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import Keys, Outcome
from tierkv.registry import make_backend
from tierkv.testing.batches import Key, every_other, make_blocks, make_context, save

BLOCK_BYTES = (4096, 700, 20)
BATCHES = 60


def batch(number: int) -> dict[Key, bytes]:
    """Some batches have an extent header of two pages."""
    blocks = 70 if number % 7 == 3 else 5
    return make_blocks(blocks, BLOCK_BYTES, first=number * 100, groups=[2] if blocks > 5 else None)


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Wraps the calls that change a store."""

    def __init__(self, calls: int, part: int) -> None:
        self.left, self.part, self.armed = calls, part, False
        write = os.pwritev
        for name in ("posix_fallocate", "ftruncate", "open", "unlink", "rename", "replace"):
            setattr(os, name, self._wrapped(getattr(os, name)))
        os.pwritev = self._write(write)

    def _last(self) -> bool:
        self.left -= self.armed
        return self.armed and self.left < 0

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._last():
                die()
            return real(*arguments, **options)

        return call

    def _write(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, buffers: list[memoryview], offset: int) -> Any:
            if self._last():
                if self.part:
                    half = max(512, sum(map(len, buffers)) // 2 // 512 * 512)
                    first = b"".join(buffers)[:half]
                    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
                        os.pwrite(file.fileno(), first, offset)
                die()
            return real(fd, buffers, offset)

        return call


async def retire(keys: Keys) -> None:
    tell("- " + " ".join(block_hash.hex() for _, block_hash in keys))


async def worth(keys: Keys) -> NDArray[np.bool_]:
    return every_other(keys)


async def main(url: str, acks: int, countdown: Countdown) -> None:
    backend = make_backend(url)
    await backend.open(make_context(BLOCK_BYTES, retire=retire, worth=worth))
    for number in range(BATCHES):
        countdown.armed = number >= acks
        for _ in range(100):  # where others take the cores, room is made slowly
            outcomes = await save(backend, batch(number))
            if Outcome.DECLINED not in outcomes.values():
                break
            await asyncio.sleep(0.01)
        if set(outcomes.values()) == {Outcome.DONE}:
            tell(f"+ {number}")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Countdown(int(sys.argv[3]), int(sys.argv[4]))))
