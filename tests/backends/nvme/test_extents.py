"""Where a segment says that it has room for a block, an extent for it is planned, and fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierkv_backends.nvme.format import PAGE, end_bytes, single_extent_bytes
from tierkv_backends.nvme.table import Segment
from tierkv_backends.nvme.transfer import plan_extents


@given(
    st.integers(0, 400),
    st.integers(0, 8),
    st.lists(st.integers(1, 9000), min_size=1, max_size=80),
    st.sampled_from([512, 4096]),
)
def test_room_for_one_block_is_room_for_its_extent(
    count: int, left: int, sizes: list[int], alignment: int
) -> None:
    segment = Segment(number=1, path=Path("x"), nbytes=1 << 19, alignment=alignment)
    segment.count = count
    segment.end = segment.room(1, end=0) // PAGE * PAGE - left * PAGE
    padded = -(-np.array(sizes, np.int64) // alignment) * alignment
    extents = plan_extents(padded, segment, 2)
    if segment.room(1) >= single_extent_bytes(sizes[0]):
        assert extents
    blocks = extents[-1].last if extents else 0
    end = extents[-1].start + extents[-1].nbytes if extents else segment.end
    if extents:
        assert end + end_bytes(count + blocks, alignment) + PAGE <= segment.nbytes
