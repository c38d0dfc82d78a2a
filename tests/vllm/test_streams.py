"""The worker side over a device whose copies end later: what is told, and when."""

from __future__ import annotations

import threading

import pytest
from stub import Stub, blocks, full_spec, request, window_spec
from test_sides import forget_pinned, hit, ids

from tierkv.blocks import MoveDone, MoveReleased, Outcome, unpack_event
from tierkv.copier import Copier
from tierkv.streams import Queue
from tierkv.testing.fake_device import FakeDevice


class Later(Stub):
    """A stub whose worker copies on a device that runs when a test says so."""

    def __init__(self, *specs: object, **options: object) -> None:
        super().__init__(*specs, **options)
        self.device = FakeDevice(16 << 10)
        self.worker._copier = Copier(self.worker._host.memory, self.device)

    def zeroes_late(self, tables: tuple[list[int], ...]) -> None:
        """The engine launches the zeroing of blocks that it gave away."""
        names = [t.layers for t in self.config.kv_cache_tensors]

        def work() -> None:
            for layers, table in zip(names, tables, strict=True):
                for name in layers:
                    self.caches[name][[b for b in table if b]] = 0

        self.device.run(Queue.ENGINE, work)


def test_a_save_is_promised_and_sent_to_the_tier_once_its_bytes_are_in_the_arena() -> None:
    stub = Later()
    made, table = request("a1", 100), ids(1, 7)
    expected = [stub.page_bytes(0, b) for b in ids(1, 6)]
    stub.scheduler.allocated(made, blocks((table,)), 0)
    stub.step({"a1": (100, (table,))})
    for tensor in stub.caches.values():  # the next step reuses the pages, on the engine's stream
        stub.device.run(Queue.ENGINE, tensor.zero_)
    while stub.device.step(Queue.ENGINE) or stub.device.step(Queue.GATHER):
        pass
    stub.step()
    assert not stub.storage.moves, "the bytes are in staging"
    assert stub.scheduler.matched_tokens(request("a2", 100), 0) == (None, False)
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 6
    assert stub.scheduler.pending()
    stub.device.finish()
    stub.step()
    assert list(stub.storage.blocks.values()) == expected
    assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (96, True)
    assert stub.worker.counters["copied_out_bytes"] == len(b"".join(expected))


@pytest.mark.parametrize("from_tier", [False, True])
def test_case_083_a_load_outlives_a_late_zeroing_and_is_reported_when_it_has_ended(
    from_tier: bool,
) -> None:
    stub = Later(full_spec(), window_spec())
    stub.scheduler.allocated(made := request("a1", 100), blocks((ids(1, 7), ids(11, 7))), 0)
    stub.step({"a1": (made.num_tokens, (ids(1, 7), ids(11, 7)))})
    stub.device.finish()
    stub.step()
    stub.step()
    before = [stub.page_bytes(0, b) for b in ids(1, 6)], [stub.page_bytes(1, b) for b in (15, 16)]
    if from_tier:
        forget_pinned(stub)
    tables = (ids(21, 7), [0, 0, 0, 0, *ids(31, 3)])
    stub.zeroes_late(tables)
    assert hit(stub, "a2", 100, tables) == 96
    _, results = stub.step()
    assert not results.finished_recving
    leased = stub.scheduler.ledger.stats()["leased_blocks"]
    assert leased > 0
    while stub.device.step(Queue.IN) or stub.device.step(Queue.SCATTER):
        pass
    _, results = stub.step()
    assert not results.finished_recving
    assert stub.scheduler.ledger.stats()["leased_blocks"] == leased
    stub.device.finish([Queue.IN, Queue.SCATTER, Queue.ENGINE])
    _, results = stub.step()
    assert results.finished_recving == {"a2"}
    assert not results.failed_recving
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 0
    assert [stub.page_bytes(0, b) for b in ids(21, 6)] == before[0]
    assert [stub.page_bytes(1, b) for b in (31, 32)] == before[1]


@pytest.mark.parametrize("url", ["", "memory://"])
def test_saves_that_queue_up_too_long_are_declined_and_leave_nothing_behind(url: str) -> None:
    stub = Later(url=url)
    stub.worker._copier = Copier(stub.worker._host.memory, stub.device, backlog_bytes=1)
    for name, first in (("a1", 1), ("b1", 11)):
        made = request(name, 100)
        stub.scheduler.allocated(made, blocks((ids(first, 7),)), 0)
        stub.step({name: (100, (ids(first, 7),))})
    stats = stub.scheduler.ledger.stats()
    assert stats["declined_blocks"] == 6
    assert stats["failed_save_blocks"] == 0, "no tier was asked"
    assert stats["leased_blocks"] == 6, "of the first alone"
    stub.device.finish()
    stub.step()
    stub.step()
    assert stub.scheduler.matched_tokens(request("a2", 100), 0) == (96, True)
    assert stub.scheduler.matched_tokens(request("b2", 100), 0) == (0, False)


def test_a_release_is_told_after_the_answer_that_it_belongs_to() -> None:
    stub = Later()
    stub.compute(request("a1", 100), (ids(1, 7),))
    stub.device.finish()
    stub.step()
    stub.step()
    forget_pinned(stub)
    stub.storage.silent = True
    hit(stub, "a2", 100, (ids(21, 7),))
    stub.step()
    [load] = [m for m in stub.storage.moves if m.from_tier.any()]
    outcomes = stub.storage.carry_out(load)
    outcomes[-1] = Outcome.TIMED_OUT
    stub.storage.events += [MoveDone(load.id, outcomes, released=False), MoveReleased(load.id)]
    stub.worker.results()
    assert stub.worker.events() is None
    stub.device.finish()
    stub.worker.results()
    report = stub.worker.events()
    assert report is not None
    [done, released] = [unpack_event(e) for e in report.by_rank[0]]
    assert (type(done), type(released)) == (MoveDone, MoveReleased)
    stub.scheduler.apply(report)
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 0


def test_a_shutdown_waits_for_copies_and_sends_their_saves_on() -> None:
    stub = Later()
    table = ids(1, 7)
    stub.scheduler.allocated(request("a1", 100), blocks((table,)), 0)
    stub.step({"a1": (100, (table,))})
    expected = [stub.page_bytes(0, b) for b in table[:6]]
    ending = threading.Thread(target=stub.worker.shutdown)
    ending.start()
    while ending.is_alive():
        stub.device.finish()
        ending.join(0.01)
    assert list(stub.storage.blocks.values()) == expected
    stub.worker.shutdown()
