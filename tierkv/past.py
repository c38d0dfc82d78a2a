"""What is remembered of blocks that left: how often they were used, in five bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES

_MOST: Final = 255


class Past:
    """A table of fingerprints in which the newer of two blocks that meet stays.

    A block that comes again after it left is known to be worth more than one that was never seen:
    on the public trace this alone is 4 % of the hits of a small tier. Which of two blocks it
    mistakes for the other (one in 2**32) decides only what is kept, never what is read.

    entries: rounded up to a power of two; 5 bytes each.
    """

    def __init__(self, entries: int) -> None:
        size = 1 << max(0, entries - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._print: NDArray[np.uint32] = np.zeros(size, np.uint32)
        self._uses: NDArray[np.uint8] = np.zeros(size, np.uint8)

    def remember(self, hashes: Sequence[bytes], uses: NDArray[np.uint8]) -> None:
        """These n blocks leave; uses: uint8[n], how often each was used while it was here."""
        at, prints = self._places(hashes)
        self._print[at] = prints
        self._uses[at] = uses

    def recall(self, hashes: Sequence[bytes]) -> NDArray[np.uint8]:
        """uint8[n]: 0 for a block that is not remembered, else one more than it was used."""
        at, prints = self._places(hashes)
        found: NDArray[np.uint8] = np.minimum(self._uses[at], _MOST - 1) + np.uint8(1)
        found[self._print[at] != prints] = 0
        return found

    def _places(self, hashes: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Slot and fingerprint of each hash. A fingerprint of 0 would stand for an empty slot."""
        words = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, HASH_BYTES // 8)
        at = (words[:, 0] & self._mask).astype(np.int64)
        return at, np.maximum(words[:, 1] & np.uint64(0xFFFFFFFF), np.uint64(1)).astype(np.uint32)
