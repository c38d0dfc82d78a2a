"""The blocking half of the file backend: one owner's directory, its lock, what is in it.

Every method ends in ``_sync`` and is run in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.backend import BackendContext
from tierkv.errors import StoreBusyError, StoreUnusableError
from tierkv.record import RECORD_BYTES
from tierkv_backends.file import names

log = logging.getLogger(__name__)

CLUSTER_BYTES = 4096
"""What file systems allocate in; the quota counts whole ones."""


def on_disk(nbytes: int) -> int:
    """Bytes that a block of `nbytes` payload takes in the quota."""
    return -(-(RECORD_BYTES + nbytes) // CLUSTER_BYTES) * CLUSTER_BYTES


@dataclass(slots=True, eq=False)
class Block:
    """A published block; its identity tells it from a later one with the same key."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Foreign:
    """The directory of another namespace whose owner is gone, and what it takes in the quota."""

    path: Path
    nbytes: int
    mtime: float


class Directory:
    """One owner's directory. `open_sync` first; `release_sync` gives the lock back."""

    def __init__(self, root: Path, context: BackendContext) -> None:
        self.root = root
        self.path = root / names.owner_of(context)
        self.blocks = self.path / "blocks-0"
        self._context = context
        self._lock_fd: int | None = None

    def open_sync(self) -> dict[names.Key, Block]:
        """Take ownership and list what is there, the oldest first. No payload is read.

        Raises `StoreBusyError` or `StoreUnusableError`; whatever was taken is given back.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with root_lock_sync(self.root):
                self._lock_fd = self._lock_sync()
            self._describe_sync()
            for left in self.root.glob(names.TRASH_GLOB):
                with contextlib.suppress(OSError):  # another user's, say; it counts for nobody
                    _remove_sync(left)
            self._settle_sync()
            return self._recover_sync()
        except OSError as exc:
            self.release_sync()
            raise StoreUnusableError(
                f"file tier {self.root}: {exc.strerror or exc} ({exc.filename}); "
                "name a directory that this user can write to and that has room"
            ) from exc
        except BaseException:
            self.release_sync()
            raise

    def release_sync(self) -> None:
        """Give the lock back. Safe to call twice."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    def _lock_sync(self) -> int:
        path = self.path / "lock"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Somebody who needed room may have removed the directory while we opened the lock.
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                    return fd
            except BlockingIOError:
                owner = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
                os.close(fd)
                raise StoreBusyError(
                    f"file tier {self.path} is owned by {owner}; end it, or use another directory"
                ) from None
            except FileNotFoundError:
                self.path.mkdir(parents=True, exist_ok=True)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _describe_sync(self) -> None:
        about = {
            "namespace": self._context.namespace.hex(),
            "text": self._context.namespace_text,
            "rank": self._context.rank,
            "data_parallel_rank": self._context.data_parallel_rank,
        }
        temporary = self.path / f"about{names.TEMPORARY}"
        temporary.write_text(json.dumps(about, indent=1))
        os.replace(temporary, self.path / "about.json")

    def _settle_sync(self) -> None:
        """Find the current blocks, and remove what a killed clear left behind."""
        numbers = [0]
        for entry in self.path.iterdir():
            kind, _, number = entry.name.partition("-")
            if kind == "blocks" and number.isdecimal():
                numbers.append(int(number))
            elif kind == "trash":
                shutil.rmtree(entry)
        for older in set(numbers) - {max(numbers)}:
            shutil.rmtree(self.path / f"blocks-{older}", ignore_errors=True)
        self.blocks = self.path / f"blocks-{max(numbers)}"
        self.blocks.mkdir(exist_ok=True)

    def _recover_sync(self) -> dict[names.Key, Block]:
        found: list[tuple[float, names.Key, int]] = []
        strange = 0
        for path, entry in files_sync(self.blocks):
            key = names.key_of(path)
            status = entry.stat()
            if key is not None and status.st_size > RECORD_BYTES:
                found.append((status.st_mtime, key, status.st_size - RECORD_BYTES))
            elif key is not None or entry.name.endswith(names.TEMPORARY):
                # We hold the lock, so nobody is writing it: its writer was killed (or, for an empty
                # block file, the power went before its bytes were out).
                os.unlink(entry.path)
            else:
                strange += 1
        if strange:
            log.warning("file tier %s: %d files are not ours; left alone", self.path, strange)
        found.sort(key=lambda item: item[0])
        return {key: Block(nbytes) for _, key, nbytes in found}

    def next_blocks(self) -> Path:
        """Where blocks lie after the next clear."""
        return self.path / f"blocks-{int(self.blocks.name.partition('-')[2]) + 1}"

    def clear_sync(self, old: Path, new: Path) -> None:
        """Make `new` the current blocks for good, then delete those in `old`."""
        new.mkdir()  # from here on a kill leaves the store cleared
        trash = old.with_name(f"trash-{old.name}")
        os.rename(old, trash)  # whoever still writes there finds no directory
        shutil.rmtree(trash)

    def capacity_sync(self, share: float) -> tuple[int, int]:
        """(default capacity, total bytes of the file system): a share of what is free, and ours."""
        status = os.statvfs(self.path)
        ours = sum(entry.stat().st_size for _, entry in files_sync(self.path))
        free = status.f_bavail * status.f_frsize
        return int((free + ours) * share), status.f_blocks * status.f_frsize

    def foreign_sync(self) -> list[Foreign]:
        """Directories of other namespaces that nobody holds, the coldest first.

        Other ranks of our namespace are left out: they may be about to open.
        """
        out = []
        for path in self.root.iterdir():
            namespace = names.namespace_of(path.name)
            if namespace is None or namespace == self._context.namespace.hex():
                continue
            with root_lock_sync(self.root), _held_sync(path) as mine:
                if not mine:
                    continue
            # Not held while it is read, which may take long: whoever owns it may open it.
            try:
                files = [entry.stat() for _, entry in files_sync(path)]
            except FileNotFoundError:  # it has an owner again, or went
                continue
            out.append(
                Foreign(
                    path,
                    sum(on_disk(s.st_size - RECORD_BYTES) for s in files),
                    max((s.st_mtime for s in files), default=0.0),
                )
            )
        return sorted(out, key=lambda f: f.mtime)


def drop_foreign_sync(foreign: Foreign) -> None:
    """Delete another namespace's directory, unless it has an owner again."""
    path = foreign.path
    with root_lock_sync(path.parent), _held_sync(path) as mine:
        if not mine:
            return
        # A name of its own, because an earlier one may lie there still.
        trash = path.with_name(f"trash-{path.name}-{secrets.token_hex(4)}")
        os.rename(path, trash)
    _remove_sync(trash)
    log.warning("file tier: %s made room, %d bytes of another namespace", path.name, foreign.nbytes)


def _remove_sync(trash: Path) -> None:
    """Delete a directory that counts no more. Somebody else may be doing the same."""
    while True:
        try:
            shutil.rmtree(trash)
        except FileNotFoundError:
            if trash.exists():
                continue
        return


@contextlib.contextmanager
def root_lock_sync(root: Path) -> Iterator[None]:
    """Hold the lock of `root`, for moments: nobody then takes an owner's lock to look for it.

    Not taken where this user may not write: whoever only looks can do without.
    """
    try:
        fd = os.open(root / names.ROOT_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        if exc.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def owner_sync(path: Path) -> str:
    """Who has a directory open, in words; "" for nobody. Under the root's lock."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 200, 0).decode(errors="replace") or "another process"
    finally:
        os.close(fd)
    return ""


@contextlib.contextmanager
def _held_sync(path: Path) -> Iterator[bool]:
    """Hold another owner's lock for a moment; False where it is taken or there is none."""
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def files_sync(top: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files below `top` with their path relative to it."""
    waiting = [(str(top), "")]
    while waiting:
        folder, prefix = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{prefix}{entry.name}/"))
                else:
                    yield prefix + entry.name, entry


def no_room(exc: OSError) -> bool:
    """Whether an error means that the disk, or this user's share of it, is full."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)
