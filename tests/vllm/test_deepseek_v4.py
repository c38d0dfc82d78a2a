"""A tiny DeepSeek V4 on the real engine: windows, sparse attention, and compressor states.

Its states are windows to the engine. To tierkv they are what a hit reads of them: of the ratio-4
states the last block before the boundary, of the ratio-128 states nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Answer, Engine, computes_deepseek_v4, engine, prompt

from tierkv import reach
from tierkv.layout import GroupKind, Layout
from tierkv.plan import plan_prompt

MODEL = "tinydsv4"
SETTINGS = {"dtype": "bfloat16", "max_model_len": 1536, "block_size": 256}
TOKENS, HIT = 1500, 1280
ROUND = [prompt(seed, TOKENS) for seed in range(2)]
OTHERS = [prompt(seed, TOKENS) for seed in range(10, 12)]
LARGE_POOL, SMALL_POOL = 2200, 680
"""Blocks; while a prompt is computed it takes about 640, mostly of states, and about 30 stay."""
RATIOS = {4: 4, 5: 128}
"""Group → ratio of its states."""


def recorded_layout() -> Layout:
    """The layout of the engine's own description of this model, its states named as such."""
    every = json.loads((Path(__file__).parent / "data" / "kv_configs.json").read_text())
    [data] = [d for d in every if d["name"] == "deepseek_v4_tiny"]
    for g, ratio in RATIOS.items():
        group = data["groups"][g]
        group |= {"kind": "compressor", "ratio": ratio, "name": f"{g}.compressor"}
    return Layout.from_dict(data)


@contextlib.contextmanager
def deepseek(extra: dict[str, Any] | None = None, **more: Any) -> Iterator[Engine]:
    if not computes_deepseek_v4():
        pytest.skip("vLLM computes DeepSeek V4 only on CPUs with AVX-512, and this one has none")
    with engine(MODEL, extra=extra, **{"blocks": LARGE_POOL, **SETTINGS, **more}) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    """What an engine without a connector answers, twice: computed, and from its own cache."""
    with deepseek() as alone:
        first, second = alone.ask(ROUND), alone.ask(ROUND)
    assert [a.cached_tokens for a in second] == [HIT] * len(ROUND)
    assert same(first, second)
    return second


def same(ours: list[Answer], theirs: list[Answer]) -> bool:
    return all(a.same_output(b) for a, b in zip(ours, theirs, strict=True))


def ask_again(ours: Engine, tokens: list[int]) -> Answer:
    """Ask while the engine's own cache is empty, so that the hit comes from tierkv."""
    assert ours.llm.reset_prefix_cache()
    [answer] = ours.ask([tokens])
    assert answer.cached_tokens == HIT
    return answer


@contextlib.contextmanager
def around_loads(
    ours: Engine,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Call these with (groups, arena, offsets) right before and after pages are filled."""
    pages = ours.worker_side._pages
    scatter = pages.scatter

    def wrapped(groups: Any, block_ids: Any, arena: Any, offsets: Any) -> None:
        kept = arena.clone()
        if before is not None:
            before(groups, arena, offsets)
        scatter(groups, block_ids, arena, offsets)
        arena.copy_(kept)
        if after is not None:
            after(groups, arena, offsets)

    pages.scatter = wrapped
    try:
        yield
    finally:
        pages.scatter = scatter


def block_tables(ours: Engine) -> list[list[int]]:
    """The block table of the only request there is, one list a group; 0: no block."""
    scheduler = ours.core.scheduler
    [request_id] = scheduler.requests
    tables = scheduler.kv_cache_manager.coordinator.get_blocks(request_id)
    return [[block.block_id for block in table] for table in tables]


def overwrite_with_nan(ours: Engine, group: int, block_ids: list[int]) -> None:
    """NaN in these blocks of every layer of a group of states."""
    config = ours.llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    for name in ours.core.scheduler.kv_cache_config.kv_cache_groups[group].layer_names:
        assert 0 not in block_ids
        layers[name].kv_cache[block_ids] = math.nan


def test_round_two_is_loaded_with_the_same_output(plain: list[Answer]) -> None:
    with deepseek({"url": "memory://"}, blocks=SMALL_POOL) as ours:
        first = ours.ask(ROUND)
        ours.ask(OTHERS)  # the pool is too small to keep the first two beside them
        ours.settle()
        second = ours.ask(ROUND)
        ours.settle()
        counters, worker = ours.counters, ours.worker_side.counters
        layout = ours.scheduler_side.ledger.layout
    assert same(first, plain)
    assert same(second, plain)
    assert [a.cached_tokens for a in first] == [0] * len(ROUND)
    assert [a.cached_tokens for a in second] == [HIT] * len(ROUND)
    assert counters["hit_tokens"] == HIT * len(ROUND)
    loads = [reach.load_range(layout, g, HIT) for g in range(len(layout.groups))]
    nbytes = sum(
        (end - first) * g.block_bytes for (first, end), g in zip(loads, layout.groups, strict=True)
    )
    assert counters["hit_bytes"] == worker["copied_in_bytes"] == nbytes * len(ROUND)


def test_a_hit_reads_no_state_but_the_last_ratio_4_block(plain: list[Answer]) -> None:
    def dead(tables: list[list[int]]) -> dict[int, list[int]]:
        """What the engine believes to be loaded and the connector does not load."""
        return {4: tables[4][HIT // 4 - 2 : HIT // 4 - 1], 5: tables[5][HIT // 8 - 16 : HIT // 8]}

    def spoil(tables: list[list[int]]) -> None:
        for group, ids in dead(tables).items():
            overwrite_with_nan(ours, group, ids)

    def spoil_dead(*_: Any) -> None:
        tables = block_tables(ours)
        seen.append({g: len(ids) for g, ids in dead(tables).items()})
        spoil(tables)

    def spoil_newer_too(*_: Any) -> None:
        tables = block_tables(ours)
        spoil(tables)
        overwrite_with_nan(ours, 4, [tables[4][HIT // 4 - 1]])

    seen: list[dict[int, int]] = []
    with deepseek({"url": ""}) as ours:
        ours.ask(ROUND[:1])
        with around_loads(ours, after=spoil_dead):
            loaded = ask_again(ours, ROUND[0])
        assert seen == [{4: 1, 5: 16}]
        # The engine took those blocks for loaded ones: now it serves them from its own cache.
        hits = ours.counters["hits"]
        [cached] = ours.ask(ROUND[:1])
        assert (cached.cached_tokens, ours.counters["hits"]) == (HIT, hits)
        with around_loads(ours, after=spoil_newer_too):
            spoiled = ask_again(ours, ROUND[0])
    assert loaded.same_output(plain[0])
    assert cached.same_output(plain[0])
    assert all(math.isnan(p) for p in spoiled.logprobs)


@pytest.mark.parametrize(
    ("policy", "step_tokens"), [("dense", 2048), ("end", 2048), ("auto:512", 400)]
)
def test_states_are_recognized_and_a_prompt_takes_the_bytes_that_the_plan_says(
    policy: str, step_tokens: int
) -> None:
    extra = {"url": "memory://", "policy": policy}
    with deepseek(extra, max_num_batched_tokens=step_tokens) as ours:
        ours.ask(ROUND[:1])
        ours.settle()
        stored, copied = ours.counters["stored_bytes"], ours.worker_side.counters
        layout = ours.scheduler_side.ledger.layout
        assert ours.worker_side._layout == layout == recorded_layout()
    figure = plan_prompt(layout, TOKENS, policy)["stored_bytes"]
    assert stored == copied["copied_out_bytes"] == figure


def test_every_group_that_is_loaded_matters_and_is_loaded_right(plain: list[Answer]) -> None:
    def zero(group: int) -> Callable[..., None]:
        def before(groups: np.ndarray, arena: Any, offsets: np.ndarray) -> None:
            for offset in offsets[groups == group].tolist():
                arena[offset : offset + layout.groups[group].block_bytes] = 0
            touched.append(int((groups == group).sum()))

        return before

    touched: list[int] = []
    with deepseek({"url": ""}) as ours:
        layout = ours.scheduler_side.ledger.layout
        ours.ask(ROUND[:1])
        answers = []
        for group in range(len(layout.groups)):
            with around_loads(ours, before=zero(group)):
                answers.append(ask_again(ours, ROUND[0]))
        whole = ask_again(ours, ROUND[0])
    assert whole.same_output(plain[0])
    for group, (blocks, answer) in enumerate(zip(touched, answers, strict=True)):
        states = layout.groups[group].kind is GroupKind.COMPRESSOR
        assert blocks == ({4: 1, 128: 0}[layout.groups[group].ratio] if states else blocks)
        assert answer.same_logprobs(plain[0]) == (blocks == 0), group
