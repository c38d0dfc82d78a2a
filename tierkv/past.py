"""What is remembered of blocks that left: how often they were used, in five bytes each."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES, Keys

_MOST: Final = 255

_GROUPS_APART: Final = np.uint64(0x9E3779B97F4A7C15)
"""An odd number: blocks of several groups that end at the same token have the same hash."""


class Past:
    """A table of fingerprints in which the newer of two blocks that meet stays.

    A block that comes again after it left is worth more than one that was never seen. Two blocks
    are mistaken for each other once in 2**32 times; that decides only what is kept, never what is
    read.
    """

    def __init__(self) -> None:
        self.entries = 0
        self._print: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._uses: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def reserve(self, entries: int) -> None:
        """Have so many entries, rounded down to a power of two; 5 bytes each. It never shrinks.

        Nothing is forgotten by it: a block is found in either half of a table that was doubled.
        """
        size = 1 << max(0, entries.bit_length() - 1)
        if size > self.entries:
            copies = size // self.entries if self.entries else 0
            self._print = np.tile(self._print, copies) if copies else np.zeros(size, np.uint32)
            self._uses = np.tile(self._uses, copies) if copies else np.zeros(size, np.uint8)
            self.entries = size

    def remember(self, keys: Keys, uses: NDArray[np.uint8]) -> None:
        """These n blocks leave; uses: uint8[n], how often each was used while it was here."""
        at, prints = self._places(keys)
        self._print[at] = prints
        self._uses[at] = uses

    def recall(self, keys: Keys, *, chained: bool = True) -> NDArray[np.uint8]:
        """uint8[n]: at least how often n blocks of one prompt were used before, this use included.

        keys: in the order of the prompt, of one group. chained: whether a block was used whenever
        one behind it was. 0: not remembered.
        """
        at, prints = self._places(keys)
        found: NDArray[np.uint8] = np.minimum(self._uses[at], _MOST - 1) + np.uint8(1)
        found[self._print[at] != prints] = 0
        if not chained:
            return found
        since_end: NDArray[np.uint8] = np.maximum.accumulate(found[::-1])[::-1]
        return since_end

    def _places(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Slot and fingerprint of each key. A fingerprint of 0 would stand for an empty slot."""
        words = np.frombuffer(keys.hashes, "<u8").reshape(-1, HASH_BYTES // 8)
        mixed = words[:, 0] ^ keys.groups * _GROUPS_APART
        at = (mixed & np.uint64(self.entries - 1)).astype(np.int64)
        prints = np.maximum(words[:, 1] & np.uint64(0xFFFFFFFF), np.uint64(1)).astype(np.uint32)
        return at, prints
