"""Where each block is: segments with columns, and one dict per group from hash to place.

Only the event loop's thread touches these. A *place* is ``segment number << 32 | row``.
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

_ROW_BITS: Final = 32
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
Places = NDArray[np.int64]
"""int64[n]; -1: not here."""


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
    chain starts. live, live_bytes: blocks and payload that the index still points at.
    readers: loads under way; the file is not used again before this is 0. touched: when it was
    last written or read, in ticks of the store.
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
    hashes: list[bytes] = field(default_factory=list)
    live: int = 0
    live_bytes: int = 0
    readers: int = 0
    touched: int = 0
    _rows: Rows = field(default_factory=lambda: np.empty(0, ROW_DTYPE))

    @property
    def rows(self) -> Rows:
        """ROW_DTYPE[n] of all blocks written here, live or not."""
        return self._rows[: len(self.hashes)]

    def append(self, hashes: bytes, rows: Rows) -> None:
        """Add columns of blocks that are published now."""
        at, n = len(self.hashes), len(rows)
        if at + n > len(self._rows):
            grown = np.empty(max(at + n, 2 * len(self._rows)) if at else n, ROW_DTYPE)
            grown[:at] = self._rows[:at]
            self._rows = grown
        self._rows[at : at + n] = rows
        self.hashes += [hashes[i : i + HASH_BYTES] for i in range(0, n * HASH_BYTES, HASH_BYTES)]

    def trim(self) -> None:
        """Give back what `append` reserved ahead."""
        if len(self._rows) > len(self.hashes):
            self._rows = self._rows[: len(self.hashes)].copy()

    def blank(self) -> None:
        """Forget all columns; the index must not point here any more."""
        self.hashes = []
        self._rows = np.empty(0, ROW_DTYPE)
        self.live = self.live_bytes = 0

    def room(self, blocks: int, *, end: int | None = None) -> int:
        """Bytes that extents from `end` may take if `blocks` more entries must fit the footer.

        A page is kept back, so that rounding the footer up never matters.
        """
        start = self.end if end is None else end
        return self.nbytes - PAGE - end_bytes(len(self.hashes) + blocks, self.alignment) - start


class Table:
    """All segments of one owner and the index over them."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._index: dict[int, dict[bytes, int]] = {}
        self._tick = 0
        self.highest = 0

    def __len__(self) -> int:
        return sum(map(len, self._index.values()))

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
        """Note that `segment` was used just now."""
        self._tick += 1
        segment.touched = self._tick

    def find(self, keys: Keys) -> Places:
        """Where each key is, or -1."""
        index, none = self._index, dict[bytes, int]()
        return np.fromiter(
            (index.get(g, none).get(h, -1) for g, h in keys), np.int64, count=len(keys)
        )

    def publish(self, segment: Segment, hashes: bytes, rows: Rows) -> None:
        """Add blocks that are in place on media. A key that is elsewhere already moves here."""
        at = len(segment.hashes)
        segment.append(hashes, rows)
        segment.live += len(rows)
        segment.live_bytes += int(rows["stored_bytes"].sum())
        new = segment.hashes[at:]
        groups = rows["group"]
        for group in np.unique(groups).tolist():
            picked = np.flatnonzero(groups == group)
            some = new if len(picked) == len(new) else [new[i] for i in picked.tolist()]
            first = segment.number << _ROW_BITS | at
            self._point(self._index.setdefault(group, {}), some, (picked + first).tolist())

    def _point(self, index: dict[bytes, int], hashes: list[bytes], places: list[int]) -> None:
        """Enter places of one group. What the same hashes had before lives no more."""
        fresh = set(hashes)
        if len(fresh) == len(hashes) and index.keys().isdisjoint(fresh):
            index.update(zip(hashes, places, strict=True))  # 1M blocks in half the loop's time
            return
        for block_hash, place in zip(hashes, places, strict=True):
            before = index.get(block_hash)
            index[block_hash] = place
            if before is not None:
                self._unlink(before)

    def forget(self, keys: Keys) -> None:
        """Remove keys from the index; unknown ones are fine."""
        for g, h in keys:
            place = self._index.get(g, {}).pop(h, None)
            if place is not None:
                self._unlink(place)

    def keys_of(self, segment: Segment) -> Keys:
        """The live keys of a segment."""
        rows = self.live_rows(segment)
        hashes = segment.hashes
        return Keys(segment.rows["group"][rows], b"".join(hashes[i] for i in rows.tolist()))

    def live_rows(self, segment: Segment) -> NDArray[np.intp]:
        """Rows of a segment that the index points at."""
        first = segment.number << _ROW_BITS
        index, none = self._index, dict[bytes, int]()
        return np.fromiter(
            (
                i
                for i, (g, h) in enumerate(
                    zip(segment.rows["group"].tolist(), segment.hashes, strict=True)
                )
                if index.get(g, none).get(h) == first + i
            ),
            np.intp,
        )

    def drop(self, segment: Segment) -> None:
        """Forget a segment and all of its blocks."""
        self.forget(self.keys_of(segment))
        segment.blank()
        del self.segments[segment.number]

    def clear(self) -> None:
        """Forget every block; all segments are blank."""
        self._index = {}
        for segment in self.segments.values():
            segment.blank()

    def scan(self, batch: int) -> Iterator[Keys]:
        """All keys as they were when the iteration began, `batch` at a time."""
        for group, hashes in [(g, list(d)) for g, d in self._index.items()]:
            for at in range(0, len(hashes), batch):
                part = hashes[at : at + batch]
                yield Keys(np.full(len(part), group, np.uint16), b"".join(part))

    def _unlink(self, place: int) -> None:
        segment = self.segments[place >> _ROW_BITS]
        segment.live -= 1
        segment.live_bytes -= int(segment._rows["stored_bytes"][place & _ROW_MASK])


def by_segment(places: Places) -> Iterator[tuple[int, NDArray[np.intp], NDArray[Any]]]:
    """(segment number, positions in `places`, rows in the segment), for all that are not -1."""
    found = np.flatnonzero(places >= 0)
    numbers = places[found] >> _ROW_BITS
    order = np.argsort(numbers, kind="stable")
    found, numbers = found[order], numbers[order]
    edges = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(found)]
    for start, end in itertools.pairwise(edges):
        part = found[start:end]
        yield int(numbers[start]), part, places[part] & _ROW_MASK
