"""What is remembered of blocks that left: how often they were used, in five bytes for two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES

ONE_IN: Final = 2
"""So many blocks share what is remembered: a prompt's beginning was used whenever its end was."""

_MOST: Final = 255


class Past:
    """A table of fingerprints in which the newer of two blocks that meet stays.

    A block that comes again after it left is worth more than one that was never seen. One block in
    `ONE_IN` is remembered, chosen by its hash; of one prompt all blocks before it were used at
    least as often as it was. Two blocks are mistaken for each other once in 2**32 times; that
    decides only what is kept, never what is read.

    entries: rounded up to a power of two; 5 bytes each.
    """

    def __init__(self, entries: int) -> None:
        size = 1 << max(0, entries - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._print: NDArray[np.uint32] = np.zeros(size, np.uint32)
        self._uses: NDArray[np.uint8] = np.zeros(size, np.uint8)

    def remember(self, hashes: Sequence[bytes], uses: NDArray[np.uint8]) -> None:
        """These n blocks leave; uses: uint8[n], how often each was used while it was here."""
        at, prints, chosen = self._places(hashes)
        self._print[at[chosen]] = prints[chosen]
        self._uses[at[chosen]] = uses[chosen]

    def recall(self, hashes: Sequence[bytes]) -> NDArray[np.uint8]:
        """uint8[n]: at least how often n blocks of one prompt were used before, this use included.

        hashes: in the order of the prompt, of one group. 0: not remembered.
        """
        at, prints, chosen = self._places(hashes)
        found: NDArray[np.uint8] = np.minimum(self._uses[at], _MOST - 1) + np.uint8(1)
        found[(self._print[at] != prints) | ~chosen] = 0
        since_end: NDArray[np.uint8] = np.maximum.accumulate(found[::-1])[::-1]
        return since_end

    def _places(
        self, hashes: Sequence[bytes]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.bool_]]:
        """Slot and fingerprint of each hash, and which are remembered at all.

        A fingerprint of 0 would stand for an empty slot.
        """
        words = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, HASH_BYTES // 8)
        at = (words[:, 0] & self._mask).astype(np.int64)
        prints = np.maximum(words[:, 1] & np.uint64(0xFFFFFFFF), np.uint64(1)).astype(np.uint32)
        chosen: NDArray[np.bool_] = words[:, 2] % np.uint64(ONE_IN) == 0
        return at, prints, chosen
