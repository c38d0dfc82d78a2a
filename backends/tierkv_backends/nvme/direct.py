"""Whether direct I/O really works in a directory, and at which alignment."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.errors import StoreUnusableError
from tierkv_backends.nvme.format import MIN_ALIGNMENT, PAGE
from tierkv_backends.nvme.options import Direct

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_DIO_FIELDS: Final = 152
"""Where stx_dio_mem_align and stx_dio_offset_align (two u32) lie in struct statx (statx(2))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectMode:
    """Which way I/O goes. reason: why not, where `enabled` is false.

    alignment: of offsets and lengths on media. memory_alignment: of buffers.
    """

    enabled: bool
    reason: str = ""
    alignment: int = MIN_ALIGNMENT
    memory_alignment: int = 1


def aligned_buffer(nbytes: int) -> mmap.mmap:
    """Zeroed, page-aligned memory, as direct I/O wants it."""
    return mmap.mmap(-1, max(nbytes, 1))


def dio_alignment_sync(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment that statx(2) tells for direct I/O; None where it tells none.

    Python 3.11 has no statx. tmpfs accepts O_DIRECT and ignores it: it gives no answer here.
    """
    buffer = statx_sync(fd, _STATX_DIOALIGN)
    if buffer is None:
        return None
    (mask,) = struct.unpack_from("<I", buffer)
    memory, offset = struct.unpack_from("<II", buffer, _DIO_FIELDS)
    if not mask & _STATX_DIOALIGN or not memory or not offset:
        return None
    return memory, offset


def statx_sync(fd: int, wanted: int) -> bytes | None:
    """`struct statx` of an open file; None where the system has no answer."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except AttributeError:  # a C library before statx
        return None
    buffer = ctypes.create_string_buffer(256)
    if statx(fd, b"", _AT_EMPTY_PATH, wanted, buffer) != 0:
        return None
    return buffer.raw


def probe_sync(directory: Path, wish: Direct) -> DirectMode:
    """Try a direct write and read in `directory`. `StoreUnusableError` where `wish` is ON in vain.

    A full disk (ENOSPC) is let through as `OSError`: that is not an answer.
    """
    if wish is Direct.OFF:
        return DirectMode(enabled=False, reason="direct=off")
    mode = _try_sync(directory / f"probe-{os.getpid()}")
    if wish is Direct.ON and not mode.enabled:
        raise StoreUnusableError(
            f"nvme store {directory}: direct=on, but direct I/O does not work: {mode.reason}"
        )
    return mode


def _try_sync(path: Path) -> DirectMode:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            path.unlink(missing_ok=True)
            return DirectMode(enabled=False, reason="the file system refuses O_DIRECT")
        raise
    try:
        return _write_and_read_sync(fd)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _write_and_read_sync(fd: int) -> DirectMode:
    told = dio_alignment_sync(fd)
    if told is None:
        return DirectMode(enabled=False, reason="statx tells no direct-I/O alignment")
    memory, offset = told
    if memory > PAGE or PAGE % max(offset, MIN_ALIGNMENT):
        return DirectMode(enabled=False, reason=f"it wants an alignment of {memory}/{offset}")
    alignment = max(offset, MIN_ALIGNMENT)
    out, back = aligned_buffer(PAGE), aligned_buffer(PAGE)
    out[:] = os.urandom(PAGE)
    try:
        os.posix_fallocate(fd, 0, PAGE)
        done = os.pwrite(fd, out, 0) == PAGE and os.preadv(fd, [back], 0) == PAGE
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            return DirectMode(enabled=False, reason="direct I/O answers EINVAL")
        raise
    if not done or out[:] != back[:]:
        return DirectMode(enabled=False, reason="a probe did not read back what it wrote")
    return DirectMode(enabled=True, alignment=alignment, memory_alignment=memory)
