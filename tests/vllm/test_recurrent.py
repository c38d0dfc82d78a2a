"""Recurrent groups: a state is there where a step of the engine ended, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import Engine, engine, prompt, sampling
from families import forget, same
from stub import BLOCK, engine_config, full_spec
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from tierkv.connectors.vllm.layout import engine_layout, offered_states, states_by_offer
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind

MODEL = "tinyqwen3next"
SETTINGS = {"dtype": "bfloat16", "block_size": 256, "max_num_batched_tokens": 512}
"""With steps of 512 tokens a prompt of 1,000 has states at 512 and 768, and none at 256."""
TRUNK = prompt(1, 1000)


def qwen(extra: dict[str, Any] | None, **more: Any) -> contextlib.AbstractContextManager[Engine]:
    return engine(MODEL, blocks=60, extra=extra, **{**SETTINGS, **more})


@contextlib.contextmanager
def watched_tables(ours: Engine) -> Iterator[list[tuple[set[Any], set[Any]]]]:
    """For each step: states that the engine offered, and those that its block tables show."""
    scheduler = ours.core.scheduler
    connector = scheduler.connector
    original = connector.build_connector_meta
    size = SETTINGS["block_size"]
    seen = []

    def watching(output: Any) -> Any:
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            before = request.num_computed_tokens
            tables = state.get_block_ids(request_id)
            shown = {
                (g, tables[g][i], (i + 1) * size)
                for g in range(3)
                for i in range(before // size, (before + scheduled) // size)
                if tables[g][i]
            }
            seen.append((set(state.boundary_state_offloads.get(request_id, ())), shown))
        return original(output)

    connector.build_connector_meta = watching
    try:
        yield seen
    finally:
        connector.build_connector_meta = original


@pytest.mark.parametrize("by_offer", [False, True], ids=["tables", "offers"])
def test_states_are_kept_where_steps_ended_and_hits_end_there(by_offer: bool) -> None:
    branches = [TRUNK[:n] + prompt(n, 120) for n in (300, 600, 800)]
    with qwen(None, prefix_cache_retention_interval=None) as plain:
        theirs = plain.ask([TRUNK, *branches])
    with qwen({"url": "", "policy": "dense"}, prefix_cache_retention_interval=None) as ours:
        if by_offer:
            ours.scheduler_side._by_offer = (0, 1, 2)
        with watched_tables(ours) as seen:
            answers = ours.ask([TRUNK])
        for branch in branches:
            forget(ours)
            answers += ours.ask([branch])
        ours.settle()
    assert [a.cached_tokens for a in theirs] == [0, 0, 512, 768]
    assert [a.cached_tokens for a in answers] == [a.cached_tokens for a in theirs]
    assert same(answers, theirs)
    assert {end for offered, _ in seen for _, _, end in offered} == {512, 768}
    assert all(offered == shown for offered, shown in seen)


def test_a_state_that_decoding_reaches_is_kept() -> None:
    begin = prompt(7, 250)
    with qwen({"url": "", "policy": "dense"}) as ours:
        [out] = ours.llm.generate({"prompt_token_ids": begin}, sampling(20), use_tqdm=False)
        longer = begin + list(out.outputs[0].token_ids)[:10] + prompt(8, 50)
        forget(ours)
        [hit] = ours.ask([longer])
        ours.settle()
    with qwen(None) as plain:
        [computed] = plain.ask([longer])
    assert hit.cached_tokens == 256
    assert hit.tokens == computed.tokens
    # The state was built token by token there and in one go here: bfloat16 sees that.
    assert hit.logprobs == pytest.approx(computed.logprobs, abs=0.2)


def mamba(**more: Any) -> MambaSpec:
    fields = {"block_size": 2 * BLOCK, "mamba_cache_mode": "align", **more}
    return MambaSpec(shapes=((4,),), dtypes=(torch.float32,), **fields)


def config_with(spec: MambaSpec, alignment: int = 2 * BLOCK) -> KVCacheConfig:
    config = engine_config(full_spec(), full_spec(), alignment=alignment)
    config.kv_cache_groups[1].kv_cache_spec = spec
    return config


def test_tables_are_believed_only_where_blocks_stay_and_steps_end_at_blocks() -> None:
    assert states_by_offer(config_with(mamba())) == ()
    assert states_by_offer(config_with(mamba(num_speculative_blocks=2))) == (1,)
    assert states_by_offer(config_with(mamba(num_prefill_checkpoint_blocks=1))) == (1,)
    assert states_by_offer(config_with(mamba(), alignment=BLOCK)) == (1,)


def test_where_the_engines_own_hits_end_inside_a_state_block_ours_do_not() -> None:
    layout = engine_layout(config_with(mamba(), alignment=BLOCK), [1, 1])
    assert (layout.hash_block_tokens, layout.alignment_tokens) == (BLOCK, 2 * BLOCK)
    assert [g.kind for g in layout.groups] == [GroupKind.FULL, GroupKind.RECURRENT]


def test_an_offered_state_is_where_it_ends_and_half_a_block_is_none() -> None:
    layout = engine_layout(config_with(mamba()), [1, 1])
    size = 2 * BLOCK
    offers = [(1, 7, 2 * size), (0, 8, size), (1, 9, size + BLOCK)]
    assert offered_states(layout, 1, offers, 0) == [0, 7]
    assert offered_states(layout, 1, [], 0) == []


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        (mamba(mamba_cache_mode="none"), "--enable-prefix-caching"),
        (mamba(mamba_cache_mode="all", num_speculative_blocks=1), "--mamba-cache-mode align"),
    ],
)
def test_states_that_nothing_can_go_on_from_are_refused_with_advice(
    spec: MambaSpec, advice: str
) -> None:
    with pytest.raises(ConfigError, match=rf"group 1 \(MambaSpec\).*{advice}"):
        engine_layout(config_with(spec), [1, 1])
