"""Queues and marks: in which order copies run on a device, and how one learns that they ended.

A device has queues. Work within a queue runs in order; between queues nothing is ordered but what
`hold` says. A mark is a place in a queue; it is done when everything before it has run.

=========== =====================================================================================
`CudaDevice` streams and events of torch
`CpuDevice`  everything runs at once, in the caller's thread, so every mark is done
a test's     `tierkv.testing.fake_device.FakeDevice` runs what a test releases, in its order
=========== =====================================================================================
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

log = logging.getLogger("tierkv")

CUDA_STAGING_BYTES: Final = 32 << 20
"""Per buffer; there are two for each direction. At 50 GB/s a host copy of one takes 0.7 ms, so the
launches of the next are hidden, and the four take 128 MiB of the device."""


class Queue(enum.Enum):
    """What runs in order.

    A gather and a host copy have queues of their own, so that one buffer is filled while the
    other drains; likewise for loads.
    """

    ENGINE = "engine"
    """Not ours: the caller's current stream, which computes on the pages."""
    GATHER = "gather"
    """Save: pages → staging."""
    OUT = "out"
    """Save: staging → host."""
    IN = "in"
    """Load: host → staging."""
    SCATTER = "scatter"
    """Load: staging → pages."""


class Mark(Protocol):
    """A place in a queue."""

    def done(self) -> bool:
        """Whether everything before it has run. Never waits. Raises what the device reports."""

    def wait(self) -> None:
        """Block this thread until it is done, without holding the interpreter's lock."""


def wait_all(marks: Sequence[Mark], deadline_s: float) -> bool:
    """Block until all are done; False after `deadline_s`, or where the device reports an error.

    Then a thread is left behind that waits on, without holding the interpreter up.
    """
    failed: list[RuntimeError] = []

    def wait_sync() -> None:
        try:
            for mark in marks:
                if not mark.done():
                    mark.wait()
        except RuntimeError as exc:  # torch's errors of a device
            log.warning("tierkv: the device failed while its copies were waited for: %s", exc)
            failed.append(exc)

    waiting = threading.Thread(target=wait_sync, name="tierkv-wait", daemon=True)
    waiting.start()
    waiting.join(deadline_s)
    if waiting.is_alive():
        log.warning("tierkv: the device has not ended its copies after %.0f s", deadline_s)
    return not waiting.is_alive() and not failed


class Device(Protocol):
    """Where pages lie, and its queues. Not thread-safe, but for `record` on `ENGINE` and marks.

    direct: host memory is device memory, so that pages and arena need no staging between them.
    staging_bytes: size of one staging buffer.
    """

    direct: bool
    staging_bytes: int

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of device memory, contiguous, zeroed."""

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Queue `work`: it launches operations and must not wait for any."""

    def record(self, queue: Queue) -> Mark:
        """A mark behind everything that the queue holds by now."""

    def hold(self, queue: Queue, mark: Mark) -> None:
        """Whatever is queued from now on runs after `mark`. No thread waits."""


class _Done:
    """A mark with nothing before it that has not run."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class CpuDevice:
    """The twin without queues: work runs when it is queued.

    staging_bytes: 0 means that pages and arena are copied directly; a number, that they go
        through staging as on an accelerator, which tests use.
    """

    def __init__(self, staging_bytes: int = 0) -> None:
        self.direct = not staging_bytes
        self.staging_bytes = staging_bytes

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of RAM."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Run it now."""
        work()

    def record(self, queue: Queue) -> Mark:
        """Done already."""
        return _Done()

    def hold(self, queue: Queue, mark: Mark) -> None:
        """Nothing: it was done when it was made."""


class _CudaMark:
    """An event. It sleeps in `wait`: spinning would take a core that the engine wants."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch's

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """Streams of one GPU: four of our own and, as `ENGINE`, the current one of whoever asks."""

    direct = False

    def __init__(self, device: torch.device, staging_bytes: int = CUDA_STAGING_BYTES) -> None:
        self.staging_bytes = staging_bytes
        self._device = device
        ours = (q for q in Queue if q is not Queue.ENGINE)
        self._streams = {
            q: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
            for q in ours
        }

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of GPU memory."""
        made = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        # Zeroed on the current stream, used on ours: once, at the start.
        torch.cuda.current_stream(self._device).synchronize()
        return made

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Launch on the queue's stream."""
        with torch.cuda.stream(self._stream(queue)):
            work()

    def record(self, queue: Queue) -> Mark:
        """Record an event."""
        return _CudaMark(self._stream(queue))

    def hold(self, queue: Queue, mark: Mark) -> None:
        """Make the stream wait for the event."""
        assert isinstance(mark, _CudaMark)
        self._stream(queue).wait_event(mark.event)

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        if queue is Queue.ENGINE:
            return torch.cuda.current_stream(self._device)
        return self._streams[queue]


def device_for(device: torch.device) -> Device:
    """The queues of a torch device. `ValueError` for a kind that is neither cpu nor cuda."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise ValueError(f"pages are on {device}; tierkv copies from cpu and cuda")


class CudaRegistrar:
    """Registers host memory with CUDA, for every context (`cudaHostRegisterPortable`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        self._success = self._cudart.cudaError.success

    def register(self, address: int, nbytes: int) -> str:
        """`cudaHostRegister`."""
        return self._text(self._cudart.cudaHostRegister(address, nbytes, 1))

    def unregister(self, address: int) -> str:
        """`cudaHostUnregister`."""
        return self._text(self._cudart.cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Have torch ask for the last error, which clears it: it does so after every launch."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)

    def _text(self, error: Any) -> str:
        if error == self._success:
            return ""
        return str(self._cudart.cudaGetErrorString(error))
