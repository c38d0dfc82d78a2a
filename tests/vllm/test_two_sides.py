"""One scheduler side and the worker sides of two ranks that share neither memory nor tier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stub import (
    DictStorage,
    Stub,
    blocks,
    caches,
    full_spec,
    no_states,
    request,
    window_spec,
)

from tierkv.blocks import MoveDone, Outcome
from tierkv.connectors.vllm.layout import worker_pages
from tierkv.connectors.vllm.scheduler import SchedulerSide
from tierkv.connectors.vllm.wire import StepMetadata, WorkerEvents
from tierkv.connectors.vllm.worker import WorkerSide
from tierkv.device import Pages
from tierkv.storage import StorageConfig

TABLE = list(range(1, 8))
OTHER = list(range(31, 38))


class TwoRanks(Stub):
    """The ranks share nothing: they might be on two nodes."""

    def __init__(self, *specs: Any, pinned: tuple[int, int] = (1 << 20, 1 << 19)) -> None:
        super().__init__(*specs)
        self.workers = [self.start_rank(rank, nbytes) for rank, nbytes in enumerate(pinned)]
        self.results: list[Any] = []
        self.scheduler = SchedulerSide(self.options, self.config, 2)
        shakes = [w.handshake(no_states(self.config)) for w in self.workers]
        self.scheduler.start(dict(enumerate(shakes)))

    def start_rank(self, rank: int, arena_bytes: int) -> WorkerSide:
        pages = Pages(self.layout, worker_pages(self.config, self.layout, caches(self.config)))
        storage = StorageConfig(
            url="memory://",
            namespace=bytes([rank]) * 32,
            namespace_text=f"rank {rank}",
            arena_bytes=arena_bytes,
            block_bytes=self.layout.block_bytes,
            rank=rank,
        )
        return WorkerSide(self.options, self.layout, pages, storage, DictStorage)

    def storage_of(self, rank: int) -> DictStorage:
        storage = self.workers[rank].storage
        assert isinstance(storage, DictStorage)
        return storage

    def step(
        self, running: dict[str, tuple[int, tuple[list[int], ...]]] | None = None
    ) -> tuple[StepMetadata, Any]:
        running = running or {}
        self.scheduler.bind_tables(
            lambda name: [[SimpleNamespace(block_id=i) for i in ids] for ids in running[name][1]]
        )
        output = SimpleNamespace(
            num_scheduled_tokens={name: tokens for name, (tokens, _) in running.items()}
        )
        step = self.scheduler.step_metadata(output)
        self.results, told = [], WorkerEvents({})
        for worker in self.workers:
            worker.load(step)
            worker.save(step)
            self.results.append(worker.results())
            told = told.aggregate(worker.events() or WorkerEvents({}))
        self.scheduler.apply(told)
        return step, self.results

    def hit(self, name: str) -> int:
        """Look a new request up and let it load; the hit's tokens."""
        made = request(name, 100)
        found, _ = self.scheduler.matched_tokens(made, 0)
        tables = tuple(OTHER for _ in self.layout.groups)
        self.scheduler.allocated(made, blocks(tables), found or 0)
        return found or 0

    def forget_pinned(self) -> None:
        """Evict everything from pinned RAM."""
        while self.scheduler.ledger._books.room._evict_one():
            pass


def test_case_116_ranks_share_no_memory_and_fit_the_smallest_of_their_own() -> None:
    two = TwoRanks()
    two.compute(request("a1", 100), (TABLE,))
    sizes = [len(w._arena) for w in two.workers]
    assert sizes == [1 << 20, 1 << 19]
    assert two.scheduler.ledger.stats()["pinned_capacity_bytes"] == 1 << 19
    stored = [set(two.storage_of(rank).blocks.values()) for rank in (0, 1)]
    assert [len(s) for s in stored] == [6, 6]
    assert not stored[0] & stored[1]  # each its own bytes
    assert two.hit("a2") == 96
    two.step()
    assert [r.finished_recving for r in two.results] == [{"a2"}, {"a2"}]
    assert not any(r.failed_recving for r in two.results)


def test_case_116_what_one_rank_declines_is_no_hole_but_a_shorter_hit() -> None:
    two = TwoRanks()
    made = request("a1", 100)
    two.storage_of(1).outcomes[made.block_hashes[3]] = Outcome.DECLINED
    two.compute(made, (TABLE,))
    two.forget_pinned()
    assert two.scheduler.ledger.stats()["tier_blocks"] == 5
    assert two.hit("a2") == 48
    two.step()
    assert not any(r.failed_recving for r in two.results)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("specs", [(full_spec(),), (full_spec(), window_spec())])
def test_case_116_a_load_that_fails_on_one_rank_has_a_channel_and_is_not_promised_again(
    specs: tuple[Any, ...], bad: int
) -> None:
    two = TwoRanks(*specs)
    made = request("a1", 100)
    two.compute(made, tuple(TABLE for _ in specs))
    two.forget_pinned()
    two.storage_of(bad).outcomes[made.block_hashes[4]] = Outcome.CORRUPT
    assert two.hit("a2") == 96
    two.step()
    assert [r.finished_recving for r in two.results] == [{"a2"}, {"a2"}]
    assert two.scheduler._stats._own == {"failed_tokens": 96}  # whichever rank reports first
    failed = [w.failed_block_ids() for w in two.workers]
    if len(specs) == 1:
        assert failed[bad] == {OTHER[4]}
        assert failed[1 - bad] == set()
    else:
        assert two.results[bad].failed_recving == {"a2"}
        assert not two.results[1 - bad].failed_recving
    two.scheduler.finished("a2")
    two.step()
    stats = two.scheduler.ledger.stats()
    assert stats["leased_blocks"] == stats["moves_in_flight"] == 0
    two.forget_pinned()
    assert two.hit("a3") == 64


def test_case_119_a_request_waits_until_the_slower_rank_has_its_load() -> None:
    two = TwoRanks()
    two.compute(request("a1", 100), (TABLE,))
    two.forget_pinned()
    slow = two.storage_of(1)
    slow.silent = True
    assert two.hit("a2") == 96
    two.step()
    assert [r.finished_recving for r in two.results] == [{"a2"}, set()]
    assert two.scheduler.pending()
    assert two.scheduler.ledger.stats()["leased_blocks"] == 6
    load = slow.moves[-1]
    slow.events.append(MoveDone(load.id, slow.carry_out(load)))
    two.step()
    assert [r.finished_recving for r in two.results] == [set(), {"a2"}]
    two.step()
    assert two.scheduler.ledger.stats()["leased_blocks"] == 0
    assert not two.scheduler.pending()
