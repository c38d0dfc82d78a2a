"""Event loops for tests: which ones to run on, and proof that nothing blocks them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from blockbuster import BlockBusterFunction, blockbuster_ctx

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def loop_factories(config: Any, item: Any) -> Mapping[str, LoopFactory]:
    """The answer to pytest-asyncio's hook ``pytest_asyncio_loop_factories``.

    Subclasses of `BackendContract` and tests marked ``every_loop`` run on asyncio and on uvloop
    (where it is installed), everything else on asyncio only: everything twice doubles the time.
    """
    from tierkv.testing.contract import BackendContract

    factories: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    in_kit = item.cls is not None and issubclass(item.cls, BackendContract)
    if in_kit or item.get_closest_marker("every_loop"):
        with contextlib.suppress(ImportError):
            import uvloop

            factories["uvloop"] = uvloop.new_event_loop
    return factories


# What blockbuster does not know by itself. io.open is the same function as builtins.open under
# another name, and pathlib calls it by that one.
_ALSO_BLOCKING = (
    "os.preadv",
    "os.pwritev",
    "os.pread",
    "os.pwrite",
    "os.readv",
    "os.writev",
    "os.open",
    "os.fsync",
    "os.fdatasync",
    "os.fstat",
    "os.ftruncate",
    "os.posix_fallocate",
    "os.utime",
    "fcntl.flock",
    "builtins.open",
    "io.open",
    "mmap.mmap.flush",
)


@contextlib.contextmanager
def never_blocked() -> Iterator[None]:
    """Raises `blockbuster.BlockingError` where code on a running loop makes a blocking call.

    Calls in other threads are fine. Process-wide while it lasts.
    """
    with blockbuster_ctx() as known:
        extra = [
            BlockBusterFunction(None, full_name)
            for full_name in _ALSO_BLOCKING
            if full_name not in known.functions
        ]
        try:
            for function in extra:
                function.activate()
            yield
        finally:
            for function in extra:
                function.deactivate()
