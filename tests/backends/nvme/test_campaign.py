"""One call of the operating system fails, anywhere in a store's life: nothing acknowledged is lost.

Numbered calls, so that a failure can be run again: the fault comes at the n-th call of its kind
that concerns the store, in a life of two opens that writes more than the quota holds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.blocks import Keys, Outcome
from tierkv.errors import TierKVError
from tierkv.testing import Key, load, make_blocks, save, sizes

Opened = Callable[..., Any]

OPTIONS = "capacity=320KiB&segment=64KiB&threads=2"
BYTES = (4096, 700)
NUMBERS = (1, 2, 4, 7, 11, 18, 26, 40)
CALLS = ("pwritev", "preadv", "pread", "open", "posix_fallocate", "fstat", "stat", "close")


class Fault:
    """The `number`-th call of `name` fails with `code`; calls about other files do not count."""

    def __init__(self, name: str, number: int, code: int, root: Path) -> None:
        self.left, self.name, self.code, self.root = number, name, code, str(root)
        self.real = getattr(os, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        foreign = isinstance(arguments[0], str | os.PathLike) and not str(arguments[0]).startswith(
            self.root
        )
        if not foreign:
            self.left -= 1
            if self.left == 0:
                if self.name == "close":
                    self.real(*arguments)  # Linux closes, whatever it answers
                raise OSError(self.code, os.strerror(self.code))
        return self.real(*arguments, **options)


async def two_lives(opened: Opened, root: Path) -> tuple[dict[Key, bytes], dict[Key, bytes]]:
    """What was acknowledged and not given up since, and everything that was ever offered."""
    must: dict[Key, bytes] = {}
    offered: dict[Key, bytes] = {}

    async def retire(keys: Keys) -> None:
        for key in keys:
            must.pop(key, None)

    for life in range(2):
        try:
            async with opened(root, OPTIONS, block_bytes=BYTES, retire=retire) as backend:
                for number in range(7):
                    blocks = make_blocks(6, BYTES, first=life * 1000 + number * 10)
                    offered |= blocks
                    outcomes = await save(backend, blocks)
                    must |= {k: v for k, v in blocks.items() if outcomes[k] is Outcome.DONE}
                found = await load(backend, sizes(offered))
                served = {k: v for k, v in found.items() if isinstance(v, bytes)}
                assert served.items() <= offered.items()
        except TierKVError as exc:
            assert "\n" not in str(exc)
    return must, offered


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_fails_once_loses_nothing_and_leaks_nothing(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for number in NUMBERS:
        code = errno.EIO if number % 2 else errno.ENOSPC
        root = tmp_path / f"{name}-{number}"
        descriptors = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Fault(name, number, code, root))
            must, offered = await two_lives(opened, root)
        assert len(os.listdir("/proc/self/fd")) == descriptors, number
        async with opened(root, OPTIONS, block_bytes=BYTES) as backend:
            found = await load(backend, sizes(offered))
            served = {k: v for k, v in found.items() if isinstance(v, bytes)}
            assert served.items() <= offered.items(), number
            assert must.items() <= served.items(), number
            assert (await backend.usage()).physical_bytes <= 320 << 10, number
            late = make_blocks(6, BYTES, first=9000)
            assert set((await save(backend, late)).values()) == {Outcome.DONE}, number
            assert await load(backend, sizes(late)) == late, number
