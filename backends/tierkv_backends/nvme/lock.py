"""Locks between processes: flock, so that a killed owner holds nothing."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tierkv.errors import StoreBusyError
from tierkv_backends.nvme.files import close_fd_sync, read_file_sync

log = logging.getLogger(__name__)

LOCK_NAME: Final = "LOCK"
ROOT_WAIT_S: Final = 10.0
"""How long the books of a root may be held by others. They are held for milliseconds; a holder
that was stopped must not stop everyone."""

_POLL_S: Final = 0.002


def try_lock_sync(path: Path) -> int | None:
    """A descriptor that holds the lock at `path`, made if missing; None where someone holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        close_fd_sync(fd)
        return None
    except OSError:  # a file system without locks
        close_fd_sync(fd)
        raise
    return fd


def own_sync(directory: Path) -> int:
    """Own `directory` until the descriptor is closed; `StoreBusyError` says who does."""
    path = directory / LOCK_NAME
    fd = try_lock_sync(path)
    if fd is None:
        raise StoreBusyError(f"nvme store {directory} is in use by {owner_sync(directory)}")
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, _who().encode(errors="replace"), 0)
    except OSError as exc:  # a full disk: we own it all the same, only nobody can read who
        log.warning("nvme: %s does not say who owns it: %s", path, exc)
    return fd


def owner_sync(directory: Path) -> str:
    """Who wrote the lock of `directory` last, in words."""
    try:
        text = read_file_sync(directory / LOCK_NAME).decode(errors="replace").strip()
    except OSError:
        text = ""
    return text or "another process"


def is_owned_sync(directory: Path) -> bool:
    """Whether a process owns `directory` right now. Only under the root's lock is that stable."""
    path = directory / LOCK_NAME
    if not path.exists():
        return False
    fd = try_lock_sync(path)
    if fd is None:
        return True
    close_fd_sync(fd)
    return False


@contextmanager
def root_lock_sync(root: Path) -> Iterator[None]:
    """Hold the books of `root`. `StoreBusyError` after `ROOT_WAIT_S`."""
    until = time.monotonic() + ROOT_WAIT_S
    while (fd := try_lock_sync(root / LOCK_NAME)) is None:
        if time.monotonic() > until:
            raise StoreBusyError(
                f"nvme root {root}: another process has held its lock for {ROOT_WAIT_S:.0f} s"
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        close_fd_sync(fd)


def _who() -> str:
    command = " ".join(sys.argv)[:200] or sys.executable
    return f"pid {os.getpid()} on {socket.gethostname()} ({command})"
