"""From a block's fingerprint to its place: open addressing in two numpy columns, a dict in front.

A dict of a million hashes takes 230 bytes a block; columns take 40 to 80, and whole batches are
looked up without a Python object per block. But columns make a dozen calls however few blocks are
entered, so the latest few thousand wait in a dict until there are enough of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
"""int64[n]; -1: not here."""

Prints = NDArray[np.uint64]
"""uint64[n] of fingerprints."""

_EMPTY: Final = -1
_GONE: Final = -2
"""A place that was removed; what lies behind it in the chain is still found."""

_FULLEST: Final = 0.6
"""Share of filled slots, removed ones included, from which chains become long."""

_SPARSE: Final = 2
"""Slots per block after a rebuild, at least: a tenth of them is filled before the next is due."""

_FEW: Final = 1000
"""Fewer fingerprints than this look at `_WINDOW` slots together."""

_CHUNK: Final = 1 << 13
"""Fingerprints that are worked on together: half a megabyte of slots stays in the CPU's cache."""

_WINDOW: Final = 8
"""Slots that are looked at together: one cache line of places, and seldom a second round."""

_RECENT: Final = 1 << 13
"""Blocks in the dict: a megabyte."""

_MULTIPLIERS: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
_GROUP_MULTIPLIER: Final = np.uint64(0xA0761D6478BD642F)
_SHIFT: Final = np.uint64(32)


def fingerprints(groups: NDArray[Any], hashes: NDArray[np.uint64]) -> Prints:
    """64 bits that all of a key goes into. hashes: uint64[n, 4]."""
    mixed: Prints = (hashes * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
    mixed += groups.astype(np.uint64) * _GROUP_MULTIPLIER
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _SHIFT
    return mixed


class PlaceMap:
    """Fingerprint to place. Two keys with one fingerprint are one to it; the later one stays."""

    def __init__(self) -> None:
        self._columns = _Columns()
        self._recent: dict[int, int] = {}  # counts before the columns

    def find(self, prints: Prints) -> Places:
        """Where each is, or -1."""
        places = self._columns.find(prints)
        if self._recent:
            recent = list(map(self._recent.get, prints.tolist(), places.tolist()))
            places = np.array(recent, np.int64)
        return places

    def reserve(self, more: int) -> None:
        """Be ready for so many more."""
        self._columns.reserve(more)

    def put(self, prints: Prints, places: Places) -> Places:
        """Enter distinct fingerprints; where each was before, or -1. places: distinct."""
        before = self.find(prints)
        if len(prints) > _RECENT:
            self._settle()
            self._columns.put(prints, places)
            return before
        self._recent.update(zip(prints.tolist(), places.tolist(), strict=True))
        if len(self._recent) > _RECENT:
            self._settle()
        return before

    def remove(self, prints: Prints) -> None:
        """Forget fingerprints; unknown ones are fine."""
        if self._recent:
            for one in prints.tolist():
                self._recent.pop(one, None)
        self._columns.remove(prints)

    def _settle(self) -> None:
        n = len(self._recent)
        prints = np.fromiter(self._recent.keys(), np.uint64, n)
        self._columns.put(prints, np.fromiter(self._recent.values(), np.int64, n))
        self._recent.clear()


class _Columns:
    """The same in numpy: good for many blocks at once."""

    def __init__(self) -> None:
        self._resize(1 << 10)

    def find(self, prints: Prints) -> Places:
        """Where each is, or -1."""
        if len(prints) > _CHUNK:
            parts = [prints[a : a + _CHUNK] for a in range(0, len(prints), _CHUNK)]
            return np.concatenate([self.find(part) for part in parts])
        slots = self._slots(prints)
        return np.where(slots >= 0, self._place[slots], _EMPTY)

    def reserve(self, more: int) -> None:
        """Be ready for so many more."""
        if self._filled + more > _FULLEST * len(self._place):
            self._rebuild(more)

    def put(self, prints: Prints, places: Places) -> None:
        """Enter distinct fingerprints. places: distinct."""
        self.reserve(len(prints))
        for at in range(0, len(prints), _CHUNK):
            self._put(prints[at : at + _CHUNK], places[at : at + _CHUNK])

    def _put(self, prints: Prints, places: Places) -> None:
        slots = self._slots(prints)
        known = slots >= 0
        self._place[slots[known]] = places[known]
        self._insert(prints[~known], places[~known])

    def remove(self, prints: Prints) -> None:
        """Forget fingerprints; unknown ones are fine."""
        slots = self._slots(prints)
        self._place[slots[slots >= 0]] = _GONE

    def _resize(self, capacity: int) -> None:
        self._print: Prints = np.zeros(capacity, np.uint64)
        self._place: Places = np.full(capacity, _EMPTY, np.int64)
        self._mask = capacity - 1
        self._filled = 0

    def _rebuild(self, more: int) -> None:
        live = self._place >= 0
        prints, places = self._print[live], self._place[live]
        self._resize(1 << max(10, (_SPARSE * (len(prints) + more)).bit_length()))
        for at in range(0, len(prints), _CHUNK):
            self._insert(prints[at : at + _CHUNK], places[at : at + _CHUNK])

    def _window(self, prints: Prints, chain: int) -> NDArray[np.int64]:
        """int64[n, width]: the slots of each from the `chain`-th on.

        For few blocks calls cost more than slots, for many it is the other way round.
        """
        width = _WINDOW if len(prints) < _FEW else 1
        home = (prints & np.uint64(self._mask)).astype(np.int64)
        return (home[:, None] + np.arange(chain, chain + width)) & self._mask

    def _slots(self, prints: Prints) -> NDArray[np.int64]:
        """Slot of each, or -1."""
        found = np.full(len(prints), -1, np.int64)
        left, chain = np.arange(len(prints)), 0
        while len(left):
            wanted = prints[left]
            slots = self._window(wanted, chain)
            places = self._place[slots]
            hits = (self._print[slots] == wanted[:, None]) & (places >= 0)
            which = hits.argmax(axis=1)
            row = np.arange(len(left))
            hit = hits[row, which]
            found[left[hit]] = slots[row, which][hit]
            left = left[~hit & (places != _EMPTY).all(axis=1)]
            chain += slots.shape[1]
        return found

    def _insert(self, prints: Prints, places: Places) -> None:
        """Enter what is not there, each in the first free slot of its chain."""
        left, chain = np.arange(len(prints)), 0
        while len(left):
            slots = self._window(prints[left], chain)
            free = self._place[slots] < 0
            at = slots[np.arange(len(left)), free.argmax(axis=1)]
            before = self._place[at]
            usable = before < 0
            self._place[at[usable]] = places[left[usable]]
            won = usable & (self._place[at] == places[left])  # of several in a slot the last
            self._print[at[won]] = prints[left[won]]
            self._filled += int((before[won] == _EMPTY).sum())
            left = left[~won]
            if slots.shape[1] == 1 or not usable.any():
                chain += slots.shape[1]
