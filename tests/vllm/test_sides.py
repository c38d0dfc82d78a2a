"""Scheduler side and worker side together, step by step, without an engine."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from stub import BLOCK, Stub, blocks, full_spec, request, window_spec

from tierkv.blocks import Appraise, Keys, MoveDone, Outcome, Retire
from tierkv.connectors.vllm.wire import Handshake, StepMetadata, WorkerEvents, pack_command
from tierkv.ledger import Agree, Appraised, Rotate


def ids(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def hit(stub: Stub, name: str, tokens: int, tables: tuple[list[int], ...]) -> int:
    """Look a new request up and let it load; the hit's tokens."""
    made = request(name, tokens)
    found, asynchronous = stub.scheduler.matched_tokens(made, 0)
    assert asynchronous == bool(found)
    stub.scheduler.allocated(made, blocks(tables), found or 0)
    return found or 0


def test_a_saved_prompt_is_loaded_into_other_pages_byte_for_byte() -> None:
    stub = Stub(full_spec(), window_spec())
    stub.compute(request("a1", 100), (ids(1, 7), ids(11, 7)))
    before = [stub.page_bytes(0, b) for b in ids(1, 6)], [stub.page_bytes(1, b) for b in (15, 16)]
    assert hit(stub, "a2", 100, (ids(21, 7), [0, 0, 0, 0, *ids(31, 3)])) == 96
    _, results = stub.step()
    assert results.finished_recving == {"a2"}
    assert not results.failed_recving
    assert [stub.page_bytes(0, b) for b in ids(21, 6)] == before[0]
    assert [stub.page_bytes(1, b) for b in (31, 32)] == before[1]


def test_what_was_evicted_from_pinned_memory_comes_from_the_tier() -> None:
    stub = Stub(pinned=16 * 4096)
    stub.compute(request("a1", 100), (ids(1, 7),))
    before = [stub.page_bytes(0, b) for b in ids(1, 6)]
    for n, name in enumerate("bcd"):
        stub.compute(request(name, 100), (ids(10 + 7 * n, 7),))
    assert hit(stub, "a2", 100, (ids(41, 7),)) == 96
    stub.step()
    assert stub.scheduler.ledger.stats()["loaded_blocks"] > 0
    assert [stub.page_bytes(0, b) for b in ids(41, 6)] == before


def test_padding_and_memory_without_layers_are_not_counted() -> None:
    padded = full_spec(page_size_padded=3 * full_spec().page_size_bytes)
    stub = Stub(padded)
    stub.config.kv_cache_tensors.append(
        SimpleNamespace(size=1 << 20, layers=[], layer_stride=0, block_stride=0)
    )
    assert stub.layout.block_bytes == (2 * full_spec().page_size_bytes,)


@pytest.mark.parametrize("specs", [(full_spec(),), (full_spec(), window_spec()), (window_spec(),)])
def test_a_failed_load_goes_out_on_the_channel_of_its_layout(
    specs: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    stub = Stub(*specs, pinned=1 << 20)
    first = request("a1", 100)
    tables = tuple(ids(1 + 10 * g, 7) for g in range(len(specs)))
    stub.compute(first, tables)
    stub.scheduler.ledger.apply(0, MoveDone(-1, np.empty(0, np.uint8)))  # unknown: ignored
    forget_pinned(stub)
    stub.storage.outcomes[first.block_hashes[4]] = Outcome.CORRUPT
    loading = tuple(ids(31 + 10 * g, 7) for g in range(len(specs)))
    hit(stub, "a2", 100, loading)
    _, results = stub.step()
    failed_ids = stub.worker.failed_block_ids()
    if len(specs) == 1 and specs[0] == full_spec():
        assert failed_ids == {loading[0][4]}
        assert not results.failed_recving
    else:
        assert failed_ids == set()
        assert results.failed_recving == {"a2"}
    assert results.finished_recving == {"a2"}
    assert stub.worker.counters["failed_loads"] == 1
    lines = [r for r in caplog.records if "could not be loaded (CORRUPT)" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].levelno == logging.WARNING


def forget_pinned(stub: Stub) -> None:
    """Evict everything from pinned RAM by saving something else as large."""
    room = stub.scheduler.ledger._books.room
    while room._evict_one():
        pass


def test_a_load_without_an_answer_is_given_up_and_its_late_answer_touches_no_page() -> None:
    stub = Stub(load_timeout_s=1e-9)
    stub.compute(request("a1", 100), (ids(1, 7),))
    forget_pinned(stub)
    stub.storage.silent = True
    hit(stub, "a2", 100, (ids(31, 7),))
    _, results = stub.step()
    assert results.finished_recving == {"a2"}
    assert stub.worker.failed_block_ids() == set(ids(31, 6))
    before = [stub.page_bytes(0, b) for b in ids(31, 6)]
    [load] = [m for m in stub.storage.moves if m.from_tier.any()]
    stub.storage.events.append(MoveDone(load.id, stub.storage.carry_out(load)))
    _, results = stub.step()
    assert not results.finished_recving
    assert [stub.page_bytes(0, b) for b in ids(31, 6)] == before
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 0


def test_case_022_requests_with_adapters_are_neither_saved_nor_loaded() -> None:
    stub = Stub()
    assert not stub.compute(request("a1", 100, lora="A"), (ids(1, 7),)).saves
    stub.compute(request("a2", 100), (ids(1, 7),))
    assert stub.scheduler.matched_tokens(request("a3", 100, lora="A"), 0) == (0, False)


def test_case_044_048_a_prompt_in_small_steps_is_saved_whole() -> None:
    stub = Stub(full_spec(), window_spec())
    made = request("a1", 217 * BLOCK % 1000)
    count = made.num_tokens // BLOCK + 1
    stub.scheduler.allocated(made, blocks((ids(1, count), ids(1, count))), 0)
    while made.num_computed_tokens < made.num_tokens:
        step = min(2 * BLOCK + 5, made.num_tokens - made.num_computed_tokens)
        stub.step({"a1": (step, (ids(1, count), ids(1, count)))})
        made.num_computed_tokens += step
    stub.step()
    assert len(stub.storage.blocks) == 2 * (made.num_tokens // BLOCK)


def test_case_084_a_save_holds_its_bytes_before_the_engine_can_reuse_the_pages() -> None:
    stub = Stub()
    made, table = request("a1", 64), ids(1, 4)
    expected = [stub.page_bytes(0, b) for b in table]
    stub.storage.silent = True
    stub.scheduler.allocated(made, blocks((table,)), 0)
    stub.step({"a1": (64, (table,))})
    for tensor in stub.caches.values():
        tensor.zero_()  # the request was preempted, its pages are somebody else's
    [save] = stub.storage.moves
    stub.storage.carry_out(save)
    assert list(stub.storage.blocks.values()) == expected


def test_case_086_090_only_computed_and_hashed_blocks_are_saved() -> None:
    stub = Stub()
    made, table = request("a1", 64), ids(1, 8)
    made.block_hashes = made.block_hashes[:3]
    stub.scheduler.allocated(made, blocks((table,)), 0)
    stub.step({"a1": (32, (table,))})
    assert len(stub.storage.blocks) == 2
    made.num_computed_tokens = 32
    stub.step({"a1": (32, (table,))})
    assert len(stub.storage.blocks) == 3
    made.num_computed_tokens = 64
    made.block_hashes = request("a1", 64).block_hashes
    made.num_tokens = 65
    stub.step({"a1": (1, (table,))})
    assert len(stub.storage.blocks) == 4


def test_drafted_tokens_are_not_saved() -> None:
    stub = Stub()
    made, table = request("a1", 40), ids(1, 8)
    made.block_hashes = request("a1", 64).block_hashes  # as if hashed too early
    stub.scheduler.allocated(made, blocks((table,)), 0)
    stub.step({"a1": (40 + 24, (table,))})
    assert len(stub.storage.blocks) == 2


def test_case_089_112_an_abort_while_promised_or_loading_leaves_nothing_leased() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (ids(1, 7),))
    forget_pinned(stub)
    made = request("a2", 100)
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 6
    stub.scheduler.finished("a2")
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 0
    stub.storage.silent = True
    hit(stub, "a3", 100, (ids(31, 7),))
    stub.step()
    stub.scheduler.finished("a3")
    load = stub.storage.moves[-1]
    stub.storage.events.append(MoveDone(load.id, stub.storage.carry_out(load)))
    _, results = stub.step()
    assert results.finished_recving == {"a3"}  # the engine frees its pages with this
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 0


def test_case_091_a_request_that_never_ran_ends_quietly() -> None:
    stub = Stub()
    stub.scheduler.finished("unknown")
    made = request("a1", 160)
    assert stub.scheduler.matched_tokens(made, 0) == (0, False)
    stub.scheduler.finished("a1")
    assert not stub.step()[0].saves


def test_case_101_a_save_that_ends_after_its_request_is_counted_once() -> None:
    stub = Stub()
    stub.storage.silent = True
    made, table = request("a1", 64), ids(1, 4)
    stub.scheduler.allocated(made, blocks((table,)), 0)
    stub.step({"a1": (64, (table,))})
    stub.scheduler.finished("a1")
    assert stub.scheduler.pending()
    [save] = stub.storage.moves
    stub.storage.events.append(MoveDone(save.id, stub.storage.carry_out(save)))
    stub.step()
    assert stub.scheduler.ledger.stats()["stored_blocks"] == 4
    assert not stub.scheduler.pending()


def test_two_requests_for_one_prompt_share_one_load() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (ids(1, 7),))
    forget_pinned(stub)
    stub.storage.silent = True
    hit(stub, "a2", 100, (ids(21, 7),))
    stub.step()
    assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (None, False)
    load = stub.storage.moves[-1]
    stub.storage.events.append(MoveDone(load.id, stub.storage.carry_out(load)))
    stub.step()
    assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (96, True)
    assert len([m for m in stub.storage.moves if m.from_tier.any()]) == 1


def test_an_idle_engine_steps_while_orders_wait_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub(read_timeout_s=1.0, write_timeout_s=1.0)
    assert not stub.scheduler.pending()
    stub.scheduler.rotate()
    assert stub.scheduler.pending()
    now = stub.scheduler._quiet_since
    monkeypatch.setattr("time.monotonic", lambda: now + 2.1)
    assert not stub.scheduler.pending()


def test_a_rotation_reaches_the_storage_half_with_the_next_step() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (ids(1, 7),))
    stub.scheduler.rotate()
    assert stub.scheduler.matched_tokens(request("a2", 100), 0) == (0, False)
    stub.step()
    assert stub.storage.epochs == [1]


def test_a_load_that_a_rotation_overtakes_fails_and_touches_no_page() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (ids(1, 7),))
    forget_pinned(stub)
    stub.storage.silent = True
    hit(stub, "a2", 100, (ids(31, 7),))
    stub.step()
    before = [stub.page_bytes(0, b) for b in ids(31, 6)]
    stub.scheduler.rotate()
    load = stub.storage.moves[-1]
    stub.storage.events.append(MoveDone(load.id, stub.storage.carry_out(load)))
    _, results = stub.step()
    assert results.finished_recving == {"a2"}
    assert stub.worker.failed_block_ids() == set(ids(31, 6))
    assert [stub.page_bytes(0, b) for b in ids(31, 6)] == before


def test_an_engine_that_wants_another_hit_than_promised_recomputes() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (ids(1, 7),))
    made = request("a2", 100)
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.allocated(made, blocks((ids(31, 7),)), 64)
    _, results = stub.step()
    assert results.failed_recving == results.finished_recving == {"a2"}
    stub.scheduler.finished("a2")
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 0


def test_hits_are_told_apart_by_where_they_come_from() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (ids(1, 7),))
    made = request("a2", 100)
    hit(stub, "a2", 100, (ids(31, 7),))
    assert stub.scheduler.hit_sources(made, 96) == (96, 0)
    forget_pinned(stub)
    stub.step()
    forget_pinned(stub)
    hit(stub, "a3", 100, (ids(41, 7),))
    assert stub.scheduler.hit_sources(request("a3", 100), 96) == (0, 96)


def test_a_retirement_is_agreed_to_once_nothing_promised_holds_it() -> None:
    stub = Stub()
    made = request("a1", 100)
    stub.compute(made, (ids(1, 7),))
    forget_pinned(stub)
    stub.scheduler.matched_tokens(request("a2", 100), 0)
    stub.storage.events.append(Retire(5, Keys.of((0, h) for h in made.block_hashes)))
    stub.step()
    stub.step()
    assert stub.storage.agreed == []
    stub.scheduler.finished("a2")
    stub.step()
    assert stub.storage.agreed == [5]


def test_a_tier_that_asks_what_is_worth_keeping_is_answered_in_the_next_step() -> None:
    stub = Stub()
    made = request("a1", 100)
    stub.compute(made, (ids(1, 7),))
    keys = Keys.of([*((0, h) for h in made.block_hashes), (0, bytes(32))])
    stub.storage.events.append(Appraise(5, keys))
    stub.step()
    stub.step()
    [(question, worth)] = stub.storage.appraisals
    assert question == 5
    assert len(worth) == len(keys)
    assert worth[-1] is False


def test_a_shutdown_waits_for_saves_and_agrees_to_every_retirement() -> None:
    stub = Stub()
    stub.storage.silent = True
    made, table = request("a1", 64), ids(1, 4)
    stub.scheduler.allocated(made, blocks((table,)), 0)
    stub.step({"a1": (64, (table,))})
    [save] = stub.storage.moves
    stub.storage.events.append(Retire(9, Keys.of([(0, bytes(32))])))
    storage = stub.storage

    def answer(retire_id: int) -> None:
        storage.agreed.append(retire_id)
        storage.events.append(MoveDone(save.id, storage.carry_out(save)))

    storage.agree = answer  # type: ignore[method-assign]  # the tier had no room until then
    stub.worker.shutdown()
    stub.worker.shutdown()
    assert storage.agreed == [9]
    assert len(storage.blocks) == 4


def test_case_120_ranks_are_as_large_as_the_smallest_arena_and_the_largest_block() -> None:
    stub = Stub()
    from tierkv.connectors.vllm.scheduler import SchedulerSide

    two = SchedulerSide(stub.options, stub.config, 2)
    nbytes = stub.layout.block_bytes[0]
    events = stub.worker.handshake((0,)).events
    two.start({
        0: Handshake(0, 1 << 20, (nbytes,), (0,), events),
        1: Handshake(1, 1 << 19, (nbytes * 2,), (0,), events),
    })  # fmt: skip
    stats = two.ledger.stats()
    assert stats["pinned_capacity_bytes"] == 1 << 19
    assert two.ledger.layout.block_bytes == (nbytes * 2,)
    with pytest.raises(RuntimeError, match=r"2 ranks but handshakes of \[0\]"):
        SchedulerSide(stub.options, stub.config, 2).start({0: stub.worker.handshake((0,))})


def test_commands_reach_only_the_rank_that_they_are_for() -> None:
    stub = Stub()
    worth = np.array([True, False, True])
    answers = (Appraised(1, 4, ~worth), Appraised(0, 5, worth))
    commands = [pack_command(c) for c in (Agree(1, 7), Agree(0, 8), *answers, Rotate(3))]
    stub.worker.load(StepMetadata(commands=commands))
    assert stub.storage.agreed == [8]
    assert stub.storage.appraisals == [(5, [True, False, True])]
    assert stub.storage.epochs == [3]
    with pytest.raises(ValueError, match="not a command"):
        stub.worker.load(StepMetadata(commands=[("dance",)]))


def test_reports_of_ranks_add_up_and_everything_survives_the_engines_serializer() -> None:
    one, two = WorkerEvents({0: [("copied", 1)]}), WorkerEvents({1: [("copied", 1)]})
    both = pickle.loads(pickle.dumps(one.aggregate(two)))
    assert both.by_rank == {0: [("copied", 1)], 1: [("copied", 1)]}
    assert one.by_rank == {0: [("copied", 1)]}


def test_null_entries_of_a_window_table_are_never_saved() -> None:
    stub = Stub(full_spec(), window_spec())
    made = request("a1", 100)
    stub.compute(made, (ids(1, 7), [0, 0, 0, 0, *ids(31, 3)]))
    saved = {made.block_hashes.index(name) for group, name in stub.storage.blocks if group == 1}
    assert saved == {4, 5}
