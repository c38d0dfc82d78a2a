"""Faults at the system calls of a store: the n-th call fails, falls short, hangs or lies.

The layer stands at functions of `os` and `fcntl` (and whatever else is named), while it is entered,
and looks only at calls that concern files below one directory, by path or by descriptor. Whoever
calls `os.pwritev` by that name meets it; who keeps the function itself, or reads through `open()`,
does not. A store pays nothing for it: the layer is put where the functions are, not into the store.

    with SystemFaults(directory) as calls:
        calls.at(17, Injection.ERROR, errno.EIO)
        ...                             # the life of a store
    calls.trace                         # the names of all calls, in order

Works in every thread. It counts calls as they begin, so in a store with several threads the n-th
call may be another one in another run; what happened is in `hit`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Final, Self

PATH_CALLS: Final = frozenset(
    ("open", "stat", "unlink", "replace", "rename", "mkdir", "rmdir", "scandir", "listdir",
     "statvfs", "access", "utime", "truncate")
)  # fmt: skip
FD_CALLS: Final = frozenset(
    ("close", "pwritev", "preadv", "pread", "pwrite", "read", "write", "fstat", "fsync",
     "fdatasync", "ftruncate", "posix_fallocate")
)  # fmt: skip
READS: Final = frozenset(("preadv", "pread", "read"))
WRITES: Final = frozenset(("pwritev", "pwrite", "write"))
CHANGES: Final = WRITES | {
    "open", "unlink", "replace", "rename", "mkdir", "rmdir", "truncate", "ftruncate",
    "posix_fallocate", "fsync", "fdatasync", "utime",
}  # fmt: skip
"""Calls before which a kill leaves something else behind than before the call before them."""

_SECTOR: Final = 512


class Injection(enum.Enum):
    """What happens instead of a call.

    ERROR: `OSError` with a code; nothing is done (but a close closes).
    LATE_ERROR: it is done, and then `OSError`: the disk gave no answer.
    SHORT: a read or write does the first part only, at least one byte less.
    HANG: the call waits for `SystemFaults.release`, then it is done.
    FLIP: one bit of what is read or written is wrong.
    KILL: SIGKILL before the call. TORN_KILL: SIGKILL after the first half of a write.
    """

    ERROR = "error"
    LATE_ERROR = "late-error"
    SHORT = "short"
    HANG = "hang"
    FLIP = "flip"
    KILL = "kill"
    TORN_KILL = "torn-kill"


@dataclass(frozen=True, slots=True)
class Hit:
    """An injection that took place: in the `number`-th call, which was `name`."""

    number: int
    name: str
    injection: Injection
    code: int = 0


class SystemFaults:
    """Counts, and where told spoils, the system calls that concern files below `directory`.

    more: (module, name) of other functions that take a path or descriptor first.
    on_hang: called in the thread that is about to hang. It must not block.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        more: Sequence[tuple[ModuleType, str]] = (),
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        self.trace: list[str] = []
        self.hits: list[Hit] = []
        self._root = os.path.realpath(directory)
        self._on_hang = on_hang
        self._plan: dict[int, tuple[Injection, int]] = {}
        self._lock = threading.Lock()
        self._fds: set[int] = set()
        self._go_on = threading.Event()
        self._aside = threading.local()
        names = sorted(PATH_CALLS | FD_CALLS)
        self._places = [*((os, name) for name in names), (fcntl, "flock"), *more]
        self._real: list[tuple[ModuleType, str, Any]] = []

    def at(self, number: int, injection: Injection, code: int = errno.EIO) -> None:
        """Spoil the `number`-th call, counted from 1. Where it cannot be, it does what it should.

        code: of `ERROR` and `LATE_ERROR`.
        """
        self._plan[number] = (injection, code)

    def release(self) -> None:
        """Let all calls that hang go on, and hang no more."""
        self._go_on.set()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Calls of this thread are somebody else's meanwhile: a test that looks from outside."""
        self._aside.on = True
        try:
            yield
        finally:
            self._aside.on = False

    def __enter__(self) -> Self:
        for module, name in self._places:
            real = getattr(module, name)
            self._real.append((module, name, real))
            setattr(module, name, self._wrapped(name, real))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        while self._real:
            module, name, real = self._real.pop()
            setattr(module, name, real)

    # One call. --------------------------------------------------------------------------------

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not args or getattr(self._aside, "on", False) or not self._concerns(args[0]):
                return real(*args, **kwargs)
            with self._lock:
                self.trace.append(name)
                number = len(self.trace)
                injection, code = self._plan.get(number, (None, 0))
                if name == "close":
                    self._fds.discard(args[0])
            if injection is None:
                result = real(*args, **kwargs)
            else:
                self.hits.append(Hit(number, name, injection, code))
                result = self._spoiled(injection, code, name, real, args, kwargs)
            if name == "open":
                with self._lock:
                    self._fds.add(result)
            return result

        return call

    def _concerns(self, first: Any) -> bool:
        if isinstance(first, int):
            return first in self._fds
        if not isinstance(first, str | os.PathLike):
            return False
        path = os.fspath(first)
        return isinstance(path, str) and (path == self._root or path.startswith(self._root + "/"))

    def _spoiled(
        self,
        injection: Injection,
        code: int,
        name: str,
        real: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        match injection:
            case Injection.KILL | Injection.TORN_KILL:
                if injection is Injection.TORN_KILL and name in WRITES:
                    real(*_first_part(name, args))
                os.kill(os.getpid(), signal.SIGKILL)
            case Injection.ERROR | Injection.LATE_ERROR:
                if injection is Injection.LATE_ERROR or name == "close":
                    done = real(*args, **kwargs)
                    if name == "open":
                        os.close(done)
                raise OSError(code, os.strerror(code), *_named(args))
            case Injection.HANG:
                self._on_hang()
                self._go_on.wait()
            case Injection.SHORT if name in READS | WRITES:
                return real(*_first_part(name, args))
            case Injection.FLIP if name in WRITES:
                return real(args[0], *_flipped_out(name, args))
            case Injection.FLIP if name in READS:
                return _flipped_in(name, real, args)
            case _:
                pass
        return real(*args, **kwargs)


def _named(args: tuple[Any, ...]) -> tuple[str, ...]:
    return () if isinstance(args[0], int) else (os.fspath(args[0]),)


def _first_part(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for about half of a read or write; of whole sectors, where it has more."""
    fd, what, *rest = args
    if name in ("pread", "read"):
        return fd, _half(what), *rest
    buffers = [memoryview(b) for b in (what if name.endswith("v") else [what])]
    left = _half(sum(b.nbytes for b in buffers))
    part = []
    for buffer in buffers:
        if left > 0:
            part.append(buffer[:left])
            left -= buffer.nbytes
    if name == "preadv" or name == "pwritev":
        return fd, part, *rest
    return fd, part[0] if part else b"", *rest


def _half(nbytes: int) -> int:
    half = nbytes // 2
    return half // _SECTOR * _SECTOR or half


def _flipped_out(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a write writes, copied page-aligned, with one bit wrong in the middle."""
    _, what, *rest = args
    buffers = [memoryview(b) for b in (what if name == "pwritev" else [what])]
    total = sum(b.nbytes for b in buffers)
    copy = _aligned(total)
    at = 0
    for buffer in buffers:
        copy[at : at + buffer.nbytes] = buffer
        at += buffer.nbytes
    if total:
        copy[_target(copy, total)] ^= 4
    return ([copy] if name == "pwritev" else copy), *rest


def _flipped_in(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = real(*args)
    if name != "preadv":
        data = bytearray(result)
        if data:
            data[_target(data, len(data))] ^= 4
        return bytes(data)
    if result:
        buffer = memoryview(args[1][0])
        buffer[min(buffer.nbytes, result) // 2] ^= 4
    return result


def _target(data: memoryview | bytearray, nbytes: int) -> int:
    """The middle; of something that is mostly padding, the middle of what is not zero."""
    used = len(bytes(data).rstrip(b"\0")) or nbytes
    return min(used // 2, nbytes - 1)


def _aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
