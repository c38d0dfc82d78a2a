"""Round trips on the real engine: out of the pool, back from tierkv, the same output."""

from __future__ import annotations

import pytest
from engines import (
    LARGE_POOL,
    ROUND,
    Answer,
    References,
    corrupt_loads,
    engine,
    prompt,
)

from tierkv import reach
from tierkv.layout import Layout


def same(ours: list[Answer], theirs: list[Answer]) -> bool:
    return all(a.same_output(b) for a, b in zip(ours, theirs, strict=True))


def planned_bytes(layout: Layout, boundary: int) -> int:
    """What a hit at `boundary` moves, from the reachability table alone."""
    total = 0
    for g, group in enumerate(layout.groups):
        first, end = reach.load_range(layout, g, boundary)
        total += (end - first) * group.block_bytes
    return total


def test_the_engine_alone_repeats_itself_and_its_small_pool_forgets(
    model: str, references: References
) -> None:
    first, second = references[model]
    assert same(first, second)
    assert [a.cached_tokens for a in first] == [0] * len(ROUND)
    assert [a.cached_tokens for a in second] == [480] * len(ROUND)
    with engine(model) as plain:
        plain.ask(ROUND)
        again = plain.ask(ROUND)
    assert sum(a.cached_tokens for a in again) == 0


def test_round_two_is_loaded_from_pinned_memory_with_the_same_output(
    model: str, references: References
) -> None:
    with engine(model, extra={"url": ""}) as ours:
        first = ours.ask(ROUND)
        ours.settle()
        second = ours.ask(ROUND)
        ours.settle()
        counters, worker = ours.counters, ours.worker_side.counters
        layout = ours.scheduler_side.ledger.layout
    plain, cached = references[model]
    assert same(first, plain)
    assert same(second, plain)
    assert [a.cached_tokens for a in second] == [a.cached_tokens for a in cached]
    assert counters["hit_tokens"] == 480 * len(ROUND)
    plan = planned_bytes(layout, 480) * len(ROUND)
    assert counters["hit_bytes"] == worker["copied_in_bytes"] == plan
    assert counters["leased_blocks"] == counters["moves_in_flight"] == 0


GROUPS = [("tinyllama", 0), ("tinygemma3", 0), ("tinygemma3", 1), ("tinygemma3", 2)]


@pytest.mark.parametrize(("tiny", "group"), GROUPS)
def test_twin_of_pinned_round_trip_sees_one_corrupted_group(
    tiny: str, group: int, references: References
) -> None:
    with engine(tiny, extra={"url": ""}) as ours:
        ours.ask(ROUND)
        corrupt_loads(ours, group)
        second = ours.ask(ROUND)
    plain, _ = references[tiny]
    assert not any(a.same_output(b) for a, b in zip(second, plain, strict=True))


def test_hits_are_as_long_as_the_engines_own_for_every_length_and_branch(model: str) -> None:
    lengths = [31, 32, 33, 64, 65, 95, 96, 97, 160, 161, 320, 512, 513]
    prompts = [prompt(100 + n, n) for n in lengths]
    trunk = prompt(99, 300)
    prompts += [trunk[:n] + prompt(200 + n, 120) for n in (100, 128, 129, 200, 256)]
    # By default the engine's own pool keeps window blocks at few boundaries; here, at all of them.
    with engine(model, blocks=LARGE_POOL, prefix_cache_retention_interval=None) as plain:
        plain.ask([trunk])
        theirs = plain.ask(prompts) + plain.ask(prompts)
    with engine(model, blocks=LARGE_POOL, extra={"url": "", "policy": "dense"}) as ours:
        ours.ask([trunk])
        answers = []
        for tokens in prompts + prompts:
            assert ours.llm.reset_prefix_cache()
            answers += ours.ask([tokens])
    assert [a.cached_tokens for a in answers] == [a.cached_tokens for a in theirs]
    assert same(answers, theirs)


def test_a_rotation_makes_everything_older_a_miss(model: str, references: References) -> None:
    with engine(model, extra={"url": "memory://"}) as ours:
        ours.ask(ROUND)
        ours.settle()
        ours.llm.reset_prefix_cache(reset_connector=True)
        ours.settle()
        second = ours.ask(ROUND)
        ours.settle()
        third = ours.ask(ROUND)
    plain, cached = references[model]
    assert [a.cached_tokens for a in second] == [0] * len(ROUND)
    assert [a.cached_tokens for a in third] == [a.cached_tokens for a in cached]
    assert same(second, plain)
    assert same(third, plain)
