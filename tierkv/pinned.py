"""The arena: one piece of RAM that engine worker and keeper share, named by a file descriptor only.

It is a memfd, so nothing is left behind when its processes end, however they end. Who may use
which slot of it is the ledger's business; pinning it for the device is `tierkv.device`'s.

It lies in huge pages where the kernel gives them: direct I/O then has 512 times fewer pages to hold
for a transfer, which is most of the kernel's work in one (`bench.disk_tier`), and a process that
attaches it meets as many times fewer page faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tierkv.blocks import ARENA_ALIGN
from tierkv.errors import CapacityError, StoreUnusableError

HUGE_PAGE: Final = 2 << 20
"""Bytes of a huge page on x86-64, and on arm64 with pages of 4 KiB."""

_MADV_COLLAPSE: Final = 25
"""Linux 6.1 and later, ``<linux/mman.h>``: make huge pages now, whatever sysfs says of new ones."""

_MAP_FIXED: Final = 0x10
"""``<linux/mman.h>``: in place of what is mapped there."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes of RAM that a new arena may take: MemAvailable, or what the cgroup leaves if less."""
    available = 0
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    # Without a limit the files are missing or say "max": both end as ValueError or OSError.
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        available = min(available, max(limit - used, 0))
    return available


class Arena:
    """Page-aligned shared memory of a fixed size, and a context manager over it.

    Use `create` in the process that owns it and `attach` in the one that was handed its file
    descriptor. `close` is safe at any time: memory that somebody still has a view of goes when
    the last view does, so no view ever dangles.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` of `fd` and own the descriptor. Use `create` or `attach`."""
        self._fd = fd
        self._nbytes = nbytes
        mapped, start = _map_sync(fd, nbytes)
        self._map: mmap.mmap | None = mapped
        self._view: memoryview | None = memoryview(mapped)[start : start + nbytes]

    @classmethod
    def create(cls, nbytes: int, *, prefault: bool = False) -> Self:
        """A new arena of `nbytes`, a multiple of 4096.

        prefault: take the memory now instead of at first touch, in huge pages as far as the kernel
            gives them; blocks for some 0.3 s per GB, and lets other threads run.
        Raises `CapacityError` where the size is not possible, with needed against free bytes.
        """
        if nbytes < ARENA_ALIGN or nbytes % ARENA_ALIGN:
            raise CapacityError(
                f"pinned: {nbytes} bytes is not a multiple of {ARENA_ALIGN} above 0; "
                "write a size like 2GiB"
            )
        free = available_bytes()
        if nbytes > free:
            raise CapacityError(
                f"pinned: needs {nbytes} bytes of RAM but only {free} are free; write a size "
                f"below {free >> 20}MiB"
            )
        fd = os.memfd_create("tierkv-arena", os.MFD_CLOEXEC)
        arena = None
        try:
            os.truncate(fd, nbytes)
            arena = cls(fd, nbytes)
            if prefault:
                arena._populate_sync()
        except OSError as exc:
            if arena is None:
                os.close(fd)
            else:
                arena.close()
            raise CapacityError(
                f"pinned: the system refuses {nbytes} bytes of RAM ({exc.strerror}); "
                "write a smaller size"
            ) from exc
        return arena

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Self:
        """Map an arena that another process made, and own `fd` from now on.

        Raises `StoreUnusableError` if `fd` is not an arena of exactly `nbytes`: a second, empty
        one is never made in its place.
        """
        try:
            found = os.fstat(fd)
        except OSError as exc:
            raise StoreUnusableError(f"arena: descriptor {fd} is gone ({exc.strerror})") from exc
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
            raise StoreUnusableError(
                f"arena: descriptor {fd} holds {found.st_size} bytes where {nbytes} were "
                "promised; it is not the arena it should be"
            )
        return cls(fd, nbytes)

    def _populate_sync(self) -> None:
        """Take all memory that nobody has written to yet."""
        assert self._view is not None
        huge, address = 0, ctypes.addressof(ctypes.c_char.from_buffer(self._view))
        while address % HUGE_PAGE == 0 and huge + HUGE_PAGE <= self._nbytes:
            self._view[huge] = 0  # there must be a page to begin with
            if _libc.madvise(address + huge, HUGE_PAGE, _MADV_COLLAPSE):
                break
            huge += HUGE_PAGE
        if huge < self._nbytes:
            os.posix_fallocate(self._fd, huge, self._nbytes - huge)

    def __len__(self) -> int:
        return self._nbytes

    @property
    def fd(self) -> int:
        """The memfd, close-on-exec; pass it to a child with `pass_fds`. ValueError once closed."""
        if self._fd < 0:
            raise ValueError("the arena is closed")
        return self._fd

    @property
    def view(self) -> memoryview:
        """uint8[nbytes], writable, page-aligned, shared. ValueError once closed."""
        if self._view is None:
            raise ValueError("the arena is closed")
        return self._view

    def close(self) -> None:
        """Let go of descriptor and memory. Safe to call twice, and with views still about."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        view, self._view = self._view, None
        mapped, self._map = self._map, None
        # BufferError: somebody (a tensor, a cancelled I/O) still has a view. Our references are
        # gone, so the memory goes with theirs.
        with contextlib.suppress(BufferError):
            if view is not None:
                view.release()
            if mapped is not None:
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _map_sync(fd: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Map `fd` at a multiple of `HUGE_PAGE`, as huge pages need it: the map, and where it begins.

    The map is of address space with room to spare; the part that is at the right place is of `fd`.
    Whoever closes the map gives back all of it. Raises `OSError`.
    """
    if nbytes < HUGE_PAGE:
        return mmap.mmap(fd, nbytes), 0
    around = mmap.mmap(-1, nbytes + HUGE_PAGE)
    start = -_address(around) % HUGE_PAGE
    at = _libc.mmap(
        _address(around) + start,
        nbytes,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        fd,
        0,
    )
    if at != _address(around) + start:
        around.close()
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return around, start


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
