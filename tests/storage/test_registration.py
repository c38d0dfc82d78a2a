"""Registering the arena with a driver: all of it or nothing, never across a block, and no error
left behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierkv.blocks import slot_bytes
from tierkv.host import HostArena
from tierkv.pinned import Arena
from tierkv.registration import PIECE_BYTES, Registration, piece_ends

MIB, KIB = 1 << 20, 1 << 10


class Driver:
    """Registers what it is asked to, but no piece above `limit` bytes and not the `fails`-th."""

    def __init__(self, *, limit: int = 1 << 60, fails: int = -1, words: str = "invalid") -> None:
        self.limit, self.fails, self.words = limit, fails, words
        self.pieces: dict[int, int] = {}
        self.calls, self.error = 0, ""
        self.stuck = False

    def register(self, address: int, nbytes: int) -> str:
        self.calls += 1
        assert not self.error, "an error of a call before surfaces here"
        if nbytes > self.limit or self.calls == self.fails:
            self.error = self.words
            return self.words
        self.pieces[address] = nbytes
        return ""

    def unregister(self, address: int) -> str:
        assert not self.error, "an error of a call before surfaces here"
        if self.stuck:
            self.error = "not registered"
            return self.error
        del self.pieces[address]
        return ""

    def clear_error(self) -> None:
        self.error = ""


@pytest.fixture
def arena() -> Iterator[Arena]:
    nbytes = 15 * slot_bytes(300 * KIB)  # 4.4 MiB
    with Arena.create(nbytes) as made:
        yield made


def test_case_145_pieces_end_at_ends_of_blocks_and_cover_everything(arena: Arena) -> None:
    driver = Driver(limit=MIB)
    slot = slot_bytes(300 * KIB)
    done = Registration(arena.view, driver, [300 * KIB], piece_bytes=MIB)
    base = np.frombuffer(arena.view, np.uint8).ctypes.data
    assert done.pinned
    assert list(driver.pieces.values()) == [3 * slot] * 5
    assert list(driver.pieces) == [base + 3 * slot * n for n in range(5)]
    assert done.cuts == tuple(3 * slot * n for n in range(1, 5))
    assert done.stats() == {"pinned": True}
    done.close()
    done.close()
    assert not driver.pieces


def test_case_145_when_the_third_piece_fails_the_first_two_go_and_so_does_the_error(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(fails=3, words="out of memory")
    done = Registration(arena.view, driver, [300 * KIB], piece_bytes=MIB)
    assert driver.calls == 3
    assert (driver.pieces, driver.error) == ({}, "")
    assert (done.pinned, done.cuts) == (False, ())
    assert done.stats()["pinned"] is False
    assert "out of memory" in done.stats()["pinned_reason"]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    done.close()


def test_case_147_where_registering_is_not_supported_the_arena_works_all_the_same(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(limit=0, words="operation not supported")
    host = HostArena(arena, [300 * KIB], lambda _: driver)
    for _ in range(3):
        assert host.register_sync(torch.device("cuda")) == ()
    assert driver.calls == 1, "one attempt"
    assert host.stats()["pinned"] is False
    assert "operation not supported" in host.stats()["pinned_reason"]
    assert len(caplog.records) == 1, "one warning"
    host.memory[:4] = torch.tensor([1, 2, 3, 4])
    assert bytes(arena.view[:4]) == b"\1\2\3\4"
    host.unregister_sync()


def test_a_cpu_registers_nothing_and_says_so(arena: Arena) -> None:
    driver = Driver()
    host = HostArena(arena, [300 * KIB], lambda _: driver)
    assert host.register_sync(torch.device("cpu")) == ()
    assert host.stats() == {"pinned": False, "pinned_reason": "no GPU has asked for it"}
    assert not driver.calls
    host.unregister_sync()


def test_a_piece_that_cannot_be_unregistered_leaves_no_error_and_the_others_go(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    done = Registration(arena.view, driver, [300 * KIB], piece_bytes=MIB)
    driver.stuck = True
    done.close()
    assert driver.error == ""
    assert len(caplog.records) == 5
    assert not done.pinned


def test_registering_takes_no_memory_beyond_the_arena(arena: Arena) -> None:
    done = Registration(arena.view, Driver(), [300 * KIB], piece_bytes=MIB)
    arena.view[:] = bytes(len(arena))
    assert os.fstat(arena.fd).st_blocks * 512 <= 1.05 * len(arena)
    done.close()


@given(
    st.integers(1, 5000).map(lambda n: n * 4096),
    st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=4),
    st.integers(4096, 4 * MIB),
)
def test_pieces_cover_the_arena_once_and_split_no_slot_of_a_single_size(
    nbytes: int, block_bytes: list[int], piece_bytes: int
) -> None:
    ends = piece_ends(nbytes, block_bytes, piece_bytes)
    assert ends[-1] == nbytes
    assert ends == sorted(set(ends))
    lengths = np.diff([0, *ends])
    slots = {slot_bytes(n) for n in block_bytes}
    largest = max(piece_bytes, slots.pop() if len(slots) == 1 else 4096)
    assert lengths.max() <= largest
    assert all(end % 4096 == 0 for end in ends)
    if len({slot_bytes(n) for n in block_bytes}) == 1:
        assert all(end % slot_bytes(block_bytes[0]) == 0 for end in ends[:-1])


def test_half_a_tebibyte_is_never_registered_at_once() -> None:
    assert len(piece_ends(512 << 30, [985664, 822272], PIECE_BYTES)) == 8
