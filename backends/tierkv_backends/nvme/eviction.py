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
    progress: Callable[[int], None],
    stop: Event,
    *,
    namespace: bytes | None,
    keep_bytes: int,
) -> Eviction:
    """`tierkv.backend.SupportsEvict` until `stop` is set. Every unlink leaves a whole store.

    The root's lock is held around each few of them: whoever opens a directory needs it too, so
    that a directory that has no owner then has none until they are done.
    """
    freed: dict[Path, int] = defaultdict(int)
    with unusable(root):
        texts = {path: _text_sync(path) for path in stores_sync(root)}
        while not stop.is_set():
            with root_lock_sync(root):
                more = _some_sync(root, freed, namespace, keep_bytes)
            progress(sum(freed.values()))
            if not more:
                break
        with root_lock_sync(root):
            live = [
                share.directory
                for share in survey_sync(root, None)
                if share.live and _is_of_sync(share.directory, namespace)
            ]
            if keep_bytes == 0 and not stop.is_set():
                _tidy_sync(root, namespace)
        left = physical_bytes_sync(root)
        skipped = [
            Skipped(directory=str(path), reason=f"in use by {owner_sync(path)}") for path in live
        ]
    return Eviction(
        physical_bytes=left,
        evicted=tuple(
            Evicted(directory=str(path), namespace=texts.get(path, ""), freed_bytes=nbytes)
            for path, nbytes in freed.items()
        ),
        skipped=tuple(skipped) if left > keep_bytes else (),
    )


def _some_sync(
    root: Path, freed: dict[Path, int], namespace: bytes | None, keep_bytes: int
) -> bool:
    """Delete the coldest segments, so many at most; whether there may be more to do."""
    shares = survey_sync(root, None)
    total = sum(share.nbytes for share in shares)
    coldest_first = sorted(s for share in _cold(shares, namespace) for s in share.segments)
    for segment in coldest_first[:_AT_ONCE]:
        if total <= keep_bytes:
            return False
        nbytes = delete_sync(segment)
        total -= nbytes
        freed[segment[2].parent] += nbytes
    return len(coldest_first) > _AT_ONCE


def _cold(shares: list[Share], namespace: bytes | None) -> list[Share]:
    return [s for s in shares if not s.live and _is_of_sync(s.directory, namespace)]


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
