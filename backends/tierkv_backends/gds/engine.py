"""Payload through `kvikio.CuFile`. Import this module in a thread: it loads kvikio.

Without a CUDA driver kvikio ends the process where it should raise, so nothing here may be called
before `tierkv_backends.gds.probe` has found one.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import kvikio
import kvikio.defaults
import numpy as np

from tierkv.backend import DeviceMemory
from tierkv.errors import StoreError
from tierkv_backends.gds.modes import Mode
from tierkv_backends.nvme.engine import Memory
from tierkv_backends.nvme.format import PAGE

_ERRNO: Final = {os.strerror(code): code for code in sorted(errno.errorcode, reverse=True)}
"""kvikio tells a failing system call by the words of strerror(3) only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What kvikio knows once for the whole process.

    threads: of its pool; its own default is one. direct: whether page-aligned I/O on host memory
    passes the page cache by; its own default is no for reads. compat: whether it leaves cuFile be.
    """

    threads: int
    direct: bool
    compat: bool

    def words(self) -> str:
        """As `usage().modes["kvikio"]` says it, asked of kvikio."""
        get = kvikio.defaults.get
        return (
            f"{kvikio.__version__}, threads {get('num_threads')}, "
            f"tasks of {get('task_size')} bytes, compat {get('compat_mode').name.lower()}, direct "
            f"reads {_yes(get('auto_direct_io_read'))}, writes {_yes(get('auto_direct_io_write'))}"
        )


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


_settings_lock: Final = threading.Lock()
_users: list[Settings] = []


def _acquire_settings_sync(wanted: Settings) -> None:
    """Set them for this process; `StoreError` where an open store needs others."""
    with _settings_lock:
        if _users and _users[0] != wanted:
            raise StoreError(
                f"kvikio's settings hold for the whole process, and a store that is open has "
                f"{_users[0]}; give this one the same, not {wanted}"
            )
        if not _users:
            mode = kvikio.CompatMode.ON if wanted.compat else kvikio.CompatMode.OFF
            kvikio.defaults.set(
                {
                    "num_threads": wanted.threads,
                    "auto_direct_io_read": wanted.direct,
                    "auto_direct_io_write": wanted.direct,
                    "compat_mode": mode,
                }
            )
        _users.append(wanted)


def _release_settings_sync(settings: Settings) -> None:
    with _settings_lock:
        _users.remove(settings)


class _OnDevice:
    """Device memory as kvikio takes it: CUDA array interface, version 3, bytes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@dataclass(slots=True)
class _Piece:
    """A stretch of memory that goes to or comes from one stretch of the file."""

    memory: Memory
    address: int
    nbytes: int

    def host(self) -> Any:
        """The whole stretch as one array; `memory` is only its beginning."""
        assert isinstance(self.memory, memoryview)
        if self.nbytes == self.memory.nbytes:
            return self.memory
        root = np.frombuffer(memoryview(self.memory.obj).cast("B"), np.uint8)
        start = self.address - int(root.__array_interface__["data"][0])
        return root[start : start + self.nbytes]


def pieces(buffers: Sequence[Memory], limit: int) -> list[_Piece]:
    """Neighbours in memory joined: kvikio has no vectored calls. At most `limit` bytes in all."""
    out: list[_Piece] = []
    for buffer in buffers:
        nbytes = min(buffer.nbytes, limit)
        if not nbytes:
            continue
        limit -= nbytes
        address = buffer.address if isinstance(buffer, DeviceMemory) else _address(buffer)
        last = out[-1] if out else None
        if last and last.address + last.nbytes == address and _one(last.memory, buffer):
            last.nbytes += nbytes
        else:
            out.append(_Piece(buffer[:nbytes], address, nbytes))
    return out


def _one(a: Memory, b: Memory) -> bool:
    """Whether both are parts of one allocation."""
    if isinstance(a, DeviceMemory) or isinstance(b, DeviceMemory):
        return isinstance(a, DeviceMemory) and isinstance(b, DeviceMemory) and a.base == b.base
    return a.obj is b.obj and not a.readonly


def _address(buffer: memoryview) -> int:
    if not buffer.nbytes:
        return 0
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


class KvikioEngine:
    """kvikio moves the payload: host memory always, device memory as `mode` has it.

    In the modes ``gds`` and ``cufile-compat`` device memory is read and written on the stream that
    its owner named (`raw_read_async`), so no other stream waits. In mode ``compat`` kvikio copies
    through host memory on a stream that is ordered with the default stream: work there and such a
    copy wait for each other. A caller that cannot have that moves blocks through the arena.
    """

    name = "kvikio"
    writes_in_order = False  # threads share the parts of a call
    alignment = PAGE  # cuFile's: what is not on a page goes through a buffer of its own
    reads_over_gaps = False  # a gap's buffer would be one more transfer, beside those it is between

    def __init__(self, settings: Settings, mode: Mode) -> None:
        _acquire_settings_sync(settings)
        self._settings = settings
        self._mode = mode
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._closed = False
        self._released = False

    def write_all_sync(self, fd: int, buffers: Sequence[Memory], offset: int) -> int:
        """All pieces at once. What lies at `offset` is undefined after an `OSError`."""
        handle = self._handle_sync(fd)
        parts = pieces(buffers, sum(buffer.nbytes for buffer in buffers))
        return self._all_sync(parts, offset, handle.pwrite, handle.raw_write_async)

    def read_into_sync(self, fd: int, buffers: Sequence[Memory], offset: int) -> int:
        """All pieces at once. kvikio has no short reads, so the file's end is looked up before."""
        left = max(os.fstat(fd).st_size - offset, 0)
        handle = self._handle_sync(fd)
        return self._all_sync(pieces(buffers, left), offset, handle.pread, handle.raw_read_async)

    def _all_sync(
        self,
        parts: list[_Piece],
        offset: int,
        pooled: Callable[..., Any],
        streamed: Callable[..., Any],
    ) -> int:
        """Start every piece, then wait for every piece, whatever became of the others."""
        waits: list[tuple[int, Callable[[], int]]] = []
        error: Exception | None = None
        total = 0
        for part in parts:
            try:
                waits.append((part.nbytes, self._start(part, offset + total, pooled, streamed)))
            except (RuntimeError, OSError, ValueError) as exc:
                error = exc
                break
            total += part.nbytes
        for nbytes, wait in waits:
            try:
                got = wait()
                if got != nbytes:
                    raise OSError(errno.EIO, f"kvikio moved {got} of {nbytes} bytes")
            except (RuntimeError, OSError) as exc:
                error = error or exc
        if error is not None:
            raise _as_os_error(error) from error
        return total

    def _start(
        self,
        part: _Piece,
        offset: int,
        pooled: Callable[..., Any],
        streamed: Callable[..., Any],
    ) -> Callable[[], int]:
        memory = part.memory
        if not isinstance(memory, DeviceMemory):
            return pooled(part.host(), part.nbytes, offset).get  # type: ignore[no-any-return]  # kvikio is untyped
        if self._mode is Mode.COMPAT:
            array = _OnDevice(part.address, part.nbytes)
            return pooled(array, part.nbytes, offset).get  # type: ignore[no-any-return]  # kvikio is untyped
        # By the base that was registered; a pointer into it would be registered once more.
        array = _OnDevice(memory.base, memory.base_nbytes)
        future = streamed(array, memory.stream, part.nbytes, offset, memory.start)
        return future.check_bytes_done  # type: ignore[no-any-return]  # kvikio is untyped

    def register_sync(self, memory: DeviceMemory) -> None:
        """Let cuFile map the allocation, once for many transfers. Nothing to do in ``compat``."""
        if self._mode is not Mode.COMPAT:
            try:
                kvikio.memory_register(_OnDevice(memory.base, memory.base_nbytes))
            except RuntimeError as exc:
                raise StoreError(f"cuFile does not register the staging memory: {exc}") from exc

    def unregister_sync(self, memory: DeviceMemory) -> None:
        """Undo `register_sync`."""
        if self._mode is not Mode.COMPAT:
            try:
                kvikio.memory_deregister(_OnDevice(memory.base, memory.base_nbytes))
            except RuntimeError as exc:
                raise StoreError(f"cuFile does not let go of the staging memory: {exc}") from exc

    def forget_sync(self, fd: int) -> None:
        """Close kvikio's own descriptors of this file."""
        with self._lock:
            handle = self._handles.pop(fd, None)
        if handle is not None:
            handle.close()
        self._release_sync()

    def close_sync(self) -> None:
        """Let another store have other settings, once no transfer is under way."""
        self._closed = True
        self._release_sync()

    def _release_sync(self) -> None:
        with self._lock:
            last = self._closed and not self._handles and not self._released
            self._released = self._released or last
        if last:
            _release_settings_sync(self._settings)

    def modes(self) -> dict[str, str]:
        """kvikio's settings as they really are."""
        return {"kvikio": self._settings.words()}

    def _handle_sync(self, fd: int) -> Any:
        with self._lock:
            handle = self._handles.get(fd)
            if handle is None:
                try:
                    # The file that `fd` has open, also where its name is gone or another's.
                    handle = self._handles[fd] = kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")
                except RuntimeError as exc:
                    raise _as_os_error(exc) from exc
            return handle


def _as_os_error(error: Exception) -> OSError:
    if isinstance(error, OSError):
        return error
    text = str(error).splitlines()[0]
    code = next((code for words, code in _ERRNO.items() if text.endswith(words)), errno.EIO)
    return OSError(code, f"kvikio: {text}")
