"""Reading a directory at open: meta, snapshot, footers, chains of extents. Changes nothing."""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.blocks import Keys
from tierkv.record import Records, blank, verify_sync
from tierkv_backends.nvme.files import (
    close_fd_sync,
    open_quiet_sync,
    pread_exactly_sync,
    read_exactly_sync,
    read_file_sync,
)
from tierkv_backends.nvme.format import (
    ENTRY_BYTES,
    EXTENT_FIXED,
    FORMAT_VERSION,
    PAGE,
    ROW_DTYPE,
    ExtentHeader,
    Rows,
    SegmentHeader,
    Snapshot,
    SnapshotSegment,
    Trailer,
    end_bytes,
    round_up,
    split_entries,
)
from tierkv_backends.nvme.quota import META_NAME, SNAPSHOT_NAME, segment_paths_sync

log = logging.getLogger(__name__)

_FIRST_READ: Final = PAGE
"""An extent of up to 55 blocks has its whole header in its first page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What ``meta.json`` says."""

    namespace: bytes
    namespace_text: str
    rank: int
    data_parallel_rank: int
    epoch: int

    def pack(self) -> bytes:
        """The file's bytes. ``sum`` proves them: a wrong epoch brings back what was cleared."""
        fields = {
            "format": FORMAT_VERSION,
            "namespace": self.namespace.hex(),
            "text": self.namespace_text,
            "rank": self.rank,
            "data_parallel_rank": self.data_parallel_rank,
            "epoch": self.epoch,
        }
        return (json.dumps({**fields, "sum": _sum_of(fields)}, indent=1) + "\n").encode()

    @classmethod
    def read_sync(cls, directory: Path) -> Meta | None:
        """None where there is none that this version can read."""
        try:
            data: Any = json.loads(read_file_sync(directory / META_NAME))
            if data["format"] != FORMAT_VERSION or data.pop("sum") != _sum_of(data):
                return None
            return cls(
                namespace=bytes.fromhex(data["namespace"]),
                namespace_text=str(data["text"]),
                rank=int(data["rank"]),
                data_parallel_rank=int(data["data_parallel_rank"]),
                epoch=int(data["epoch"]),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def has_other_format_sync(directory: Path) -> bool:
    """Whether ``meta.json`` is there, can be read, and is of another version than this one."""
    try:
        data: Any = json.loads(read_file_sync(directory / META_NAME))
    except (FileNotFoundError, ValueError):
        return False
    version = data.get("format") if isinstance(data, dict) else None
    return isinstance(version, int) and version != FORMAT_VERSION


def _sum_of(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True)
    return f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"


@dataclass(slots=True, kw_only=True)
class Found:
    """One segment file as it lies there. header: None where it does not prove right.

    rows, hashes: its blocks. end, link: where and how the chain goes on. sealed: nothing may be
    appended. size: bytes of the file.
    """

    path: Path
    number: int
    size: int
    header: SegmentHeader | None = None
    blank: bool = False
    sequence: int = 0
    hashes: bytes = b""
    rows: Rows = field(default_factory=lambda: np.empty(0, ROW_DTYPE))
    end: int = PAGE
    link: int = 0
    sealed: bool = False


@dataclass(slots=True, kw_only=True)
class Recovered:
    """Everything in a directory. segments: coldest first. unreadable: files that gave an error."""

    sequence: int = 0
    segments: list[Found] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    from_snapshot: bool = False


class Last(enum.Enum):
    """What to make of a segment's last extent, which may not all have reached the disk."""

    AS_LISTED = "as listed"
    """Its payload is not read."""
    UNCUT = "uncut"
    """Without the end that a kill cut off: all up to the last block that proves right."""
    PROVEN = "proven"
    """Only blocks that prove right; power that failed may leave out any part of a write."""


def recover_sync(directory: Path, meta: Meta, *, last: Last = Last.AS_LISTED) -> Recovered:
    """Read what `directory` holds of the epoch that `meta` names.

    No payload is read but that of one extent for each segment that was being written, where `last`
    asks for it.
    """
    found = Recovered()
    snapshot = _snapshot_sync(directory, meta)
    known = {s.number: s for s in snapshot.segments} if snapshot else {}
    order = {number: i for i, number in enumerate(known)}
    for path in segment_paths_sync(directory):
        try:
            segment = _segment_sync(path, meta, known if snapshot else None, last)
        except OSError as exc:
            log.warning("nvme: %s cannot be read at open: %s", path, exc)
            found.unreadable.append(path)
            continue
        if segment is not None:
            found.segments.append(segment)
    found.segments.sort(key=lambda s: (order.get(s.number, -1), s.sequence, s.number))
    found.sequence = max([s.sequence for s in found.segments], default=0)
    if snapshot:
        found.from_snapshot = True
        found.sequence = max(found.sequence, snapshot.sequence)
    return found


def number_of(path: Path) -> int | None:
    """The number in a segment's name."""
    digits = path.stem.removeprefix("seg-")
    return int(digits) if digits.isdecimal() else None


def _snapshot_sync(directory: Path, meta: Meta) -> Snapshot | None:
    try:
        snapshot = Snapshot.unpack(read_file_sync(directory / SNAPSHOT_NAME))
    except FileNotFoundError:
        return None
    except OSError as exc:
        log.warning("nvme: the snapshot of %s cannot be read: %s", directory, exc)
        return None
    if snapshot is None:
        log.warning("nvme: the snapshot of %s does not prove right; reading footers", directory)
    elif (snapshot.epoch, snapshot.namespace) != (meta.epoch, meta.namespace):
        return None
    return snapshot


def _segment_sync(
    path: Path, meta: Meta, known: dict[int, SnapshotSegment] | None, last: Last
) -> Found | None:
    number = number_of(path)
    if number is None:
        log.info("nvme: %s is no segment of ours; left alone", path)
        return None
    (page,) = read_exactly_sync(path, [(0, PAGE)])
    found = Found(path=path, number=number, size=path.stat().st_size)
    header = found.header = SegmentHeader.unpack(page)
    if header is None:
        found.blank = not any(page)  # also where it was just made, with no bytes yet
        return found
    if header.epoch != meta.epoch or header.namespace != meta.namespace:
        return found
    if header.number != number:  # a copy or a renamed file: its blocks are where it came from
        return found
    if known is not None:
        _take_snapshot(found, header, known.get(number))
    elif not _take_footer_sync(found, header):
        _take_chain_sync(found, header, last)
    _drop_out_of_range(found)
    return found


def _take_snapshot(found: Found, header: SegmentHeader, row: SnapshotSegment | None) -> None:
    """A segment that the snapshot does not know, or knew in another use, holds nothing."""
    if row is None or row.root != header.root:
        return
    found.hashes, found.rows = row.hashes, row.rows
    found.end, found.link, found.sealed = row.end, row.link, row.sealed


def _take_footer_sync(found: Found, header: SegmentHeader) -> bool:
    (page,) = read_exactly_sync(found.path, [(header.nbytes - PAGE, PAGE)])
    trailer = Trailer.unpack(page)
    if trailer is None or (trailer.generation, trailer.root) != (header.generation, header.root):
        return False
    footer_bytes = trailer.n * ENTRY_BYTES
    start = header.nbytes - PAGE - round_up(footer_bytes, header.alignment)
    if start < PAGE:
        return False
    (footer,) = read_exactly_sync(found.path, [(start, footer_bytes)])
    if xxhash.xxh3_64_intdigest(footer) != trailer.footer_sum:
        log.warning("nvme: the footer of %s does not prove right; walking it", found.path)
        return False
    found.hashes, found.rows = split_entries(footer, trailer.n)
    found.end, found.sealed, found.sequence = trailer.end, True, trailer.sequence
    return True


def _take_chain_sync(found: Found, header: SegmentHeader, last: Last) -> None:
    found.link = header.root
    hashes, rows = [], []
    fd = open_quiet_sync(found.path)
    try:
        for extent, link, entries in walk_sync(fd, header):
            some_hashes, some_rows = split_entries(entries, extent.n)
            hashes.append(some_hashes)
            rows.append(some_rows)
            found.end, found.link = extent.start + extent.nbytes, link
            found.sequence = extent.sequence
        if last is not Last.AS_LISTED and rows:
            good = _good_sync(fd, hashes[-1], rows[-1])
            if last is Last.UNCUT:
                good = np.arange(len(good)) <= np.flatnonzero(good).max(initial=-1)
            if not good.all():
                log.warning("nvme: %d blocks did not reach %s", int((~good).sum()), found.path)
                hashes[-1] = np.frombuffer(hashes[-1], "V32")[good].tobytes()
                rows[-1] = rows[-1][good]
                found.sealed = True  # once it is not the last, nobody would prove it again
    finally:
        close_fd_sync(fd)
    found.hashes = b"".join(hashes)
    found.rows = np.concatenate(rows) if rows else found.rows


def _good_sync(fd: int, hashes: bytes, rows: Rows) -> NDArray[np.bool_]:
    """bool[n]: which blocks of an extent prove right; all of them where it cannot be read."""
    start = int(rows["offset"].min())
    end = int((rows["offset"] + rows["stored_bytes"]).max())
    try:
        data = memoryview(pread_exactly_sync(fd, end - start, start))
    except OSError as exc:
        log.warning("nvme: the last extent of a segment cannot be read at open: %s", exc)
        return np.ones(len(rows), np.bool_)
    records = records_of(hashes, rows)
    firsts = (rows["offset"] - start).tolist()
    payloads = [
        data[first : first + n]
        for first, n in zip(firsts, rows["stored_bytes"].tolist(), strict=True)
    ]
    return verify_sync(Keys(rows["group"].astype(np.uint16), hashes), records, payloads)


def records_of(hashes: bytes, rows: Rows) -> Records:
    """The records of blocks, as they were when they were saved."""
    records = blank(len(rows))
    records["hash"] = np.frombuffer(hashes, records.dtype["hash"])
    for name in ROW_DTYPE.names or ():
        if name != "offset":
            records[name] = rows[name]
    return records


def walk_sync(fd: int, header: SegmentHeader) -> Iterator[tuple[ExtentHeader, int, bytes]]:
    """(header, link, entries) of each extent, until the chain ends."""
    at, link, sequence = PAGE, header.root, 0
    while at + PAGE <= header.nbytes:
        data = pread_exactly_sync(fd, _FIRST_READ, at)
        parsed = ExtentHeader.unpack_fixed(data)
        if parsed is None:
            return
        extent, claimed = parsed
        if (extent.generation, extent.link, extent.start) != (header.generation, link, at):
            return
        end = EXTENT_FIXED + extent.n * ENTRY_BYTES
        if extent.sequence <= sequence or at + max(extent.nbytes, end) > header.nbytes:
            return
        if end > len(data):
            data += pread_exactly_sync(fd, end - len(data), at + len(data))
        entries = extent.entries_in(data, claimed)
        if entries is None or extent.nbytes % PAGE or extent.nbytes < end:
            return
        yield extent, claimed, entries
        at, link, sequence = at + extent.nbytes, claimed, extent.sequence


def _drop_out_of_range(found: Found) -> None:
    """Forget blocks beyond the file's end: it was truncated."""
    header = found.header
    if header is None or not len(found.rows):
        return
    limit = min(found.size, header.nbytes - end_bytes(0, header.alignment))
    rows = found.rows
    inside = rows["offset"] + rows["stored_bytes"] <= limit
    if not inside.all():
        log.warning(
            "nvme: %s is cut short; %d blocks in it are gone", found.path, int((~inside).sum())
        )
        table = np.frombuffer(found.hashes, "V32")
        found.rows, found.hashes = rows[inside], table[inside].tobytes()
        found.sealed = True
