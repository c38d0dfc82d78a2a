"""What this machine can do, asked of the machine itself. Nothing here is needed by a cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_AT_FDCWD: Final = -100
_STATX_DIOALIGN: Final = 0x2000  # linux/stat.h, since Linux 6.1
_STATX_BYTES: Final = 256
_DIO_MEM_ALIGN_AT: Final = 152  # offsets of the two fields in struct statx
_DIO_OFFSET_ALIGN_AT: Final = 156
_CAP_IPC_LOCK: Final = 14  # linux/capability.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """required: tierkv does not work until it is mended. Otherwise the next best path is taken."""

    required: bool
    problem: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDriver:
    """loaded: libcuda.so.1 is there and starts. reason: why there is no GPU, in words."""

    loaded: bool
    gpus: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectIO:
    """works: a real aligned write and read with O_DIRECT gave back the same bytes.

    alignment: bytes that every address, length and offset must be a multiple of; 0 unknown.
    """

    works: bool
    alignment: int
    reason: str


def cuda_driver() -> CudaDriver:
    """Ask the CUDA driver for its GPUs, without torch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return CudaDriver(loaded=False, reason="libcuda.so.1 was not found: no NVIDIA driver")
    if status := cuda.cuInit(0):
        return CudaDriver(loaded=False, reason=f"the CUDA driver does not start: cuInit = {status}")
    count = ctypes.c_int()
    if status := cuda.cuDeviceGetCount(ctypes.byref(count)):
        return CudaDriver(loaded=True, reason=f"the driver lists no GPU: status {status}")
    names = []
    for index in range(count.value):
        device = ctypes.c_int()
        text = ctypes.create_string_buffer(256)
        if not cuda.cuDeviceGet(ctypes.byref(device), index):
            cuda.cuDeviceGetName(text, len(text), device)
        names.append(text.value.decode(errors="replace") or f"GPU {index}")
    return CudaDriver(loaded=True, gpus=tuple(names), reason="" if names else "no GPU is there")


def dio_alignment(path: Path) -> int | None:
    """Direct-I/O alignment that ``statx`` states for a file, in bytes.

    0: the file system says that it has no direct I/O. None: kernel or file system does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):  # before glibc 2.28
        return None
    out = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, out):
        return None
    mask = int.from_bytes(out.raw[:4], sys.byteorder)
    if not mask & _STATX_DIOALIGN:
        return None
    return max(
        int.from_bytes(out.raw[at : at + 4], sys.byteorder)
        for at in (_DIO_MEM_ALIGN_AT, _DIO_OFFSET_ALIGN_AT)
    )


def direct_io(directory: Path) -> DirectIO:
    """Try O_DIRECT in `directory` with one real block. Raises OSError where nothing can be written.

    The flag alone proves nothing: tmpfs takes it and ignores it, so a file system that states no
    alignment counts as buffered.
    """
    handle, name = tempfile.mkstemp(prefix=".tierkv-probe-", dir=directory)
    os.close(handle)
    path = Path(name)
    try:
        alignment = dio_alignment(path)
        if not alignment:
            said = "has no direct I/O" if alignment == 0 else "states no direct-I/O alignment"
            return DirectIO(works=False, alignment=0, reason=f"the file system {said}")
        try:
            same = _write_and_read_back(path, max(alignment, mmap.PAGESIZE))
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return DirectIO(
                works=False, alignment=alignment, reason=f"O_DIRECT was refused: {exc.strerror}"
            )
        reason = "written and read back" if same else "O_DIRECT gave back other bytes"
        return DirectIO(works=same, alignment=alignment, reason=reason)
    finally:
        path.unlink()


def _write_and_read_back(path: Path, nbytes: int) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        # Anonymous memory starts on a page, which satisfies every alignment met so far.
        written = stack.enter_context(mmap.mmap(-1, nbytes))
        found = stack.enter_context(mmap.mmap(-1, nbytes))
        written[:] = os.urandom(nbytes)
        return (
            os.pwritev(fd, [written], 0) == nbytes
            and os.preadv(fd, [found], 0) == nbytes
            and found[:] == written[:]
        )


def memlock_bytes() -> int | None:
    """The limit on memory that this process may lock; None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def may_lock_anything() -> bool:
    """Whether this process has the capability that no such limit binds, as root has."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def free_bytes(directory: Path) -> int:
    """Bytes that an ordinary user may still write in `directory`."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """RAM that can be taken without swapping, and within the limit of a container."""
    available = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):  # no cgroup v2, or no limit of our own: nothing to heed
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            used = int((cgroup / "memory.current").read_text())
            available = min(available, max(int(limit) - used, 0))
    return available


def installed(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
