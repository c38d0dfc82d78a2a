"""vLLM's own lookup over a pool that holds only what tierkv keeps.

No model and no worker: the engine's block pool and coordinator by themselves. Compressor states
count here as what the engine believes them to be, sliding windows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Block, Oracle
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from tierkv import reach
from tierkv.connectors.vllm.layout import engine_layout
from tierkv.layout import Group, GroupKind, Layout

LAYOUTS = {
    data["name"]: Layout.from_dict(data)
    for data in json.loads((Path(__file__).parent / "data" / "kv_configs.json").read_text())
}
POOL_BLOCKS = 4000
POLICIES = ("dense", "end", "interval:512", "auto")


@pytest.fixture(scope="module", autouse=True)
def registered_specs() -> None:
    register_all_kvcache_specs(None)


# The engine's side ------------------------------------------------------------------------


def spec_of(group: Group) -> Any:
    """The engine's specification of a group."""
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    block = group.block_tokens
    match group.kind:
        case GroupKind.FULL:
            return FullAttentionSpec(block, **heads)
        case GroupKind.SLIDING_WINDOW:
            window, extra = group.window_tokens, group.extra_tokens
            return SlidingWindowSpec(
                block, **heads, sliding_window=window, extra_retained_tokens=extra
            )
        case GroupKind.CHUNKED_LOCAL:
            return ChunkedLocalAttentionSpec(
                block, **heads, attention_chunk_size=group.chunk_tokens
            )
        case GroupKind.RECURRENT:
            # "all": states are named at block ends only, never inside a block.
            return MambaSpec(block, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="all")
        case GroupKind.SCRATCH:
            return SlidingWindowMLASpec(block, **heads, sliding_window=8, bounded_replay=True)
    raise AssertionError(group.kind)


def config_of(layout: Layout, retention: int | None = None) -> KVCacheConfig:
    """The engine's configuration; retention None: the tails of all boundaries are cached."""
    return KVCacheConfig(
        POOL_BLOCKS,
        [],
        [
            KVCacheGroupSpec([f"layer.{i}"], spec_of(g), is_eagle_group=g.draft)
            for i, g in enumerate(layout.groups)
        ],
        prefix_cache_retention_interval=retention,
        hash_block_size=layout.hash_block_tokens,
        cache_hit_alignment_tokens=layout.alignment_tokens,
    )


class Engine:
    """The engine's coordinator over a pool with the given blocks of one prompt."""

    def __init__(
        self,
        layout: Layout,
        chain: Sequence[bytes],
        blocks: Collection[Block],
        retention: int | None = None,
    ) -> None:
        self.layout = layout
        self.coordinator: KVCacheCoordinator = get_kv_cache_coordinator(
            config_of(layout, retention),
            max_model_len=1 << 16,
            max_in_flight_tokens=1 << 16,
            use_eagle=any(g.draft for g in layout.groups),
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=layout.alignment_tokens,
            hash_block_size=layout.hash_block_tokens,
        )
        pool = self.coordinator.block_pool
        request = SimpleNamespace(block_hashes=list(chain))
        for g, group in enumerate(layout.groups):
            mine = [block for index, block in blocks if index == g]
            table = [pool.null_block] * (max(mine, default=-1) + 1)
            for block, page in zip(mine, pool.get_new_blocks(len(mine)), strict=True):
                table[block] = page
            pool.cache_full_blocks(request, table, 0, len(table), group.block_tokens, g)

    def compute(self, chain: Sequence[bytes], tokens: int) -> None:
        """Have a prompt computed at once, and cached as the engine does it."""
        request = SimpleNamespace(
            request_id="a",
            block_hashes=list(chain),
            num_prompt_tokens=tokens,
            num_tokens=tokens,
            shared_prefix_boundary=None,
        )
        pool, managers = self.coordinator.block_pool, self.coordinator.single_type_managers
        for group, manager in zip(self.layout.groups, managers, strict=True):
            manager.req_to_blocks["a"] = pool.get_new_blocks(-(-tokens // group.block_tokens))
        self.coordinator.cache_blocks(request, tokens)

    def hit(self, chain: Sequence[bytes], tokens: int) -> int:
        """The engine's longest hit of `tokens` tokens; the last one is always computed."""
        _, found, _ = self.coordinator.find_longest_cache_hit(list(chain), tokens - 1)
        return int(found)


def chain_of(layout: Layout, tokens: int, *, leaves_at: int | None = None) -> list[bytes]:
    """The hashes of a prompt; those of another one from the unit that holds `leaves_at` on."""
    unit, parent, chain = layout.hash_block_tokens, b"root", []
    for end in range(unit, tokens + 1, unit):
        other = leaves_at is not None and end > leaves_at
        parent = hashlib.sha256(parent + (b"other" if other else b"same")).digest()
        chain.append(parent)
    return chain


# Our side ---------------------------------------------------------------------------------


def kept(
    layout: Layout, policy: str, tokens: int, produced: Collection[int] | None = None
) -> set[Block]:
    ranges = reach.keep(layout, reach.Policy.parse(policy), tokens, produced)
    return {(g, i) for g, r in enumerate(ranges) for lo, hi in r.tolist() for i in range(lo, hi)}


def our_hit(layout: Layout, tokens: int, shared: int, blocks: Collection[Block]) -> int:
    """The hit of a prompt that shares its first `shared` tokens with the stored one."""
    return reach.longest_hit(layout, tokens, lambda g, i: (g, i) in reached(layout, shared, blocks))


def reached(layout: Layout, shared: int, blocks: Collection[Block]) -> set[Block]:
    """Those blocks whose name the first `shared` tokens decide."""
    return {(g, i) for g, i in blocks if (i + 1) * layout.groups[g].block_tokens <= shared}


def asked(tokens: int, longest: int) -> list[tuple[int, int]]:
    """(length, shared tokens): the same prompt, longer and shorter ones, and some that branch."""
    lengths = {tokens, tokens + 1, tokens + longest, max(1, tokens - 1), tokens // 2 + 1}
    branches = [(tokens + longest, tokens * n // 7) for n in range(1, 7)]
    return [(n, min(n, tokens)) for n in sorted(lengths)] + branches


def compare(
    layout: Layout,
    policy: str,
    tokens: int,
    questions: Iterable[tuple[int, int]],
    produced: Collection[int] | None = None,
) -> None:
    """The engine's hits with our blocks: as long as with all, where the policy keeps the boundary.

    And equal to ours, so what the connector promises is what the engine would find.
    """
    oracle = Oracle(layout.groups, layout.alignment_tokens)
    chain = chain_of(layout, tokens)
    ours = kept(layout, policy, tokens, produced)
    theirs = oracle.everything(tokens, produced)
    assert ours <= theirs
    at = reach.boundaries(layout, reach.Policy.parse(policy), tokens, produced).tolist()
    sparse, everything = Engine(layout, chain, ours), Engine(layout, chain, theirs)
    for length, shared in questions:
        other = chain_of(layout, length, leaves_at=shared)
        found, best = sparse.hit(other, length), everything.hit(other, length)
        reachable = max((b for b in at if b <= best), default=0)
        unit = layout.hash_block_tokens
        mine = our_hit(layout, length, shared // unit * unit, ours)
        assert reachable <= found <= best, (length, shared)
        assert found == mine, (length, shared)
        if policy == "dense":
            assert found == best


# Known layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_engine_finds_with_our_blocks_what_it_finds_with_all(name: str, policy: str) -> None:
    layout = LAYOUTS[name]
    step = layout.alignment_tokens
    long = max(1500, 3 * step + 11)
    for tokens in (step - 1, step, step + 1, 2 * step, 3 * step - 1, long):
        compare(layout, policy, tokens, asked(tokens, step))


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_one_block_of_the_last_boundary_the_engine_finds_less(name: str) -> None:
    layout = LAYOUTS[name]
    tokens = 3 * layout.alignment_tokens + 1
    chain = chain_of(layout, tokens)
    ours = kept(layout, "dense", tokens)
    full = Engine(layout, chain, ours).hit(chain, tokens)
    assert full == 3 * layout.alignment_tokens
    for g in range(len(layout.groups)):
        first, end = reach.need(layout, g, full)
        for lost in {first, end - 1} if first < end else ():
            fewer = Engine(layout, chain, ours - {(g, lost)})
            assert fewer.hit(chain, tokens) < full, (g, lost)


def test_states_that_are_kept_exactly_are_too_few_for_the_engines_own_pool() -> None:
    # So they are looked up and promised by the connector, which knows what a state is.
    windows = LAYOUTS["deepseek_v4_tiny"]
    ratios = {4: 4, 5: 128}
    exact = Layout(
        tuple(
            replace(g, kind=GroupKind.COMPRESSOR, ratio=ratios[i]) if i in ratios else g
            for i, g in enumerate(windows.groups)
        ),
        windows.hash_block_tokens,
        windows.alignment_tokens,
    )
    ours = kept(exact, "dense", 1500)
    chain = chain_of(windows, 1500)
    assert Engine(windows, chain, ours).hit(chain, 1500) == 0
    assert our_hit(exact, 1500, 1500, ours) == 1280
    assert (len(ours), len(kept(windows, "dense", 1500))) == (40, 125)


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"qwen3_next"}))
def test_the_connector_reads_these_groups_from_the_engines_specifications(name: str) -> None:
    layout = LAYOUTS[name]
    assert engine_layout(config_of(layout), layout.block_bytes) == layout


@pytest.mark.parametrize("steps", [None, 0, 2], ids=["every", "ends", "each second"])
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n.startswith(("deepseek_v4", "g"))])
def test_the_policy_engine_hits_wherever_the_engines_own_retention_does(
    name: str, steps: int | None
) -> None:
    layout = LAYOUTS[name]
    step = layout.alignment_tokens
    retention = None if steps is None else steps * step
    policy = str(reach.Policy.parse("engine").resolve(retention))
    for tokens in (step, 2 * step, 5 * step + 1, 6 * step - 1, 6 * step):
        chain = chain_of(layout, tokens)
        engine = Engine(layout, chain, (), retention)
        engine.compute(chain, tokens)
        ours = kept(layout, policy, tokens)
        for length, shared in asked(tokens, step):
            other = chain_of(layout, length, leaves_at=shared)
            shared -= shared % layout.hash_block_tokens
            mine, theirs = our_hit(layout, length, shared, ours), engine.hit(other, length)
            assert mine >= theirs
            # With a retention the engine keeps the end that the same prompt can reach. Ours also
            # has the one that a longer prompt reaches, where the prompt ends on a boundary.
            if retention is None or length == shared == tokens or tokens % step:
                assert mine == theirs


# Random layouts ---------------------------------------------------------------------------

KINDS = ("full", "sliding_window", "recurrent", "scratch")
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def layouts(draw: st.DrawFn, *, drafts: bool = False) -> Layout:
    """Groups that the coordinator accepts.

    Chunked local groups want blocks of the alignment, and no draft. A window of one token is left
    out: the engine wants the block that ends at the boundary, which nothing reads.
    """
    unit = draw(st.sampled_from([1, 2, 4]))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5))
    chunked = not drafts and draw(st.booleans())
    extra = draw(st.sampled_from([0, 0, 1, 5]))  # one number for all: it comes from the drafts
    if chunked:
        sizes = sizes[:1] * len(sizes)
    groups = []
    for i, size in enumerate(sizes):
        kind = draw(st.sampled_from((*KINDS, "chunked_local") if chunked else KINDS))
        if i == 0 and kind == "scratch":
            kind = "full"
        block, more = size * unit, {}
        if kind == "sliding_window":
            more = {"window_tokens": draw(st.integers(2, 40)), "extra_tokens": extra}
        elif kind == "chunked_local":
            more = {"chunk_tokens": block * draw(st.integers(1, 5))}
        mark = drafts and kind in ("full", "sliding_window") and (i == 0 or draw(st.booleans()))
        groups.append(
            Group(
                name=f"{i}.{kind}",
                kind=GroupKind(kind),
                block_tokens=block,
                block_bytes=1,
                draft=mark,
                **more,
            )
        )
    alignment = Layout(tuple(replace(g, kind=_plain(g), **_NO_GEOMETRY) for g in groups))
    made = Layout(tuple(groups), alignment_tokens=alignment.alignment_tokens)
    if len(groups) == 1:  # the engine gives a lone group units as large as its blocks
        made = replace(made, hash_block_tokens=groups[0].block_tokens)
    return made


_NO_GEOMETRY = {"window_tokens": 0, "extra_tokens": 0, "chunk_tokens": 0, "draft": False}


def _plain(_: Group) -> GroupKind:
    return GroupKind.FULL  # the engine's alignment counts every group, scratch ones too


@st.composite
def cases(
    draw: st.DrawFn, *, drafts: bool = False
) -> tuple[Layout, str, int, list[tuple[int, int]], list[int] | None]:
    layout = draw(layouts(drafts=drafts))
    step = layout.alignment_tokens
    tokens = draw(st.integers(1, 5 * step + 1))
    policy = draw(st.sampled_from(["dense", "end", f"interval:{2 * step}", f"auto:{3 * step}"]))
    questions = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 6 * step))
        questions.append((length, draw(st.integers(0, min(length, tokens)))))
    produced = None
    if reach.has_states(layout) and draw(st.booleans()):
        ends = list(range(step, tokens + 1, step))
        produced = [b for b in ends if draw(st.booleans())]
    return layout, policy, tokens, [(tokens, tokens), *questions], produced


@SETTINGS
@given(cases())
def test_random_layouts_give_the_engine_what_everything_would(
    case: tuple[Layout, str, int, list[tuple[int, int]], list[int] | None],
) -> None:
    layout, policy, tokens, questions, produced = case
    compare(layout, policy, tokens, questions, produced)


@SETTINGS
@given(cases(drafts=True))
def test_with_draft_groups_our_hits_are_at_least_the_engines_and_equal_the_oracle(
    case: tuple[Layout, str, int, list[tuple[int, int]], list[int] | None],
) -> None:
    layout, policy, tokens, questions, produced = case
    oracle = Oracle(layout.groups, layout.alignment_tokens)
    chain = chain_of(layout, tokens)
    ours = kept(layout, policy, tokens, produced)
    engine = Engine(layout, chain, ours)
    for length, shared in questions:
        shared -= shared % layout.hash_block_tokens
        known = reached(layout, shared, ours)
        mine = our_hit(layout, length, shared, ours)
        assert mine == oracle.hit(length, known)
        assert mine >= engine.hit(chain_of(layout, length, leaves_at=shared), length)
