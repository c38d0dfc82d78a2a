"""Who carries out the system calls that move payload: the seam between nvme and gds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierkv.backend import DeviceMemory

Memory = memoryview | DeviceMemory
"""What blocks are written from and read into: a part of the arena, or of a GPU's memory."""


class Engine(Protocol):
    """Moves payload between memory and an open segment. Everything here blocks.

    When a call returns or raises, nothing touches its buffers any more. `name` is what
    `usage().modes["io"]` says. `alignment` is the least that blocks are padded to on media.
    `reads_over_gaps` says whether bytes between two blocks cost less than another call: true
    where one call fills many buffers, false where each buffer is a transfer of its own.
    `writes_in_order` says that a call that is cut short by a kill has written a beginning.
    """

    name: str
    alignment: int
    reads_over_gaps: bool
    writes_in_order: bool

    def write_all_sync(self, fd: int, buffers: Sequence[Memory], offset: int) -> int:
        """Write all of `buffers` at `offset`. Returns the bytes. `OSError` where it cannot."""
        ...

    def read_into_sync(self, fd: int, buffers: Sequence[Memory], offset: int) -> int:
        """Fill `buffers` from `offset`. Returns the bytes; fewer at the file's end."""
        ...

    def forget_sync(self, fd: int) -> None:
        """Give back what is held for a descriptor that is about to be closed."""
        ...

    def close_sync(self) -> None:
        """Give everything back; the last call."""
        ...

    def modes(self) -> dict[str, str]:
        """What `usage().modes` says of it besides `io`."""
        ...
