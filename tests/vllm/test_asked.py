"""What the scheduler side answers to one request: when to load, when not, what it still owes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stub import BLOCK, Stub, blocks, full_spec, request

from tierkv.blocks import Keys, MoveDone, Outcome, Retire
from tierkv.connectors.vllm.options import LOAD_PARAM, LoadWhen
from tierkv.connectors.vllm.stats import PINNED
from tierkv.worth import ENOUGH

TABLE = list(range(1, 8))
OTHER = list(range(31, 38))


def warm(**options: Any) -> Stub:
    """96 tokens of one prompt are in pinned RAM and in the tier."""
    stub = Stub(full_spec(), **options)
    stub.compute(request("a1", 100), (TABLE,))
    return stub


def forget_pinned(stub: Stub) -> None:
    while stub.scheduler.ledger._books.room._evict_one():
        pass


def asked(name: str, **more: Any) -> SimpleNamespace:
    made = request(name, 100)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def leased(stub: Stub) -> int:
    return stub.scheduler.ledger.stats()["leased_blocks"]


def test_a_request_may_forbid_its_load_whatever_the_options_say() -> None:
    stub = warm(load=LoadWhen.ALWAYS)
    never = asked("a2", kv_transfer_params={LOAD_PARAM: "never"})
    assert stub.scheduler.matched_tokens(never, 0) == (0, False)
    assert leased(stub) == 0
    assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (96, True)


def test_a_request_that_reads_no_cache_is_not_even_looked_up() -> None:
    stub = warm()
    lookups = stub.scheduler.ledger.stats()["lookups"]
    no_reuse = asked("a2", skip_reading_prefix_cache=True)
    assert stub.scheduler.matched_tokens(no_reuse, 0) == (0, False)
    assert stub.scheduler.ledger.stats()["lookups"] == lookups


@pytest.mark.parametrize("local", [96, 97, 112])
def test_what_the_engine_holds_itself_is_no_hit(local: int) -> None:
    stub = warm()
    assert stub.scheduler.matched_tokens(request("a2", 100), local) == (0, False)
    stub.scheduler.finished("a2")
    assert leased(stub) == 0


def test_a_hit_goes_on_from_what_the_engine_holds() -> None:
    stub = warm()
    made = request("a2", 100)
    before = [stub.page_bytes(0, b) for b in TABLE[:6]]
    untouched = [stub.page_bytes(0, b) for b in OTHER[:2]]
    assert stub.scheduler.matched_tokens(made, 32) == (64, True)
    stub.scheduler.allocated(made, blocks((OTHER,)), 64)
    assert stub.scheduler.hit_sources(made, 64) == (64, 0)
    _, results = stub.step()
    assert results.finished_recving == {"a2"}
    assert not results.failed_recving
    assert [stub.page_bytes(0, b) for b in OTHER[:2]] == untouched
    assert [stub.page_bytes(0, b) for b in OTHER[2:6]] == before[2:]


def test_of_a_hit_beyond_the_engines_own_no_more_comes_from_the_tier_than_is_loaded() -> None:
    stub = warm()
    forget_pinned(stub)
    made = request("a2", 100)
    assert stub.scheduler.matched_tokens(made, 80) == (16, True)
    stub.scheduler.allocated(made, blocks((OTHER,)), 16)
    assert stub.scheduler.hit_sources(made, 16) == (0, 16)
    stub.step()
    assert stub.scheduler._stats._own["loaded_tokens"] == 16
    assert stub.scheduler.hit_sources(made, 16) == (16, 0)  # told once


def test_a_short_hit_is_left_counted_once_and_holds_nothing() -> None:
    stub = warm(min_hit_tokens=97)
    made = request("a2", 100)
    for _ in range(3):  # as an engine does that has no room yet
        assert stub.scheduler.matched_tokens(made, 0) == (0, False)
        assert leased(stub) == 0
    assert stub.scheduler._stats._own["too_short_tokens"] == 96
    stub.scheduler.finished("a2")
    assert stub.scheduler.matched_tokens(request("a2", 100), 0) == (0, False)  # the name again
    assert stub.scheduler._stats._own["too_short_tokens"] == 192


def measured(stub: Stub, *, prefill: float, pinned: float, tier: float) -> None:
    """As if 96 tokens had taken so many seconds."""
    judge = stub.scheduler._judge
    for _ in range(ENOUGH):
        judge.prefill.add(96, prefill)
        judge.loaded(PINNED, 96, pinned)
        judge.loaded(stub.scheduler._stats.tier, 96, tier)


def test_a_hit_is_judged_by_the_tier_that_it_comes_from() -> None:
    stub = warm(url="nvme:///nowhere")
    measured(stub, prefill=1.0, pinned=0.1, tier=10.0)
    assert stub.scheduler.matched_tokens(request("a2", 100), 0) == (96, True)
    stub.scheduler.finished("a2")
    forget_pinned(stub)
    assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (0, False)
    assert stub.scheduler._stats._own["too_slow_tokens"] == 96
    assert leased(stub) == 0
    always = asked("a4", kv_transfer_params={LOAD_PARAM: "always"})
    assert stub.scheduler.matched_tokens(always, 0) == (96, True)


def test_loads_that_end_well_are_what_the_judge_goes_by() -> None:
    stub = warm(url="nvme:///nowhere")
    judge = stub.scheduler._judge
    for n, forget in enumerate((False, True, True)):
        if forget:
            forget_pinned(stub)
        made = request(f"a{n + 2}", 100)
        found, _ = stub.scheduler.matched_tokens(made, 0)
        stub.scheduler.allocated(made, blocks((OTHER,)), found or 0)
        if n == 2:
            stub.storage.outcomes[made.block_hashes[0]] = Outcome.FAILED
        stub.step()
    assert {name: line.count for name, line in judge.loads.items()} == {PINNED: 1, "nvme": 1}
    assert stub.scheduler._stats._own["loaded_tokens"] == 192
    assert stub.scheduler._stats._own["failed_tokens"] == 96


def test_a_request_whose_load_failed_computes_until_it_is_preempted() -> None:
    stub = warm()
    forget_pinned(stub)
    made = request("a2", 100)
    stub.storage.outcomes[made.block_hashes[0]] = Outcome.FAILED
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.allocated(made, blocks((OTHER,)), 96)
    stub.step()
    stub.storage.outcomes.clear()
    assert stub.scheduler.matched_tokens(made, 0) == (0, False)
    stub.step({"a2": (32, (OTHER,))})  # it runs; asked about again, it was preempted
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.finished("a2")
    assert stub.scheduler.matched_tokens(request("a2", 100), 0) == (96, True)  # the name again


def test_a_hit_that_the_engine_takes_otherwise_is_not_offered_again() -> None:
    stub = warm()
    made = request("a2", 100)
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.allocated(made, blocks((OTHER,)), 64)
    stub.step()
    assert stub.scheduler.matched_tokens(made, 0) == (0, False)


def test_a_promise_from_before_a_rotation_is_not_kept() -> None:
    stub = warm()
    made = request("a2", 100)
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.rotate()
    before = [stub.page_bytes(0, b) for b in OTHER]
    stub.scheduler.allocated(made, blocks((OTHER,)), 96)
    _, results = stub.step()
    assert results.failed_recving == {"a2"}
    assert [stub.page_bytes(0, b) for b in OTHER] == before


def test_a_retirement_that_was_agreed_to_is_not_agreed_to_again_at_the_end() -> None:
    stub = warm()
    made = request("a1", 100)
    stub.storage.events.append(Retire(5, Keys.of((0, h) for h in made.block_hashes)))
    stub.step()
    stub.step()
    storage = stub.storage
    assert storage.agreed == [5]
    stub.worker.shutdown()
    assert storage.agreed == [5]


def test_whatever_is_reported_gives_an_idle_engine_its_whole_time_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub(read_timeout_s=1.0, write_timeout_s=1.0)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    stub.storage.silent = True
    for name, table in (("a1", range(1, 5)), ("b1", range(11, 15))):
        stub.compute(request(name, 4 * BLOCK), (list(table),))
    assert stub.scheduler.pending()
    clock.now += 1.5
    [first, _] = stub.storage.moves
    stub.storage.events.append(MoveDone(first.id, stub.storage.carry_out(first)))
    stub.step()
    clock.now += 1.5
    assert stub.scheduler.pending()
    clock.now += 2.5
    assert not stub.scheduler.pending()
