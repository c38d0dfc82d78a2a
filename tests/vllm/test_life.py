"""What a request may ask for, and everything that can happen to one, on the real engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import (
    MAX_TOKENS,
    ROUND,
    SMALL_POOL,
    Answer,
    Engine,
    References,
    engine,
    prompt,
    sampling,
)
from stores import nvme
from test_load import NOISE, ask_together, count_preemptions
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

FIRST = ROUND[:1]
TINY = "tinyllama"


def cached(ours: Engine, tokens: list[int], **more: Any) -> int:
    """Cached tokens of one prompt; `more` goes into the prompt or, `params`, its sampling."""
    params = sampling(4)
    for name, value in more.pop("params", {}).items():
        setattr(params, name, value)
    [out] = ours.llm.generate({"prompt_token_ids": tokens, **more}, params, use_tqdm=False)
    return int(out.num_cached_tokens)


def forget_pool(ours: Engine) -> None:
    """Let the saves end and empty the engine's own cache, so that hits are the connector's."""
    ours.settle()
    assert ours.llm.reset_prefix_cache()


def asked(when: str) -> dict[str, Any]:
    return {"params": {"extra_args": {"kv_transfer_params": {"tierkv_load": when}}}}


def at_rest(ours: Engine) -> None:
    """Nothing is leased, in flight, or missing from the engine's pool."""
    ours.settle()
    counters = ours.counters
    pool = ours.core.scheduler.kv_cache_manager.block_pool
    assert counters["leased_blocks"] == counters["moves_in_flight"] == 0
    assert pool.get_num_free_blocks() == ours.core.scheduler.kv_cache_config.num_blocks - 1
    side = ours.scheduler_side
    assert not side._requests
    assert not side._promises
    assert not side._loads
    assert not side._left


def near(ours: list[Answer], theirs: list[Answer]) -> bool:
    """Equal tokens, and logprobs but for the order of sums: steps are cut otherwise here."""
    return all(
        a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=NOISE)
        for a, b in zip(ours, theirs, strict=True)
    )


# What a request may ask for. ------------------------------------------------------------------


def test_a_request_says_whether_its_hits_are_loaded() -> None:
    with engine(TINY, extra={"url": ""}) as ours:
        assert cached(ours, ROUND[0]) == 0
        forget_pool(ours)
        assert cached(ours, ROUND[0], **asked("never")) == 0
        forget_pool(ours)
        assert cached(ours, ROUND[0], **asked("sometimes")) == 480
        forget_pool(ours)
        assert cached(ours, ROUND[0], **asked("always")) == 480


def test_a_request_that_does_not_read_caches_loads_nothing_and_leases_nothing() -> None:
    with engine(TINY, extra={"url": ""}) as ours:
        cached(ours, ROUND[0])
        forget_pool(ours)
        lookups = ours.counters["lookups"]
        assert cached(ours, ROUND[0], params={"skip_reading_prefix_cache": True}) == 0
        assert ours.counters["lookups"] == lookups
        at_rest(ours)


def test_hits_below_the_minimum_are_not_taken_and_counted_once() -> None:
    with engine(TINY, extra={"url": "", "min_hit_tokens": 400}) as ours:
        cached(ours, ROUND[0])
        cached(ours, prompt(77, 300))
        forget_pool(ours)
        assert cached(ours, prompt(77, 300)) == 0
        assert ours.scheduler_side._stats._own["too_short_tokens"] == 288
        assert cached(ours, ROUND[0]) == 480
        at_rest(ours)


def test_hits_that_are_slower_than_computing_are_not_taken(references: References) -> None:
    with engine(TINY, extra={"url": "", "load": "auto"}) as ours:
        first = ours.ask(ROUND)
        judge = ours.scheduler_side._judge
        assert judge.prefill.count > 0
        for n in range(1, 20):  # as if computing took no time, and loading an hour
            judge.prefill.add(100 * n, 1e-9)
            judge.loaded("pinned", 100 * n, 3600.0)
        forget_pool(ours)
        assert cached(ours, ROUND[0]) == 0
        assert ours.scheduler_side._stats._own["too_slow_tokens"] == 480
        at_rest(ours)
        for n in range(1, 200):
            judge.loaded("pinned", 100 * n, 1e-12)
            judge.prefill.add(100 * n, 1.0)
        forget_pool(ours)
        assert cached(ours, ROUND[0]) == 480
    assert near(first, references[TINY][0])


def test_prompts_with_another_salt_share_nothing() -> None:
    with engine(TINY, extra={"url": ""}) as ours:
        assert cached(ours, ROUND[0], cache_salt="one") == 0
        forget_pool(ours)
        assert cached(ours, ROUND[0], cache_salt="two") == 0
        assert cached(ours, ROUND[0]) == 0
        forget_pool(ours)
        assert cached(ours, ROUND[0], cache_salt="one") == 480


def test_images_keep_the_names_of_blocks_apart_from_where_they_begin() -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(32, sha256)

    def names(image: str) -> list[bytes]:
        feature = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=image,
            mm_position=PlaceholderRange(offset=70, length=20),
        )
        made = Request(
            request_id=image,
            prompt_token_ids=prompt(1, 320),
            sampling_params=sampling(1),
            pooling_params=None,
            mm_features=[feature],
            block_hasher=hasher,
        )
        return list(made.block_hashes)

    cat, dog = names("cat"), names("dog")
    assert cat[:2] == dog[:2]
    assert not set(cat[2:]) & set(dog[2:])


# What can happen to one. ----------------------------------------------------------------------


def test_an_aligned_prompt_sent_again_hits_all_but_its_last_block(model: str) -> None:
    aligned = prompt(500, 512)
    with engine(model) as plain:
        expected = plain.ask([aligned])
    with engine(model, extra={"url": ""}) as ours:
        ours.ask([aligned])
        forget_pool(ours)
        again = ours.ask([aligned])
        at_rest(ours)
    assert near(again, expected)
    assert again[0].cached_tokens == 480


def test_a_prefix_longer_than_the_arena_hits_as_far_as_it_fits(
    store: Path, references: References
) -> None:
    with engine(TINY, extra=nvme(store)) as ours:
        ours.ask(FIRST)
        ours.settle()
        block = ours.scheduler_side.ledger.layout.block_bytes[0]
    with engine(TINY, extra=nvme(store) | {"pinned": 8 * max(block, 4096)}) as ours:
        again = ours.ask(FIRST)
        at_rest(ours)
    assert near(again, references[TINY][0][:1])
    assert 0 < again[0].cached_tokens < 480


def test_aborted_after_any_number_of_steps_nothing_is_left_and_the_next_answer_is_right(
    model: str, store: Path, references: References
) -> None:
    with engine(model, extra=nvme(store)) as ours:
        ours.ask(ROUND)
        for steps in range(9):  # waiting, ordered, loading, loaded, prefilled, decoding, finished
            forget_pool(ours)
            llm = ours.llm.llm_engine
            [name] = [
                llm.add_request(f"again-{steps}", {"prompt_token_ids": ROUND[0]}, sampling(4))
            ]
            for _ in range(steps):
                llm.step()
            llm.abort_request([f"again-{steps}" if name is None else name], internal=True)
            while llm.has_unfinished_requests():
                llm.step()
            at_rest(ours)
        forget_pool(ours)
        again = ours.ask(FIRST)
        at_rest(ours)
    assert near(again, references[model][0][:1])
    assert again[0].cached_tokens == 480


@pytest.mark.parametrize(("seats", "requests"), [(1, 6), (64, 32)])
def test_a_storm_of_preemptions_in_the_smallest_pool_changes_no_answer(
    seats: int, requests: int, store: Path
) -> None:
    # Short prompts that start together and outgrow the pool with their answers.
    pool = MAX_TOKENS // 32 + 2
    crowd = [prompt(600 + n % 4, 40) + prompt(700 + n, 20 + n % 5) for n in range(requests)]
    with engine(TINY, blocks=pool, max_num_seqs=seats) as plain:
        expected = ask_together(plain, crowd)
    extra = nvme(store) | {"policy": "dense"}
    with engine(TINY, blocks=pool, max_num_seqs=seats, extra=extra) as ours:
        preempted = count_preemptions(ours)
        answers = [ask_together(ours, crowd) for _ in range(2)]
        at_rest(ours)
        counters = ours.counters
    for round_ in answers:
        for (tokens, probs), (wanted, wanted_probs) in zip(round_, expected, strict=True):
            assert probs == pytest.approx(wanted_probs, abs=NOISE)
            assert tokens == wanted
    assert bool(preempted) == (seats > 1)
    assert counters["hits"] > 0 or seats == 1  # one after the other fit the engine's own cache


def test_two_engines_in_turn_on_one_store_read_each_other(
    store: Path, references: References
) -> None:
    hits = []
    for half in (ROUND[:3], ROUND[3:], ROUND):
        with engine(TINY, extra=nvme(store)) as ours:
            hits.append([a.cached_tokens for a in ours.ask(half)])
            at_rest(ours)
    assert hits == [[0] * 3, [0] * 3, [480] * 6]


# New weights. ---------------------------------------------------------------------------------


def test_a_rotation_is_a_miss_in_every_tier_in_flight_and_after_a_restart(
    model: str, store: Path, references: References
) -> None:
    with engine(model, extra=nvme(store)) as ours:
        ours.ask(ROUND[:3])
        ours.settle()
        llm = ours.llm.llm_engine
        ours.llm.reset_prefix_cache()
        llm.add_request("in-flight", {"prompt_token_ids": ROUND[0]}, sampling(8))
        llm.step()  # the load is ordered
        assert ours.llm.reset_prefix_cache(reset_connector=True) in (True, False)
        told: list[int] = []
        while llm.has_unfinished_requests():
            for out in llm.step():
                told = list(out.outputs[0].token_ids)
        assert [a.cached_tokens for a in ours.ask(ROUND[1:3])] == [0, 0]
        at_rest(ours)
        assert ours.counters["rotations"] == 1
        kept = ours.counters["stored_bytes"]
    assert kept > 0
    assert tuple(told) == references[model][0][0].tokens
    with engine(model, extra=nvme(store)) as ours:
        again = ours.ask(ROUND[:3])
        recovered = ours.counters["recovered_blocks"]
    # What was saved after the rotation is back: the prompts that were asked since.
    assert [a.cached_tokens for a in again] == [480] * 3
    assert recovered > 0
    assert near(again, references[model][0][:3])


def test_after_a_rotation_and_no_new_prompt_a_restart_finds_nothing(store: Path) -> None:
    with engine(TINY, extra=nvme(store)) as ours:
        ours.ask(FIRST)
        ours.settle()
        ours.llm.reset_prefix_cache(reset_connector=True)
        ours.settle()
    with engine(TINY, extra=nvme(store)) as ours:
        assert ours.counters["recovered_blocks"] == 0
        assert ours.ask(FIRST)[0].cached_tokens == 0


# What routers hear. ---------------------------------------------------------------------------


def test_routers_hear_of_every_block_that_comes_and_goes(store: Path) -> None:
    heard: list[Any] = []
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with engine("tinygemma3", extra=nvme(store), kv_events_config=events) as ours:
        ours.core.scheduler.kv_event_publisher.publish = lambda batch: heard.extend(batch.events)
        ours.ask(FIRST)
        ours.settle()
        stored = ours.counters["stored_blocks"]
        known = {
            (m, e.group_idx, h)
            for m in ("CPU", "STORAGE")
            for e in of(heard, m, BlockStored)
            for h in e.block_hashes
        }
        assert len(known) == 2 * stored > 0
        own = {(e.group_idx, h) for e in of(heard, "GPU", BlockStored) for h in e.block_hashes}
        assert {(g, h) for _, g, h in known} <= own  # a router knows what tokens they stand for
        ours.llm.reset_prefix_cache(reset_connector=True)
        ours.ask([prompt(9, 40)])
        ours.settle()
        gone = {
            (m, e.group_idx, h)
            for m in ("CPU", "STORAGE")
            for e in of(heard, m, BlockRemoved)
            for h in e.block_hashes
        }
        assert gone == known


def of(events: list[Any], medium: str, kind: type) -> list[Any]:
    return [e for e in events if isinstance(e, kind) and e.medium == medium]


def test_a_random_order_of_lengths_and_salts_never_crosses() -> None:
    source = random.Random(4)
    asked_for = [(source.choice("ab"), source.randrange(64, 500)) for _ in range(12)]
    with engine(TINY, extra={"url": ""}, blocks=SMALL_POOL[TINY]) as ours:
        longest = {"a": 0, "b": 0}
        for salt, length in asked_for:
            ours.settle()
            ours.llm.reset_prefix_cache()
            found = cached(ours, prompt(5, 500)[:length], cache_salt=salt)
            assert found <= longest[salt]
            longest[salt] = max(longest[salt], length)
        assert max(longest.values()) > 0
