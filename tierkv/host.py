"""The arena as copies see it: a tensor over its memory, registered once a GPU asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tierkv.device import arena_tensor
from tierkv.pinned import Arena
from tierkv.registration import Registrar, Registration
from tierkv.streams import CudaRegistrar


class HostArena:
    """Memory of an arena, and its registration. One thread at a time.

    arena: the caller closes it, after `unregister_sync`. block_bytes: of each group.

    memory: uint8, the whole arena.
    """

    def __init__(
        self,
        arena: Arena,
        block_bytes: Sequence[int],
        make_registrar: Callable[[torch.device], Registrar] = CudaRegistrar,
    ) -> None:
        self.memory = arena_tensor(arena.view)
        self._view = arena.view
        self._block_bytes = block_bytes
        self._make_registrar = make_registrar
        self._registration: Registration | None = None

    def register_sync(self, device: torch.device) -> tuple[int, ...]:
        """Register for a GPU, once; nothing to do for a CPU. Returns `Registration.cuts`.

        Takes about 0.3 s per GB, and pins the memory.
        """
        if device.type == "cpu":
            return ()
        if self._registration is None:
            self._registration = Registration(
                self._view, self._make_registrar(device), self._block_bytes
            )
        return self._registration.cuts

    def stats(self) -> dict[str, Any]:
        """`pinned`: whether a GPU copies it directly; `pinned_reason`: why not, where it is not."""
        if self._registration is None:
            return {"pinned": False, "pinned_reason": "no GPU has asked for it"}
        return self._registration.stats()

    def unregister_sync(self) -> None:
        """Before the arena is closed, when no copy is under way. Safe to call twice."""
        if self._registration is not None:
            self._registration.close()
