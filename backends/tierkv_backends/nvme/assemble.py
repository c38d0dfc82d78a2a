"""From what lay in a directory to the table that is served, the second half of opening, and back.

`assemble_sync` blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from tierkv_backends.nvme import quota
from tierkv_backends.nvme.format import Snapshot, SnapshotSegment
from tierkv_backends.nvme.lock import root_lock_sync
from tierkv_backends.nvme.recovery import Found, Recovered, number_of
from tierkv_backends.nvme.store import Store, unusable
from tierkv_backends.nvme.table import Segment, State, Table

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Assembled:
    """A table ready to serve.

    spares: blank segments. active: those that take more extents, one a lane. partial: a segment
    could not be read this time; no snapshot must speak for it.
    """

    table: Table = field(default_factory=Table)
    spares: deque[Segment] = field(default_factory=deque)
    active: list[Segment] = field(default_factory=list)
    partial: bool = False


def assemble_sync(store: Store, recovered: Recovered) -> Assembled:
    """Put recovered blocks into a table, remove what is of no use, and shrink to the quota."""
    out = Assembled()
    out.partial = bool(recovered.unreadable)
    for path in recovered.unreadable:
        out.table.highest = max(out.table.highest, number_of(path) or 0)
    out.table.reserve(sum(len(found.rows) for found in recovered.segments))
    for found in recovered.segments:
        _adopt_sync(store, out, found)
    with unusable(store.options.root):
        _shrink_sync(store, out)
    unsealed = [s for s in out.table.segments.values() if s.state is State.ACTIVE]
    for segment in unsealed[: -store.lanes]:
        segment.state = State.SEALED  # without a footer: the next open walks it again
    out.active = unsealed[-store.lanes :]
    log.info(
        "nvme store %s: %d blocks in %d segments (%s), direct I/O: %s",
        store.directory, len(out.table), len(out.table.segments),
        "snapshot" if recovered.from_snapshot else "footers",
        "yes" if store.files.mode.enabled else f"no ({store.files.mode.reason})",
    )  # fmt: skip
    return out


def _adopt_sync(store: Store, out: Assembled, found: Found) -> None:
    header, nbytes = found.header, store.options.segment_bytes
    out.table.highest = max(out.table.highest, found.number)
    whole = found.size == nbytes and (header is None or header.nbytes == nbytes)
    usable = whole and (header is not None or found.blank)
    if not len(found.rows) and not usable:
        log.info("nvme: removing %s: nothing in it can be read", found.path)
        found.path.unlink(missing_ok=True)
        return
    segment = Segment(
        number=found.number,
        path=found.path,
        nbytes=header.nbytes if header else nbytes,
        alignment=header.alignment if header else store.files.mode.alignment,
        generation=header.generation if header else 0,
        root=header.root if header else 0,
        whole=whole,
    )
    out.table.add(segment)
    if not len(found.rows):
        out.spares.append(segment)
        return
    segment.end, segment.link = found.end, found.link
    segment.state = State.SEALED if found.sealed or not whole else State.ACTIVE
    out.table.adopt(segment, found.hashes, found.rows)
    out.table.touch(segment)


def _shrink_sync(store: Store, out: Assembled) -> None:
    """Give up our coldest segments where the quota became smaller; nothing is promised yet."""
    with root_lock_sync(store.options.root):
        over = quota.excess_sync(store.options.root, store.directory, capacity=store.capacity_bytes)
        coldest = deque(s for s in out.table.segments.values() if s.state is not State.SPARE)
        while over > 0 and (out.spares or coldest):
            segment = out.spares.pop() if out.spares else coldest.popleft()
            log.info("nvme: giving up %s: the root is over its quota", segment.path)
            out.table.drop(segment)
            segment.path.unlink(missing_ok=True)
            over -= segment.nbytes


def snapshot_of(table: Table, store: Store, sequence: int) -> Snapshot:
    """What a clean close leaves of `table` for the next open, coldest segments first."""
    coldest_first = sorted(table.segments.values(), key=lambda s: s.touched)
    rows = [
        SnapshotSegment(
            number=segment.number,
            root=segment.root,
            end=segment.end,
            link=segment.link,
            sealed=segment.state is not State.ACTIVE,
            hashes=segment.hashes[segment.alive].tobytes(),
            rows=segment.rows[segment.alive],
        )
        for segment in coldest_first
        if segment.state is not State.SPARE and segment.live
    ]
    return Snapshot(
        epoch=store.meta.epoch,
        namespace=store.meta.namespace,
        sequence=sequence,
        segments=tuple(rows),
    )
