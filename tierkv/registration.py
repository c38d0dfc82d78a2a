"""Registers an arena with the device's driver, so that copies are direct and asynchronous.

One registration of everything fails from some size on whatever memory is free (512 GiB was seen:
vLLM issue 51080), so it is done in pieces. Nothing is registered in the end, and no error is left
behind in the driver, if one of them fails. The arena works all the same then, unregistered: its
copies go through the driver's own buffers, and launching one waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from tierkv.blocks import ARENA_ALIGN, slot_bytes

log = logging.getLogger("tierkv")

PIECE_BYTES: Final = 64 << 30
"""An eighth of the size that was seen to fail."""


class Registrar(Protocol):
    """A driver that can register host memory. `tierkv.streams.CudaRegistrar`; tests have a fake."""

    def register(self, address: int, nbytes: int) -> str:
        """Register a piece: "" or, in its words, why not. Takes about 0.3 s per GB."""

    def unregister(self, address: int) -> str:
        """Undo `register`: "" or why not."""

    def clear_error(self) -> None:
        """Forget the error of a call that failed, or an unrelated call would report it later."""


def piece_ends(nbytes: int, block_bytes: Sequence[int], piece_bytes: int) -> list[int]:
    """Where the pieces of an arena of `nbytes` end, ascending; the last is `nbytes`.

    Pieces are as long as `piece_bytes` allows (one slot at least). Where all slots are of one
    size, they end at ends of slots, so no block spans two. Where they are not, slots may lie
    anywhere: pieces end at pages, and copies are split there (`Copier(cuts=...)`).
    """
    slots = {slot_bytes(n) for n in block_bytes}
    grain = slots.pop() if len(slots) == 1 else ARENA_ALIGN
    step = max(piece_bytes // grain, 1) * grain
    return [*range(step, nbytes, step), nbytes]


class Registration:
    """What is registered of an arena, until `close`. Makes one attempt, and one warning.

    view: uint8[n], the arena; block_bytes: of each group. Blocks while it takes and pins all of
    the arena's memory.

    pinned: whether all of it is registered. reason: why not, "" if it is.
    cuts: offsets where pieces meet; empty if nothing is registered.
    """

    def __init__(
        self,
        view: memoryview,
        registrar: Registrar,
        block_bytes: Sequence[int],
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._registrar = registrar
        self._addresses: list[int] = []
        self.reason = ""
        base = int(np.frombuffer(view, np.uint8).ctypes.data)
        ends = piece_ends(view.nbytes, block_bytes, piece_bytes)
        starts = [0, *ends[:-1]]
        for start, end in zip(starts, ends, strict=True):
            why = registrar.register(base + start, end - start)
            if why:
                registrar.clear_error()
                self.close()
                self.reason = f"{end - start} bytes at offset {start}: {why}"
                log.warning(
                    "tierkv: pinned: the device does not register host memory (%s); copies go "
                    "through the driver's own buffers and are slower",
                    self.reason,
                )
                break
            self._addresses.append(base + start)
        self.cuts = tuple(ends[:-1]) if self.pinned else ()

    @property
    def pinned(self) -> bool:
        """Whether everything is registered."""
        return bool(self._addresses)

    def stats(self) -> dict[str, Any]:
        """`pinned`, and `pinned_reason` where it is False."""
        return {"pinned": True} if self.pinned else {"pinned": False, "pinned_reason": self.reason}

    def close(self) -> None:
        """Unregister, before the memory goes. Safe to call twice. No copy may be under way."""
        while self._addresses:
            why = self._registrar.unregister(self._addresses.pop())
            if why:
                self._registrar.clear_error()
                log.warning("tierkv: pinned: a piece could not be unregistered (%s)", why)
