"""Giving up what lies in a root, from outside: whole segments of owners that do not run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Final

from tierkv.backend import Evicted, Eviction, Skipped
from tierkv_backends.nvme.lock import LOCK_NAME, is_owned_sync, owner_sync, root_lock_sync
from tierkv_backends.nvme.quota import (
    Share,
    delete_sync,
    directories_sync,
    physical_bytes_sync,
    remove_if_empty_sync,
    survey_sync,
)
from tierkv_backends.nvme.recovery import Meta
from tierkv_backends.nvme.store import unusable
from tierkv_backends.nvme.verify import stores_sync

_AT_ONCE: Final = 16
"""Segments that go under one hold of the root's lock: a write that needs room waits meanwhile."""


def evict_root_sync(
    root: Path,
    progress: Callable[[int, int], None],
    stop: Event,
    *,
    namespace: bytes | None,
    keep_bytes: int,
) -> Eviction:
    """`tierkv.backend.SupportsEvict` until `stop` is set. Every unlink leaves a whole store.

    `progress` is told what went, and what is to go in the end.

    The root's lock is held around each few of them: whoever opens a directory needs it too, so
    that a directory that has no owner then has none until they are done.
    """
    freed: dict[Path, int] = defaultdict(int)
    wanted = 0
    with unusable(root):
        texts = {path: _text_sync(path) for path in stores_sync(root)}
        while True:
            with root_lock_sync(root):
                named = _named_sync(root, namespace)
                # Anew each time: others write and give up meanwhile, and some of it may be live.
                over = sum(share.nbytes for share in named) - keep_bytes
                cold = [s for share in named if not share.live for s in share.segments]
                gone = sum(freed.values())
                wanted = max(wanted, gone + min(over, sum(nbytes for _, nbytes, _ in cold)))
                if over <= 0 or not cold or stop.is_set():
                    break
                _some_sync(cold, over, freed)
            progress(sum(freed.values()), wanted)
        with root_lock_sync(root):
            named = _named_sync(root, namespace)
            if keep_bytes == 0 and not stop.is_set():
                _tidy_sync(root, namespace)
        physical = physical_bytes_sync(root)
        live = [share.directory for share in named if share.live]
        skipped = [
            Skipped(directory=str(path), reason=f"in use by {owner_sync(path)}") for path in live
        ]
    left = sum(share.nbytes for share in named)
    return Eviction(
        physical_bytes=physical,
        left_bytes=left,
        evicted=tuple(
            Evicted(directory=str(path), namespace=texts.get(path, ""), freed_bytes=nbytes)
            for path, nbytes in freed.items()
        ),
        skipped=tuple(skipped) if left > keep_bytes else (),
    )


def _named_sync(root: Path, namespace: bytes | None) -> list[Share]:
    """The books of what is to shrink."""
    return [share for share in survey_sync(root, None) if _is_of_sync(share.directory, namespace)]


def _some_sync(
    cold: list[tuple[float, int, Path]], over_bytes: int, freed: dict[Path, int]
) -> None:
    """Delete the coldest segments until `over_bytes` are gone, so many at most."""
    for segment in sorted(cold)[:_AT_ONCE]:
        if over_bytes <= 0:
            return
        nbytes = delete_sync(segment)
        over_bytes -= nbytes
        freed[segment[2].parent] += nbytes


def _tidy_sync(root: Path, namespace: bytes | None) -> None:
    """Remove directories of owners that are gone and that hold nothing."""
    for path in directories_sync(root):
        ours = (path / LOCK_NAME).exists() and Meta.read_sync(path) is not None
        if ours and _is_of_sync(path, namespace) and not is_owned_sync(path):
            remove_if_empty_sync(path)


def _is_of_sync(directory: Path, namespace: bytes | None) -> bool:
    if namespace is None:
        return True
    meta = Meta.read_sync(directory)
    return meta is not None and meta.namespace == namespace


def _text_sync(directory: Path) -> str:
    meta = Meta.read_sync(directory)
    return meta.namespace_text if meta else ""
