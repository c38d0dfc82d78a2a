"""A request whose load failed goes on, however full the pool is."""

from __future__ import annotations

import dataclasses
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


def test_a_request_loads_again_only_after_a_preemption_and_others_are_not_held_back() -> None:
    stub = Stub()
    stub.compute(request("a1", 100), (list(range(1, 8)),))
    made = request("a2", 100)
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.allocated(made, blocks((list(range(11, 18)),)), 96)
    assert stub.scheduler.matched_tokens(made, 0) == (0, False)  # asked again: the load failed
    assert stub.scheduler.matched_tokens(request("a3", 100), 0) == (96, True)
    made.num_preemptions = 1
    assert stub.scheduler.matched_tokens(made, 0) == (96, True)
    stub.scheduler.finished("a2")
    assert not stub.scheduler._ordered
