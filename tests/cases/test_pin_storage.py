"""Cases of kind PIN that the arena answers: the size it should be, or a clear error."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tierkv import pinned
from tierkv.blocks import Keys
from tierkv.errors import CapacityError, StoreUnusableError
from tierkv.pinned import Arena
from tierkv.record import blank, seal_sync, verify_sync
from tierkv.testing import make_key

MIB = 1 << 20


def test_case_151_who_joins_too_late_gets_an_error_and_never_a_fresh_empty_region() -> None:
    arena = Arena.create(MIB)
    fd = os.dup(arena.fd)
    arena.close()
    os.close(fd)
    with pytest.raises(StoreUnusableError, match="gone"):
        Arena.attach(fd, MIB)
    empty = os.memfd_create("other")  # the descriptor's number was used for something else
    with pytest.raises(StoreUnusableError, match=f"holds 0 bytes where {MIB}"):
        Arena.attach(empty, MIB)
    os.close(empty)


def test_case_151_a_payload_of_zeros_never_verifies_as_a_block() -> None:
    keys = Keys.of([make_key(1)])
    zeros = [memoryview(bytes(4096))]
    assert not verify_sync(keys, blank(1), zeros).any()
    sealed = seal_sync(keys, [memoryview(os.urandom(4096))])
    assert not verify_sync(keys, sealed, zeros).any()


def test_case_152_more_than_there_is_fails_at_open_with_needed_and_free_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CapacityError, match=rf"needs {1 << 50} bytes of RAM but only \d+ are free"):
        Arena.create(1 << 50)
    monkeypatch.setattr(pinned, "available_bytes", lambda: 1 << 60)
    with pytest.raises(CapacityError, match="refuses"):
        Arena.create(1 << 59)


ATTACH = """
import sys, os
from tierkv.pinned import Arena
fd, nbytes, rank = map(int, sys.argv[1:])
for _ in range(20):
    with Arena.attach(os.dup(fd), nbytes) as arena:
        arena.view[4096 * rank] += 1
"""


def test_case_153_four_processes_map_one_region_at_once_twenty_times() -> None:
    with Arena.create(MIB) as arena:
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", ATTACH, str(arena.fd), str(MIB), str(rank)],
                pass_fds=(arena.fd,),
            )
            for rank in range(4)
        ]
        assert [w.wait(60) for w in workers] == [0] * 4
        counts = np.frombuffer(arena.view, np.uint8)[: 4 * 4096 : 4096].tolist()
        assert counts == [20] * 4
