"""Many requests at once on a pool and an arena that are both too small: preemption, eviction,
shared prefixes. Batches change the order of sums, so outputs are compared by tokens and by
logprobs within the noise that an engine without a connector shows too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import Engine, engine, prompt, sampling
from stores import nvme

NOISE = 1e-3


def conversations(seed: int, count: int) -> list[list[int]]:
    """Prompts over a few common trunks, of many lengths."""
    source = random.Random(seed)
    trunks = [prompt(500 + n, 400) for n in range(3)]
    return [
        source.choice(trunks)[: source.randrange(0, 400)]
        + prompt(seed * 1000 + n, source.randrange(20, 120))
        for n in range(count)
    ]


CROWDS = [conversations(1, 16), conversations(2, 16), conversations(1, 16)]


def ask_together(ours: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of requests that run side by side."""
    asked = [{"prompt_token_ids": p} for p in prompts]
    found = []
    for out in ours.llm.generate(asked, sampling(24), use_tqdm=False):
        [completion] = out.outputs
        tokens = list(completion.token_ids)
        probs = [p[t].logprob for p, t in zip(completion.logprobs, tokens, strict=True)]
        found.append((tokens, probs))
    return found


def count_preemptions(ours: Engine) -> list[str]:
    """A list that grows with every preemption."""
    scheduler, seen = ours.core.scheduler, []
    preempt = scheduler._preempt_request

    def counting(request: object, *args: object, **more: object) -> None:
        seen.append(request.request_id)
        preempt(request, *args, **more)

    scheduler._preempt_request = counting
    return seen


def test_a_crowd_gets_the_same_answers_whatever_is_preempted_and_evicted(
    model: str, store: Path
) -> None:
    with engine(model) as plain:
        expected = [ask_together(plain, prompts) for prompts in CROWDS]
    with engine(model, extra=nvme(store) | {"pinned": "6MiB"}) as ours:
        preempted = count_preemptions(ours)
        answers = [ask_together(ours, prompts) for prompts in CROWDS]
        ours.settle()
        counters = ours.counters
    for mine, theirs in zip(answers, expected, strict=True):
        for (tokens, probs), (wanted, wanted_probs) in zip(mine, theirs, strict=True):
            assert probs == pytest.approx(wanted_probs, abs=NOISE)
            assert tokens == wanted
    assert preempted or model != "tinyllama"
    assert counters["hits"] > 10
    assert counters["evicted_pinned_blocks"] > 0
    assert counters["loaded_blocks"] > 0
    assert counters["leased_blocks"] == counters["moves_in_flight"] == 0


def test_aborted_requests_leave_nothing_behind(model: str, store: Path) -> None:
    with engine(model, extra=nvme(store) | {"pinned": "6MiB"}) as ours:
        crowd = CROWDS[0]
        ask_together(ours, crowd)
        ours.settle()
        core = ours.llm.llm_engine
        for n, tokens in enumerate(crowd):
            core.add_request(f"again-{n}", {"prompt_token_ids": tokens}, sampling(24))
        steps = 0
        while core.has_unfinished_requests():
            core.step()
            core.abort_request([f"again-{steps}"])  # waiting, loading, running: all get their turn
            steps += 1
        ours.settle()
        counters = ours.counters
        free = ours.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        pool = ours.core.scheduler.kv_cache_config.num_blocks
    assert steps >= len(crowd) // 2
    assert counters["leased_blocks"] == counters["moves_in_flight"] == 0
    assert free == pool - 1  # the null block
