"""Descriptors and system calls. All of it blocks; every fault of a device enters here.

The backend reaches the system through functions of `os` (which `pathlib` calls for everything but
opening), `fcntl.flock` and `direct.statx_sync`, looked up at each call: there a test puts its
faults (`tierkv.testing.SystemFaults`), and production pays nothing for it. So no `open()`, no
`Path.read_bytes` here: what they do happens out of sight (tests/backends/nvme/test_seam.py).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv_backends.nvme.direct import DirectMode, aligned_buffer
from tierkv_backends.nvme.engine import Engine, Memory
from tierkv_backends.nvme.format import MIN_ALIGNMENT

log = logging.getLogger(__name__)

MAX_VECTORS: Final = 1024
"""IOV_MAX of Linux: buffers in one preadv or pwritev."""

MAX_DESCRIPTORS: Final = 256
"""Idle descriptors that stay open. The usual soft limit of a process is 1024."""

_PIECE: Final = 8 << 20
"""A file that is read whole is read in pieces of this."""


@dataclass(slots=True)
class _Open:
    fd: int
    users: int = 0


class Threads:
    """The engine of nvme: vectored calls in whichever thread asks for them."""

    name = "threads"
    alignment = MIN_ALIGNMENT
    reads_over_gaps = True
    writes_in_order = True

    def write_all_sync(self, fd: int, buffers: Sequence[Memory], offset: int) -> int:
        """See `write_all_sync` of the module."""
        return write_all_sync(fd, buffers, offset)  # type: ignore[arg-type]  # no GPU's here

    def read_into_sync(self, fd: int, buffers: Sequence[Memory], offset: int) -> int:
        """See `read_into_sync` of the module."""
        return read_into_sync(fd, buffers, offset)  # type: ignore[arg-type]  # nor here

    def forget_sync(self, fd: int) -> None:
        """Nothing is held."""

    def close_sync(self) -> None:
        """Nothing is held."""

    def modes(self) -> dict[str, str]:
        """Nothing more to say."""
        return {}


THREADS: Final = Threads()


class Files:
    """Open segment files, shared by the pool's threads, and the I/O mode in force.

    A descriptor is closed only when nobody uses it, and then at the latest by `close_sync`.
    """

    def __init__(self, mode: DirectMode, engine: Engine = THREADS) -> None:
        self.mode = mode
        self.engine = engine
        self.direct_fallbacks = 0
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Path, bool], _Open] = OrderedDict()
        self._closed = False

    @contextmanager
    def use_sync(self, path: Path, *, direct: bool) -> Iterator[int]:
        """The descriptor of an existing file, for as long as the block lasts."""
        key = (path, direct)
        with self._lock:
            entry = self._open.get(key)
            if entry is None:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
                entry = self._open[key] = _Open(os.open(path, flags))
            entry.users += 1
            self._open.move_to_end(key)
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                self._trim_sync()

    def forget_sync(self, path: Path) -> None:
        """Close what is open at `path`; it was deleted."""
        with self._lock:
            for direct in (False, True):
                entry = self._open.get((path, direct))
                if entry is not None and entry.users == 0:
                    del self._open[path, direct]
                    self._close_sync(entry.fd)

    def refuse_direct(self, reason: str) -> None:
        """Direct I/O was promised and does not work: buffered from now on, said once."""
        with self._lock:
            if not self.mode.enabled:
                return
            self.mode = DirectMode(
                enabled=False,
                reason=reason,
                alignment=self.mode.alignment,
                memory_alignment=self.mode.memory_alignment,
            )
            self.direct_fallbacks += 1
        log.warning("nvme: direct I/O stopped working (%s); buffered from now on", reason)

    def close_sync(self) -> None:
        """Close all descriptors: idle ones now, the others when their users are done."""
        with self._lock:
            self._closed = True
            self._trim_sync()
        self.engine.close_sync()

    def _trim_sync(self) -> None:
        keep = 0 if self._closed else MAX_DESCRIPTORS
        if len(self._open) <= keep:
            return
        for key, entry in list(self._open.items()):
            if len(self._open) <= keep:
                break
            if entry.users == 0:
                del self._open[key]
                self._close_sync(entry.fd)

    def _close_sync(self, fd: int) -> None:
        self.engine.forget_sync(fd)
        close_fd_sync(fd)


def close_fd_sync(fd: int) -> None:
    """Close a descriptor; an error is logged.

    Linux has closed it all the same, and what does not verify later is a miss.
    """
    try:
        os.close(fd)
    except OSError as exc:
        log.warning("nvme: closing a file: %s", exc)


def write_all_sync(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write all of `buffers` at `offset`, going on after short writes. Returns the bytes.

    `OSError` where it cannot be done; what lies at `offset` is undefined then.
    """
    total = 0
    for at in range(0, len(buffers), MAX_VECTORS):
        left = list(buffers[at : at + MAX_VECTORS])
        while left:
            n = os.pwritev(fd, left, offset + total)
            if n <= 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            total += n
            left = _after(left, n)
    return total


def read_into_sync(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` (at most `MAX_VECTORS`) from `offset`. Returns the bytes; fewer at the end."""
    left = list(buffers)
    total = 0
    while left:
        n = os.preadv(fd, left, offset + total)
        if n <= 0:
            break
        total += n
        left = _after(left, n)
    return total


def _after(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    for i, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[i + 1 :]] if nbytes else buffers[i:]
        nbytes -= buffer.nbytes
    return []


def open_quiet_sync(path: Path) -> int:
    """Open for reading without counting as a use: times of use say what is cold.

    A file of somebody else can only be opened the ordinary way.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


def read_exactly_sync(path: Path, parts: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes at (offset, length) of `path`, through the page cache; shorter past its end."""
    fd = open_quiet_sync(path)
    try:
        return [pread_exactly_sync(fd, nbytes, offset) for offset, nbytes in parts]
    finally:
        close_fd_sync(fd)


def pread_exactly_sync(fd: int, nbytes: int, offset: int) -> bytes:
    """The `nbytes` at `offset`; fewer only where the file ends, however short single reads are."""
    data = os.pread(fd, nbytes, offset)
    while data and len(data) < nbytes:
        more = os.pread(fd, nbytes - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def read_file_sync(path: Path) -> bytes:
    """All bytes of a file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, _PIECE), b""))
    finally:
        close_fd_sync(fd)


def as_aligned(data: bytes, alignment: int) -> memoryview:
    """A page-aligned copy of `data`, zero-padded to `alignment`, as direct I/O wants it."""
    nbytes = -(-len(data) // alignment) * alignment
    buffer = aligned_buffer(nbytes)
    buffer[: len(data)] = data
    return memoryview(buffer)[:nbytes]


def replace_sync(path: Path, data: bytes, *, durable: bool) -> None:
    """Write a file under a temporary name and rename it; durable: against power loss as well."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all_sync(fd, [memoryview(data)], 0)
            if durable:
                os.fsync(fd)
        finally:
            close_fd_sync(fd)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            close_fd_sync(fd)
