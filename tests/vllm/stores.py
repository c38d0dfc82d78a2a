"""Stores on NVMe: empty ones, and copies of one that an engine has filled."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from engines import ROUND, engine


def nvme(store: Path) -> dict[str, Any]:
    """The connector's options for a store there."""
    return {"url": f"nvme://{store}?capacity=256MiB&segment=8MiB"}


class Filled(NamedTuple):
    """A closed store, to be copied, and the bytes of a block that hits of its first prompt need."""

    store: Path
    needed: bytes


@functools.cache
def filled(model: str) -> Filled:
    """What an engine stored of `ROUND`, and the fourth full-attention block of the first prompt."""
    store = Path(tempfile.mkdtemp(prefix="tierkv-filled-")) / "store"
    atexit.register(shutil.rmtree, store.parent)
    with engine(model, extra=nvme(store)) as ours:
        worker, seen = ours.worker_side, []
        gather = worker._pages.gather
        full = len(worker._layout.groups) - 1  # the full-attention group is the last one

        def spy(groups: Any, block_ids: Any, arena: Any, offsets: Any) -> None:
            gather(groups, block_ids, arena, offsets)
            start = int(offsets[groups == full][3])
            seen.append(bytes(arena[start : start + worker._layout.block_bytes[full]].numpy()))

        worker._pages.gather = spy
        ours.ask(ROUND[:1])
        ours.settle()
        worker._pages.gather = gather
        ours.ask(ROUND[1:])
        ours.settle()
        assert ours.counters["stored_bytes"] > 0
    return Filled(store, seen[0])


def fill(model: str, store: Path) -> None:
    """Make a store that holds what an engine stored of `ROUND`, and that no engine has open."""
    shutil.copytree(filled(model).store, store)
