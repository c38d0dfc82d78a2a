"""The arena: one piece of RAM that engine worker and keeper share, named by a file descriptor only.

It is a memfd, so nothing is left behind when its processes end, however they end. Who may use
which slot of it is the ledger's business; pinning it for the device is `tierkv.device`'s.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tierkv.blocks import ARENA_ALIGN
from tierkv.errors import CapacityError, StoreUnusableError

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
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes)
        self._view: memoryview | None = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int, *, prefault: bool = False) -> Self:
        """A new arena of `nbytes`, a multiple of 4096.

        prefault: take the memory now instead of at first touch; blocks for about 0.25 s per GB.
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
        try:
            os.truncate(fd, nbytes)
            if prefault:
                os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes)
        except OSError as exc:
            os.close(fd)
            raise CapacityError(
                f"pinned: the system refuses {nbytes} bytes of RAM ({exc.strerror}); "
                "write a smaller size"
            ) from exc

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
