"""What lies on media proves itself: one wrong byte, and it is not read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.blocks import HASH_BYTES
from tierkv_backends.nvme.format import (
    ENTRY_BYTES,
    EXTENT_FIXED,
    PAGE,
    ROW_DTYPE,
    ExtentHeader,
    Rows,
    SegmentHeader,
    Snapshot,
    SnapshotSegment,
    Trailer,
    extent_header_bytes,
    join_entries,
    split_entries,
)

ANY_BYTE = settings(deadline=None, max_examples=60)


def some_rows(n: int) -> tuple[bytes, Rows]:
    rows = np.zeros(n, ROW_DTYPE)
    rows["offset"] = np.arange(n) * 512 + PAGE
    rows["stored_bytes"] = np.arange(n) + 1
    rows["group"] = np.arange(n) % 3
    return np.random.default_rng(n).bytes(n * HASH_BYTES), rows


def flipped(data: bytes, position: int, bit: int) -> bytes:
    out = bytearray(data)
    out[position % len(data)] ^= 1 << bit
    return bytes(out)


HEADER = SegmentHeader.new(
    alignment=512, number=7, generation=3, epoch=2, nbytes=1 << 20, namespace=b"n" * 32
)


def test_a_header_comes_back_as_it_was_and_every_use_has_a_root_of_its_own() -> None:
    assert SegmentHeader.unpack(HEADER.pack()) == HEADER
    again = SegmentHeader.new(
        alignment=512, number=7, generation=3, epoch=2, nbytes=1 << 20, namespace=b"n" * 32
    )
    assert again.root != HEADER.root
    assert SegmentHeader.unpack(HEADER.pack()[:-1]) is None


@given(position=st.integers(0, 95), bit=st.integers(0, 7))
@ANY_BYTE
def test_a_header_with_a_flipped_bit_is_none(position: int, bit: int) -> None:
    assert SegmentHeader.unpack(flipped(HEADER.pack(), position, bit)) is None


def test_entries_are_records_with_an_offset_behind() -> None:
    hashes, rows = some_rows(5)
    data = join_entries(hashes, rows)
    assert len(data) == 5 * ENTRY_BYTES
    back_hashes, back_rows = split_entries(data, 5)
    assert back_hashes == hashes
    assert (back_rows == rows).all()
    assert data[ENTRY_BYTES : ENTRY_BYTES + 32] == hashes[32:64]


@given(n=st.sampled_from([1, 55, 56, 200]), position=st.integers(0), bit=st.integers(0, 7))
@ANY_BYTE
def test_an_extent_header_with_a_flipped_bit_is_not_believed(
    n: int, position: int, bit: int
) -> None:
    hashes, rows = some_rows(n)
    header = ExtentHeader(
        generation=3, sequence=9, nonce=5, link=1, start=PAGE, nbytes=1 << 16, n=n
    )
    data, link = header.pack(join_entries(hashes, rows))
    assert len(data) == extent_header_bytes(n)
    parsed = ExtentHeader.unpack_fixed(data)
    assert parsed == (header, link)
    assert parsed[0].entries_in(data, link) == join_entries(hashes, rows)
    bad = flipped(data, position % (EXTENT_FIXED + n * ENTRY_BYTES), bit)
    again = ExtentHeader.unpack_fixed(bad)
    assert again is None or again[0].entries_in(bad, again[1]) is None


@given(position=st.integers(0, 63), bit=st.integers(0, 7))
@ANY_BYTE
def test_a_trailer_with_a_flipped_bit_is_none(position: int, bit: int) -> None:
    trailer = Trailer(generation=1, root=2, sequence=3, n=4, end=5, footer_sum=6)
    assert Trailer.unpack(trailer.pack()) == trailer
    assert Trailer.unpack(flipped(trailer.pack(), position, bit)) is None


def snapshot() -> Snapshot:
    parts = []
    for number in (3, 1, 2):
        hashes, rows = some_rows(number * 2)
        parts.append(
            SnapshotSegment(
                number=number, root=5, end=PAGE, link=6, sealed=number != 1,
                hashes=hashes, rows=rows,
            )
        )  # fmt: skip
    return Snapshot(epoch=4, namespace=b"n" * 32, sequence=77, segments=tuple(parts))


def test_a_snapshot_comes_back_in_its_order() -> None:
    back = Snapshot.unpack(snapshot().pack())
    assert back is not None
    assert (back.epoch, back.sequence, [s.number for s in back.segments]) == (4, 77, [3, 1, 2])
    for ours, theirs in zip(snapshot().segments, back.segments, strict=True):
        assert (ours.hashes, ours.sealed) == (theirs.hashes, theirs.sealed)
        assert (ours.rows == theirs.rows).all()


@given(position=st.integers(0), bit=st.integers(0, 7), cut=st.booleans())
@ANY_BYTE
def test_a_snapshot_with_a_flipped_bit_or_a_cut_is_none(position: int, bit: int, cut: bool) -> None:
    data = snapshot().pack()
    bad = data[: position % len(data)] if cut else flipped(data, position, bit)
    assert Snapshot.unpack(bad) is None


def test_a_link_depends_on_everything_before_it() -> None:
    hashes, rows = some_rows(2)
    entries = join_entries(hashes, rows)
    header = ExtentHeader(
        generation=3, sequence=9, nonce=5, link=1, start=PAGE, nbytes=1 << 16, n=2
    )
    links = {replace(header, **change).pack(entries)[1] for change in (
        {}, {"link": 2}, {"nonce": 6}, {"sequence": 10}, {"generation": 4}
    )}  # fmt: skip
    assert len(links) == 5
