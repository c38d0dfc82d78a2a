"""What lies in a root of the ``nvme`` backend, byte by byte. Everything is little endian.

::

    ROOT/LOCK                         held (flock) briefly around every change of the quota's books
    ROOT/<16 hex>-r<rank>-d<dp>/      one owner's blocks; 16 hex = start of the namespace digest
        LOCK                          flock of the owner; its text says who that is
        meta.json                     format, whole digest, namespace text, ranks, epoch
        seg-00000001.tkv …            segments, preallocated, all of `segment` bytes
        snapshot                      only after a clean close

A directory whose ``meta.json`` names another format or digest is left alone, and the owner takes
the next free name (``….1``). Only segments whose epoch is that of ``meta.json`` are read:
`clear` raises the epoch, and everything older is never seen again.

**Segment**::

    | header page | extent | extent | … free … | footer | trailer page |

Header page, written when a segment is put to use (again):

====== ===== ===================================================================================
offset bytes field
====== ===== ===================================================================================
0      8     magic ``TKVSEG01``
8      4     format version
12     4     alignment of blocks on media
16     8     segment number
24     8     generation: one more at every use of the file
32     8     epoch
40     8     bytes of the segment
48     32    namespace digest
80     8     nonce, random for every use
88     8     XXH3-64 of bytes 0 to 88: the *root* of the segment's chain
====== ===== ===================================================================================

**Extent**: starts at a multiple of 4096; a header, zero-padded to a multiple of 4096, then blocks
back to back, each padded to the alignment. Both are written in one call, from the beginning; a
segment's next extent begins when that has returned. So a kill can cut only the last extent, and
only its end: `tierkv_backends.nvme.recovery` proves the blocks of that one. (An engine that splits
its calls writes the header after the payload.)

====== ===== ===================================================================================
offset bytes field
====== ===== ===================================================================================
0      8     magic ``TKVEXT01``
8      8     generation of the segment
16     8     sequence number, growing over the store
24     8     nonce of the process that wrote it
32     8     link: checksum of the extent before; of the first extent: the root
40     8     where this extent starts in the segment
48     8     bytes of the extent, header included; a multiple of 4096
56     4     n, number of blocks
60     4     bytes of the header; a multiple of 4096
64     8     checksum: XXH3-64 of bytes 0 to 64 and the entries
72     72·n  entries
====== ===== ===================================================================================

An entry is the block's 64-byte record (`tierkv.record`) and, as 8 bytes, where its payload starts
in the segment. The links make a chain from the root, so remains of an earlier use of the same
place, or of a chain that was cut, never join a later one.

**Footer and trailer**, written when a segment is full: the footer is all entries, ending where
the trailer page (the segment's last 4096 bytes) starts; then the trailer:

====== ===== ===================================================================================
offset bytes field
====== ===== ===================================================================================
0      8     magic ``TKVEND01``
8      8     generation
16     8     root
24     8     sequence number of the last extent
32     8     n, number of entries
40     8     where the extents end
48     8     XXH3-64 of the footer
56     8     XXH3-64 of bytes 0 to 56
====== ===== ===================================================================================

**Snapshot**, written at a clean close to a temporary name and renamed: a head, a row a segment
(coldest first), and the entries of all live blocks, segment by segment:

====== ===== ===================================================================================
offset bytes field
====== ===== ===================================================================================
0      8     magic ``TKVSNP01``
8      8     epoch
16     32    namespace digest
48     8     sequence number of the last extent
56     8     number of segments
64     8     number of entries
72     8     XXH3-64 of bytes 0 to 72 and everything after byte 80
80     …     segments: number, root, end of extents, link, sealed (0 or 1), entries; 6 x 8 bytes
====== ===== ===================================================================================

Opening uses a snapshot that proves right and removes it before anything is written. Otherwise it
reads footers, and walks the extent headers of segments without one. No payload is read.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES
from tierkv.record import RECORD_BYTES, RECORD_DTYPE

FORMAT_VERSION: Final = 1
PAGE: Final = 4096
MIN_ALIGNMENT: Final = 512
"""Blocks are padded to at least this: no device needs less, and buffered I/O does not care."""

ENTRY_BYTES: Final = RECORD_BYTES + 8
ROW_BYTES: Final = ENTRY_BYTES - HASH_BYTES
ROW_DTYPE: Final = np.dtype(
    [(name, RECORD_DTYPE[name]) for name in RECORD_DTYPE.names or () if name != "hash"]
    + [("offset", "<u8")]
)
"""An entry without its hash: what is kept in memory for each block, as it lies on media."""

Rows = NDArray[np.void]
"""ROW_DTYPE[n]."""

_HEADER: Final = struct.Struct("<8sIIQQQQ32sQ")
_EXTENT: Final = struct.Struct("<8sQQQQQQII")
_TRAILER: Final = struct.Struct("<8sQQQQQQ")
_SNAPSHOT: Final = struct.Struct("<8sQ32sQQQ")
_SUM: Final = struct.Struct("<Q")
_SEGMENT_MAGIC: Final = b"TKVSEG01"
_EXTENT_MAGIC: Final = b"TKVEXT01"
_TRAILER_MAGIC: Final = b"TKVEND01"
_SNAPSHOT_MAGIC: Final = b"TKVSNP01"
EXTENT_FIXED: Final = _EXTENT.size + _SUM.size
SNAPSHOT_ROW: Final = 6 * 8


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


def extent_header_bytes(n: int) -> int:
    """Bytes of the header of an extent of n blocks."""
    return round_up(EXTENT_FIXED + n * ENTRY_BYTES, PAGE)


def end_bytes(n: int, alignment: int) -> int:
    """Bytes that a segment of n entries needs at its end for footer and trailer."""
    return round_up(n * ENTRY_BYTES, alignment) + PAGE


def single_extent_bytes(nbytes: int) -> int:
    """Bytes of an extent of one block of `nbytes`, at the largest alignment."""
    return extent_header_bytes(1) + round_up(nbytes, PAGE)


def largest_block(segment_bytes: int) -> int:
    """Payload bytes of the largest block that a segment can hold.

    Its header, one page kept back (`Segment.room`), footer and trailer of one block take the rest.
    """
    return segment_bytes - 2 * PAGE - end_bytes(1, PAGE) - single_extent_bytes(0)


def split_entries(data: bytes | memoryview, n: int) -> tuple[bytes, Rows]:
    """Packed hashes and rows of n entries."""
    table = np.frombuffer(data, np.uint8, n * ENTRY_BYTES).reshape(n, ENTRY_BYTES)
    rows = np.ascontiguousarray(table[:, HASH_BYTES:]).view(ROW_DTYPE).reshape(n)
    return table[:, :HASH_BYTES].tobytes(), rows


def join_entries(hashes: bytes, rows: Rows) -> bytes:
    """The entries as they lie on media; `split_entries` reads them."""
    n = len(rows)
    table = np.empty((n, ENTRY_BYTES), np.uint8)
    table[:, :HASH_BYTES] = np.frombuffer(hashes, np.uint8).reshape(n, HASH_BYTES)
    table[:, HASH_BYTES:] = np.ascontiguousarray(rows).view(np.uint8).reshape(n, ROW_BYTES)
    return table.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The first page of a segment in use."""

    alignment: int
    number: int
    generation: int
    epoch: int
    nbytes: int
    namespace: bytes
    nonce: int

    @classmethod
    def new(
        cls,
        *,
        alignment: int,
        number: int,
        generation: int,
        epoch: int,
        nbytes: int,
        namespace: bytes,
    ) -> SegmentHeader:
        """A header with a nonce of its own."""
        return cls(
            alignment=alignment,
            number=number,
            generation=generation,
            epoch=epoch,
            nbytes=nbytes,
            namespace=namespace,
            nonce=secrets.randbits(64),
        )

    def pack(self) -> bytes:
        """One page."""
        fixed = _HEADER.pack(
            _SEGMENT_MAGIC,
            FORMAT_VERSION,
            self.alignment,
            self.number,
            self.generation,
            self.epoch,
            self.nbytes,
            self.namespace,
            self.nonce,
        )
        return (fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))).ljust(PAGE, b"\0")

    @property
    def root(self) -> int:
        """The checksum in the header: where the chain of extents starts."""
        return int(_SUM.unpack_from(self.pack(), _HEADER.size)[0])

    @classmethod
    def unpack(cls, page: bytes) -> SegmentHeader | None:
        """The header in `page`, or None where it does not prove right."""
        if len(page) < PAGE:
            return None
        magic, version, alignment, number, generation, epoch, nbytes, namespace, nonce = (
            _HEADER.unpack_from(page)
        )
        (found,) = _SUM.unpack_from(page, _HEADER.size)
        if magic != _SEGMENT_MAGIC or version != FORMAT_VERSION:
            return None
        if found != xxhash.xxh3_64_intdigest(page[: _HEADER.size]):
            return None
        return cls(
            alignment=alignment,
            number=number,
            generation=generation,
            epoch=epoch,
            nbytes=nbytes,
            namespace=namespace,
            nonce=nonce,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentHeader:
    """What an extent says of itself, entries aside."""

    generation: int
    sequence: int
    nonce: int
    link: int
    start: int
    nbytes: int
    n: int

    def pack(self, entries: bytes) -> tuple[bytes, int]:
        """The padded header, and its checksum: the link of the next extent."""
        header_bytes = extent_header_bytes(self.n)
        fixed = _EXTENT.pack(
            _EXTENT_MAGIC,
            self.generation,
            self.sequence,
            self.nonce,
            self.link,
            self.start,
            self.nbytes,
            self.n,
            header_bytes,
        )
        total = xxhash.xxh3_64_intdigest(fixed + entries)
        return (fixed + _SUM.pack(total) + entries).ljust(header_bytes, b"\0"), total

    @classmethod
    def unpack_fixed(cls, page: bytes) -> tuple[ExtentHeader, int] | None:
        """The fixed part and the checksum it claims, not yet proven; None for anything else."""
        if len(page) < EXTENT_FIXED:
            return None
        magic, generation, sequence, nonce, link, start, nbytes, n, header_bytes = (
            _EXTENT.unpack_from(page)
        )
        if magic != _EXTENT_MAGIC or header_bytes != extent_header_bytes(n):
            return None
        header = cls(
            generation=generation,
            sequence=sequence,
            nonce=nonce,
            link=link,
            start=start,
            nbytes=nbytes,
            n=n,
        )
        return header, int(_SUM.unpack_from(page, _EXTENT.size)[0])

    def entries_in(self, data: bytes, claimed: int) -> bytes | None:
        """The entries in the whole header `data`, or None where its checksum is wrong."""
        end = EXTENT_FIXED + self.n * ENTRY_BYTES
        if len(data) < end:
            return None
        entries = data[EXTENT_FIXED:end]
        proven = xxhash.xxh3_64_intdigest(data[: _EXTENT.size] + entries) == claimed
        return entries if proven else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """The last page of a full segment."""

    generation: int
    root: int
    sequence: int
    n: int
    end: int
    footer_sum: int

    def pack(self) -> bytes:
        """One page."""
        fixed = _TRAILER.pack(
            _TRAILER_MAGIC,
            self.generation,
            self.root,
            self.sequence,
            self.n,
            self.end,
            self.footer_sum,
        )
        return (fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))).ljust(PAGE, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Trailer | None:
        """The trailer in `page`, or None where it does not prove right."""
        if len(page) < PAGE:
            return None
        magic, generation, root, sequence, n, end, footer_sum = _TRAILER.unpack_from(page)
        (found,) = _SUM.unpack_from(page, _TRAILER.size)
        if magic != _TRAILER_MAGIC or found != xxhash.xxh3_64_intdigest(page[: _TRAILER.size]):
            return None
        return cls(
            generation=generation,
            root=root,
            sequence=sequence,
            n=n,
            end=end,
            footer_sum=footer_sum,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """One segment in a snapshot, with its live blocks."""

    number: int
    root: int
    end: int
    link: int
    sealed: bool
    hashes: bytes
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a clean close leaves behind. segments: coldest first."""

    epoch: int
    namespace: bytes
    sequence: int
    segments: tuple[SnapshotSegment, ...]

    def pack(self) -> bytes:
        """The whole file."""
        rows = b"".join(
            struct.pack("<6Q", s.number, s.root, s.end, s.link, s.sealed, len(s.rows))
            for s in self.segments
        )
        body = rows + b"".join(join_entries(s.hashes, s.rows) for s in self.segments)
        head = _SNAPSHOT.pack(
            _SNAPSHOT_MAGIC,
            self.epoch,
            self.namespace,
            self.sequence,
            len(self.segments),
            sum(len(s.rows) for s in self.segments),
        )
        return head + _SUM.pack(_sum_of(head, body)) + body

    @classmethod
    def unpack(cls, data: bytes) -> Snapshot | None:
        """The snapshot in `data`, or None where it does not prove right."""
        start = _SNAPSHOT.size + _SUM.size
        if len(data) < start:
            return None
        magic, epoch, namespace, sequence, n_segments, n = _SNAPSHOT.unpack_from(data)
        (found,) = _SUM.unpack_from(data, _SNAPSHOT.size)
        body = memoryview(data)[start:]
        if magic != _SNAPSHOT_MAGIC or found != _sum_of(data[: _SNAPSHOT.size], body):
            return None
        if len(body) != n_segments * SNAPSHOT_ROW + n * ENTRY_BYTES:
            return None
        segments = []
        at = n_segments * SNAPSHOT_ROW
        for i in range(n_segments):
            number, root, end, link, sealed, count = struct.unpack_from(
                "<6Q", body, i * SNAPSHOT_ROW
            )
            hashes, rows = split_entries(body[at : at + count * ENTRY_BYTES], count)
            at += count * ENTRY_BYTES
            segments.append(
                SnapshotSegment(
                    number=number,
                    root=root,
                    end=end,
                    link=link,
                    sealed=bool(sealed),
                    hashes=hashes,
                    rows=rows,
                )
            )
        return cls(epoch=epoch, namespace=namespace, sequence=sequence, segments=tuple(segments))


def _sum_of(head: bytes, body: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(body)
    return digest.intdigest()
