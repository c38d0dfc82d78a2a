"""The worker side over a device: sums made there, a device that hangs, and what `/metrics` says."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from stub import Stub, blocks, full_spec, request
from test_sides import ids
from test_streams import Later

from tierkv import multilinear
from tierkv.connectors.vllm import worker
from tierkv.connectors.vllm.options import Options
from tierkv.errors import ConfigError
from tierkv.record import Algorithm, seeds


def saved(stub: Stub) -> None:
    """A request of six blocks is saved."""
    table = ids(1, 7)
    stub.scheduler.allocated(request("a1", 100), blocks((table,)), 0)
    stub.step({"a1": (100, (table,))})


@pytest.mark.parametrize("later", [False, True])
def test_a_save_brings_the_sums_of_its_blocks_to_the_tier_where_that_is_asked_for(
    later: bool,
) -> None:
    stub = (Later if later else Stub)(full_spec(), device_checksums=True)
    saved(stub)
    if isinstance(stub, Later):
        stub.device.finish()
    stub.step()
    (move,) = stub.storage.moves
    there = [stub.storage.blocks[key] for key in move.keys]
    assert set(move.algorithms.tolist()) == {Algorithm.MULTILINEAR_64}
    assert np.array_equal(move.checksums, multilinear.checksums(there, seeds(move.keys)))
    plain = Stub(full_spec())
    saved(plain)
    plain.step()
    assert not len(plain.storage.moves[0].algorithms)


def test_the_option_is_true_or_false() -> None:
    assert Options.parse({"device_checksums": True}).device_checksums
    with pytest.raises(ConfigError, match="device_checksums is 'yes'; write true or false"):
        Options.parse({"device_checksums": "yes"})


def test_a_shutdown_over_a_device_that_hangs_ends_and_leaves_the_arena(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_HUNG", [])
    stub = Later(full_spec(), close_timeout_s=0.05)
    saved(stub)
    with caplog.at_level(logging.ERROR, "tierkv"):
        stub.worker.shutdown()
    assert "their memory stays taken" in caplog.text
    assert [stub.worker] == worker._HUNG
    assert len(stub.worker._arena.view) > 0, "the device may write there still"
    stub.device.finish()


def test_metrics_say_whether_ram_is_pinned() -> None:
    report = Stub(full_spec()).worker.stats()
    assert report is not None
    assert report.data["pinned"] == 0, "there is no GPU to register it with"
