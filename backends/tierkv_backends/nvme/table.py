"""Where each block is: segments with columns, and one map from key to place over all of them.

Only the event loop's thread touches these. A *place* is ``segment number << 32 | row``. There is
no object per block: about 130 bytes a block, 72 of them the entry as it lies on media.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES, Keys
from tierkv_backends.nvme.format import PAGE, ROW_DTYPE, Rows, end_bytes
from tierkv_backends.nvme.places import PlaceMap, Places, fingerprints

_ROW_BITS: Final = 32
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
_WORDS: Final = HASH_BYTES // 8

_AT_ONCE: Final = 1 << 16
"""Found blocks that are entered together. A million at once leave holes in the heap."""

Hashes = NDArray[np.uint64]
"""uint64[n, 4]: block hashes as words."""


def words_of(hashes: bytes) -> Hashes:
    """Packed hashes as words."""
    return np.frombuffer(hashes, np.uint64).reshape(-1, _WORDS)


class State(enum.Enum):
    """Life of a segment: SPARE, ACTIVE, SEALED, RETIRING, and SPARE again."""

    SPARE = enum.auto()
    ACTIVE = enum.auto()
    SEALED = enum.auto()
    RETIRING = enum.auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Segment:
    """One segment file and the columns of its blocks.

    nbytes: its size. whole: the file is as long as that, so it can be used again.
    end: where the next extent goes. link: checksum of the last extent header. root: where the
    chain starts. count: blocks written here; live, live_bytes: those that the index still points
    at, and their payload.
    readers: loads under way; the file is not used again before this is 0. touched: its place in
    the order in which segments are given up: when it was last written, passed over, or, where
    nobody says what is worth keeping, read; in ticks of the store.
    """

    number: int
    path: Path
    nbytes: int
    alignment: int
    generation: int = 0
    root: int = 0
    end: int = 0
    link: int = 0
    state: State = State.SPARE
    whole: bool = True
    count: int = 0
    live: int = 0
    live_bytes: int = 0
    readers: int = 0
    touched: int = 0
    _hashes: Hashes = field(default_factory=lambda: np.empty((0, _WORDS), np.uint64))
    _rows: Rows = field(default_factory=lambda: np.empty(0, ROW_DTYPE))
    _alive: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    @property
    def rows(self) -> Rows:
        """ROW_DTYPE[count] of all blocks written here, live or not."""
        return self._rows[: self.count]

    @property
    def hashes(self) -> Hashes:
        """Their hashes."""
        return self._hashes[: self.count]

    @property
    def alive(self) -> NDArray[np.bool_]:
        """Which of them are live."""
        return self._alive[: self.count]

    def append(self, hashes: Hashes, rows: Rows) -> None:
        """Add columns of live blocks that are published now."""
        end = self.count + len(rows)
        if end > len(self._rows):
            self._resize(max(end, 2 * self.count))
        added = slice(self.count, end)
        self._rows[added], self._hashes[added], self._alive[added] = rows, hashes, True
        self.count = end
        self.live += len(rows)
        self.live_bytes += int(rows["stored_bytes"].sum())

    def reserve(self, blocks: int) -> None:
        """Make room in the columns for so many more."""
        self._resize(self.count + blocks)

    def bury(self, rows: NDArray[Any]) -> None:
        """The index does not point at these rows any more. Each must be live, and named once."""
        self._alive[rows] = False
        self.live -= len(rows)
        self.live_bytes -= int(self._rows["stored_bytes"][rows].sum())

    def trim(self) -> None:
        """Give back what `append` reserved ahead."""
        if len(self._rows) > self.count:
            self._resize(self.count)

    def blank(self) -> None:
        """Forget all columns; the index must not point here any more."""
        self.count = self.live = self.live_bytes = 0
        self._resize(0)

    def _resize(self, n: int) -> None:
        kept = min(n, self.count)
        for name in ("_hashes", "_rows", "_alive"):
            column = getattr(self, name)
            other = np.empty((n, *column.shape[1:]), column.dtype)
            other[:kept] = column[:kept]
            setattr(self, name, other)

    def room(self, blocks: int, *, end: int | None = None) -> int:
        """Bytes that extents from `end` may take if `blocks` more entries must fit the footer.

        A page is kept back, so that rounding the footer up never matters.
        """
        start = self.end if end is None else end
        return self.nbytes - PAGE - end_bytes(self.count + blocks, self.alignment) - start


class Table:
    """All segments of one owner and the index over them."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._map = PlaceMap()
        self._tick = 0
        self.highest = 0

    def __len__(self) -> int:
        return sum(s.live for s in self.segments.values())

    @property
    def payload_bytes(self) -> int:
        """Payload of all blocks."""
        return sum(s.live_bytes for s in self.segments.values())

    def next_number(self) -> int:
        """A segment number that no file has or had while this table lives."""
        self.highest += 1
        return self.highest

    def add(self, segment: Segment) -> None:
        """Know a segment."""
        self.segments[segment.number] = segment
        self.highest = max(self.highest, segment.number)

    def touch(self, segment: Segment) -> None:
        """Have `segment` given up last."""
        self._tick += 1
        segment.touched = self._tick

    def find(self, keys: Keys) -> Places:
        """Where each key is, or -1."""
        hashes = words_of(keys.hashes)
        places = self._map.find(fingerprints(keys.groups, hashes))
        for number, positions, rows in by_segment(places):
            segment = self.segments[number]
            same = (segment.hashes[rows] == hashes[positions]).all(axis=1)
            same &= segment.rows["group"][rows] == keys.groups[positions]
            places[positions[~same]] = -1  # another key with the same fingerprint
        return places

    def lengths(self, keys: Keys) -> NDArray[np.int64]:
        """int64[n]: payload bytes of each key, 0 where it is not here."""
        out = np.zeros(len(keys), np.int64)
        for number, positions, rows in by_segment(self.find(keys)):
            out[positions] = self.segments[number].rows["stored_bytes"][rows]
        return out

    def publish(self, segment: Segment, hashes: bytes, rows: Rows) -> None:
        """Add blocks that are in place on media. A key that is elsewhere already moves here.

        No key twice.
        """
        words = words_of(hashes)
        places = np.arange(segment.count, segment.count + len(rows)) + (segment.number << _ROW_BITS)
        segment.append(words, rows)
        self._bury(self._map.put(fingerprints(rows["group"], words), places))

    def reserve(self, blocks: int) -> None:
        """Be ready for so many more blocks."""
        self._map.reserve(blocks)

    def adopt(self, segment: Segment, hashes: bytes, rows: Rows) -> None:
        """`publish` of what was found on media: of a key that is there twice the later counts."""
        segment.reserve(len(rows))
        for at in range(0, len(rows), _AT_ONCE):
            some, words = rows[at : at + _AT_ONCE], words_of(hashes)[at : at + _AT_ONCE]
            prints = fingerprints(some["group"], words)
            later = len(some) - 1 - np.unique(prints[::-1], return_index=True)[1]
            if len(later) < len(some):
                later.sort()
                some, words = some[later], words[later]
            self.publish(segment, words.tobytes(), some)

    def forget(self, keys: Keys) -> None:
        """Remove keys from the index; unknown ones are fine."""
        places = self.find(keys)
        known = places >= 0
        self._map.remove(fingerprints(keys.groups, words_of(keys.hashes))[known])
        self._bury(np.unique(places[known]))

    def keys_of(self, segment: Segment) -> Keys:
        """The live keys of a segment."""
        alive = segment.alive
        return Keys(segment.rows["group"][alive], segment.hashes[alive].tobytes())

    def drop(self, segment: Segment) -> None:
        """Forget a segment and all of its blocks."""
        self.forget(self.keys_of(segment))
        segment.blank()
        del self.segments[segment.number]

    def clear(self) -> None:
        """Forget every block; all segments are blank."""
        self._map = PlaceMap()
        for segment in self.segments.values():
            segment.blank()

    def scan(self) -> Iterator[Keys]:
        """All keys as they were when the iteration began, a segment at a time."""
        yield from [self.keys_of(segment) for segment in self.segments.values() if segment.live]

    def _bury(self, places: Places) -> None:
        for number, _, rows in by_segment(places):
            self.segments[number].bury(rows)


def by_segment(places: Places) -> Iterator[tuple[int, NDArray[np.intp], NDArray[Any]]]:
    """(segment number, positions in `places`, rows in the segment), for all that are not -1."""
    found = np.flatnonzero(places >= 0)
    if not found.size:
        return
    numbers = places[found] >> _ROW_BITS
    if (numbers == numbers[0]).all():
        yield int(numbers[0]), found, places[found] & _ROW_MASK
        return
    order = np.argsort(numbers, kind="stable")
    found, numbers = found[order], numbers[order]
    edges = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(found)]
    for start, end in itertools.pairwise(edges):
        part = found[start:end]
        yield int(numbers[start]), part, places[part] & _ROW_MASK
