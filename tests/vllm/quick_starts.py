"""What every engine start and end repeats for nothing in one process is done once.

A full garbage collection walks all objects of torch and the engine's modules, a million that live
as long as the process: half a second. An engine's start and end take nine, and between them the
engine freezes the heap and thaws it. Here the modules are frozen for good and an engine's own
objects never, so that collections find an engine that was closed, and walk nothing else.

The engine also puts its own kernels in the place of those that a CPU cannot run, for which it
looks through every module: each time again, although they are in place.
"""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine import core
from vllm.v1.worker import cpu_worker, gpu_worker


@functools.cache
def freeze() -> None:
    """Take what lives as long as the process out of collections, once: no engine may be open."""
    gc.collect()
    gc.freeze()


def prepare() -> None:
    """Before the first engine of the process."""

    def nothing() -> None:
        pass

    assert core.freeze_gc_heap is gpu_worker.freeze_gc_heap
    core.freeze_gc_heap = gpu_worker.freeze_gc_heap = nothing
    atexit.register(gc.unfreeze)
    gc.unfreeze = nothing
    once: Callable[[], Any] = functools.cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(once)
    assert cpu_worker  # its modules are imported before anything is frozen
