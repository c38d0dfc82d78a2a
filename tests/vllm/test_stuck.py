"""A request whose load failed goes on, however full the pool is."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
from engines import MAX_TOKENS, Engine, engine, prompt, sampling
from stub import Stub, blocks, request
from test_life import at_rest, forget_pool

from tierkv.blocks import MoveDone, Outcome

MOST_STEPS = 2000
"""Far more than any of these requests takes; an engine that is stuck goes on stepping."""

LONG = prompt(77, MAX_TOKENS - 60)
"""More than half of a small pool."""


def ask(ours: Engine, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Tokens of each request, by its place, of requests that run side by side."""
    core, found = ours.llm.llm_engine, {}
    for n, tokens in enumerate(prompts):
        core.add_request(str(n), {"prompt_token_ids": tokens}, sampling(8))
    for _ in range(MOST_STEPS):
        if not core.has_unfinished_requests():
            return found
        for out in core.step():
            if out.finished:
                found[out.request_id.partition("-")[0]] = list(out.outputs[0].token_ids)
    scheduler = ours.core.scheduler
    raise AssertionError(
        f"stuck with {[(r.request_id, r.status) for r in scheduler.requests.values()]}, "
        f"{scheduler.kv_cache_manager.block_pool.get_num_free_blocks()} blocks free"
    )


def fail_loads(ours: Engine, count: int) -> None:
    """The next loads fail as if the tier could not read a block this time."""
    worker, fill, left = ours.worker_side, ours.worker_side._fill_pages, count

    def failing(load: Any, done: MoveDone) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            outcomes = done.outcomes.copy()
            outcomes[0] = np.uint8(Outcome.FAILED)
            done = dataclasses.replace(done, outcomes=outcomes)
        fill(load, done)

    worker._fill_pages = failing


def test_a_failed_load_of_most_of_the_pool_is_computed(model: str) -> None:
    """vLLM reserves the whole length of a request whose load failed, and counts that against the
    request's own next load: where both do not fit, it would wait for ever."""
    with engine(model, extra={"url": ""}) as ours:
        first = ask(ours, [LONG])
        forget_pool(ours)
        fail_loads(ours, 1)
        assert ask(ours, [LONG]) == first
        assert ours.worker_side.counters["failed_loads"] == 1
        at_rest(ours)
        forget_pool(ours)
        hits = ours.counters["hits"]
        assert ask(ours, [LONG]) == first
        assert ours.counters["hits"] > hits  # the next request loads again
        at_rest(ours)


def test_failed_loads_that_hold_the_pool_together_are_all_computed(model: str) -> None:
    """The engine takes a failed load's pages back when the request's turn comes, and no turn comes
    while one before it waits for room: with windows, computing takes more room than loading."""
    prompts = [prompt(77, 700), *(prompt(80 + n, 400) for n in range(3))]
    with engine(model, extra={"url": ""}) as ours:
        first = ask(ours, prompts)
        forget_pool(ours)
        fail_loads(ours, len(prompts))
        assert ask(ours, prompts) == first
        assert ours.worker_side.counters["failed_loads"] > 0
        at_rest(ours)
        forget_pool(ours)
        failed = ours.worker_side.counters["failed_loads"]
        assert ask(ours, prompts) == first
        assert ours.worker_side.counters["failed_loads"] == failed
        at_rest(ours)


def failed(stub: Stub, name: str, first: int) -> SimpleNamespace:
    """A request whose load was ordered, and about which the engine has not asked again."""
    made = request(name, 100)
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.allocated(made, blocks((list(range(first, first + 7)),)), 96)
    return made


def test_nobody_loads_in_front_of_a_request_whose_load_failed_until_that_runs_or_is_gone() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (list(range(1, 8)),))
    for end in ("runs", "gone"):
        made = failed(stub, f"a{end}", 11)
        assert stub.scheduler.matched_tokens(made, 0) == (0, False)
        assert stub.scheduler.matched_tokens(made, 0) == (0, False)
        assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (None, False)
        assert stub.scheduler.matched_tokens(request("b1", 100), 0) == (0, False)  # no hit anyway
        if end == "runs":
            stub.step({made.request_id: (100, (list(range(11, 18)),))})
            assert stub.scheduler.matched_tokens(made, 0) == (96, True)  # it was preempted
        stub.scheduler.finished(made.request_id)
        assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (96, True)
        stub.scheduler.finished("a3")
    stub.step()
    assert stub.scheduler.ledger.stats()["leased_blocks"] == 0
    assert not stub.scheduler._turns.taken


def test_one_that_waits_for_room_lets_ended_loads_pass_and_is_computed_after_them() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (list(range(1, 8)),))
    first, second = failed(stub, "a2", 11), failed(stub, "a3", 21)
    assert stub.scheduler.matched_tokens(first, 0) == (0, False)
    assert stub.scheduler.matched_tokens(first, 0) == (None, False)  # a3 holds its pages
    assert stub.scheduler.matched_tokens(second, 0) == (0, False)  # now it holds none
    assert stub.scheduler.matched_tokens(first, 0) == (0, False)
