"""Speculative decoding: a draft model's look-ahead block is kept, what drafts left is not."""

from __future__ import annotations

from typing import Any

import pytest
from engines import HERE, LARGE_POOL, Answer, engine, prompt, sampling
from families import forget, same
from stub import engine_config, full_spec, window_spec
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tierkv import reach
from tierkv.connectors.vllm.layout import engine_layout, with_draft_groups
from tierkv.layout import Layout
from tierkv.plan import plan_prompt

LENGTHS = (470, 479, 480, 481, 500, 512)
PROMPTS = [prompt(n, n) for n in LENGTHS]
EAGLE: dict[str, Any] = {
    "speculative_config": {
        "method": "eagle",
        "model": str(HERE / "models" / "tinyeagle"),
        "num_speculative_tokens": 2,
    }
}
"""A draft of one layer, in the group of the target's four."""


def drafted(extra: dict[str, Any] | None) -> tuple[list[Answer], list[Answer], Layout | None, int]:
    """Round 1, round 2, the layout, bytes stored in round 1."""
    with engine("tinyllama", blocks=LARGE_POOL, extra=extra, **EAGLE) as one:
        first = one.ask(PROMPTS)
        if extra is None:
            return first, one.ask(PROMPTS), None, 0
        forget(one)
        stored = one.counters["stored_bytes"]
        second = []
        for tokens in PROMPTS:
            forget(one)
            second += one.ask([tokens])
        one.settle()
        return first, second, one.scheduler_side.ledger.layout, stored


def test_with_a_draft_model_hits_are_the_laws_and_the_output_is_the_engines() -> None:
    alone, cached, _, _ = drafted(None)
    first, second, layout, stored = drafted({"url": "memory://"})
    assert layout is not None
    assert layout.lookahead_blocks == (1,)
    plans = [plan_prompt(layout, n) for n in LENGTHS]
    assert same(first, alone)
    assert [a.cached_tokens for a in second] == [p["hit_tokens_resend"] for p in plans]
    for ours, theirs, computed in zip(second, cached, alone, strict=True):
        # The engine caps a resend before it drops a block, so its hit is a block shorter at most.
        assert 0 <= ours.cached_tokens - theirs.cached_tokens <= 32
        assert ours.tokens == theirs.tokens == computed.tokens
        assert ours.logprobs == pytest.approx(computed.logprobs, abs=1e-4)
    # Every whole block of a prompt is kept: the last is the look-ahead of the boundary before.
    assert stored == sum(n // 32 for n in LENGTHS) * layout.groups[0].block_bytes


def test_tokens_that_were_only_drafted_are_never_stored() -> None:
    """Blocks of an answer are stored once their tokens are its own, whatever drafts came."""
    with engine("tinyllama", blocks=LARGE_POOL, extra={"url": "", "policy": "dense"}, **EAGLE) as e:
        begin = prompt(50, 500)
        [out] = e.llm.generate({"prompt_token_ids": begin}, sampling(60), use_tqdm=False)
        answer = list(out.outputs[0].token_ids)
        saved = e.counters["saved_blocks"]
        longer = begin + answer + prompt(51, 40)
        forget(e)
        [hit] = e.ask([longer])
        e.settle()
    with engine("tinyllama", blocks=LARGE_POOL) as plain:
        [computed] = plain.ask([longer])
    # 560 tokens, the last of which was never computed: 17 blocks, and 16 of them before a block.
    assert saved == 17
    assert hit.cached_tokens == 512
    assert hit.tokens == computed.tokens


def test_where_the_engine_marks_no_group_every_group_is_a_draft_group() -> None:
    config = engine_config(full_spec(), window_spec())
    sizes = [1, 1]
    assert engine_layout(with_draft_groups(config, False), sizes).lookahead_blocks == (0, 0)
    assert engine_layout(with_draft_groups(config, True), sizes).lookahead_blocks == (1, 1)
    config.kv_cache_groups[1].is_eagle_group = True
    assert engine_layout(with_draft_groups(config, True), sizes).lookahead_blocks == (0, 1)


def test_case_039_equal_groups_share_a_mark_and_nothing_is_written_that_no_hit_reads() -> None:
    config = engine_config(full_spec(), window_spec(), window_spec())
    config.kv_cache_groups[2].is_eagle_group = True
    assert isinstance(config.kv_cache_groups[1].kv_cache_spec, SlidingWindowSpec)
    layout = engine_layout(config, [1, 1, 1])
    assert layout.lookahead_blocks == (0, 1, 1)
    for tokens in range(1, 300):
        kept = reach.keep(layout, reach.Policy.parse("end"), tokens)
        at = reach.boundaries(layout, reach.Policy.parse("end"), tokens)
        assert all((r[:, 1] * 16 <= tokens).all() for r in kept)  # no volatile tail
        if not len(at):
            assert not any(len(r) for r in kept)  # and no write-only cache
        else:
            assert plan_prompt(layout, tokens + 32, "end")["hit_tokens_longer"] >= at[-1]
            assert [r.tolist() for r in kept[1:2]] == [r.tolist() for r in kept[2:3]]
