"""Frames survive any chopping, and garbage is noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.blocks import (
    Appraise,
    Keys,
    Move,
    MoveDone,
    MoveKind,
    MoveReleased,
    Recovered,
    Retire,
    TierDown,
    pack_event,
    unpack_event,
)
from tierkv.keeper.wire import MAX_FRAME_BYTES, FrameReader, encode
from tierkv.testing import make_key, make_move

VALUES = st.one_of(st.integers(-(2**31), 2**63 - 1), st.binary(max_size=300), st.text(max_size=20))
MESSAGES = st.lists(st.lists(VALUES, min_size=1, max_size=4).map(tuple), max_size=5)


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 200), min_size=1, max_size=30))
@settings(deadline=None)
def test_messages_come_out_as_they_went_in_whatever_the_pieces(
    frames: list[list[tuple[Any, ...]]], pieces: list[int]
) -> None:
    stream = b"".join(encode(messages) for messages in frames)
    reader = FrameReader()
    got: list[list[Any]] = []
    at = turn = 0
    while at < len(stream):
        size = pieces[turn % len(pieces)]
        got += reader.feed(stream[at : at + size])
        at += size
        turn += 1
    assert [tuple(m) for m in got] == [m for messages in frames for m in messages]


@pytest.mark.parametrize(
    "garbage",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x01\0\0\0\xc1",
        b"\x01\0\0\0\x07",
    ],
)
def test_garbage_is_an_error_and_not_a_message(garbage: bytes) -> None:
    with pytest.raises(ValueError):
        FrameReader().feed(garbage)


def test_moves_and_events_cross_the_wire_whole() -> None:
    keys = [make_key(n, n % 3) for n in range(5)]
    move = make_move(
        MoveKind.LOAD,
        keys,
        move_id=9,
        offsets=[4096 * n for n in range(5)],
        block_ids=range(5),
        from_tier=[True, False, True, True, False],
        epoch=4,
    )
    events = [
        MoveDone(9, np.array([0, 1, 5], np.uint8), released=False),
        MoveReleased(9),
        Retire(1 << 40, Keys.of(keys)),
        Appraise(1 << 41, Keys.of(keys)),
        Recovered(Keys.of(keys), 4),
        TierDown("why"),
    ]
    (first, *rest) = FrameReader().feed(
        encode([("move", *move.pack()), *(("event", pack_event(e)) for e in events)])
    )
    assert Move.unpack(tuple(first[1:])).pack() == move.pack()
    assert [pack_event(unpack_event(m[1])) for m in rest] == [pack_event(e) for e in events]
