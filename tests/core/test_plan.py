"""`plan_prompt`: the numbers of `tierkv plan`, held against the oracle and against each other."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracle import Oracle
from tests.core.tables import full, mamba, scratch, swa
from tierkv.errors import ConfigError
from tierkv.layout import Group, GroupKind, Layout
from tierkv.plan import plan_prompt
from tierkv.presets import load_preset, preset_names

_PLAN = """
    model tokens alignment_tokens hash_block_tokens policy groups stored_bytes all_blocks_bytes
    saved_fraction bytes_per_token hit_tokens_resend hit_tokens_longer
"""
_GROUP = """
    name kind block_tokens window_tokens blocks stored_blocks stored_ranges block_bytes
    stored_bytes all_blocks_bytes
"""
FIELDS, GROUP_FIELDS = set(_PLAN.split()), set(_GROUP.split())


def test_the_plan_has_the_fields_of_the_design_and_is_plain_json() -> None:
    plan = plan_prompt(load_preset("dsv4-flash"), 5000, "end", model="dsv4-flash")
    assert set(plan) >= FIELDS
    assert all(set(g) >= GROUP_FIELDS for g in plan["groups"])
    assert json.loads(json.dumps(plan)) == plan
    assert "sessions" not in plan
    assert (plan["model"], plan["policy"], plan["tokens"]) == ("dsv4-flash", "end", 5000)


def test_the_seed_example_in_numbers() -> None:
    plan = plan_prompt(Layout((full(256), swa(64, 128))), 1100, "dense")
    window = plan["groups"][1]
    assert window["stored_ranges"] == [[2, 4], [6, 8], [10, 12], [14, 16]]
    assert (window["blocks"], window["stored_blocks"], window["window_tokens"]) == (17, 8, 128)
    assert window["stored_bytes"] == 8 * 64
    assert window["all_blocks_bytes"] == 17 * 64
    assert plan["groups"][0]["window_tokens"] is None
    assert plan["stored_bytes"] == 8 * 64 + 4 * 256
    assert plan["all_blocks_bytes"] == 17 * 64 + 4 * 256
    assert plan["saved_fraction"] == pytest.approx(1 - 1536 / 2112)
    assert plan["bytes_per_token"] == pytest.approx(1536 / 1100)
    assert (plan["hit_tokens_resend"], plan["hit_tokens_longer"]) == (1024, 1024)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 200), st.sampled_from(["auto:32", "dense", "end", "interval:48"]), st.booleans()
)
def test_the_hits_of_a_plan_agree_with_the_law(tokens: int, policy: str, draft: bool) -> None:
    layout = Layout((full(16, draft=draft), swa(8, 20), mamba(16), scratch(4)))
    oracle = Oracle.of(layout)
    plan = plan_prompt(layout, tokens, policy)
    have = oracle.store(oracle.kept_boundaries(policy, tokens))
    assert plan["hit_tokens_resend"] == oracle.hit(tokens, have)
    assert plan["hit_tokens_longer"] == oracle.hit(tokens + 100, have)
    blocks = {
        (g, i)
        for g, group in enumerate(plan["groups"])
        for lo, hi in group["stored_ranges"]
        for i in range(lo, hi)
    }
    assert blocks == have


def test_dense_deepseek_v4_flash_keeps_at_most_five_of_104_tail_blocks() -> None:
    plan = plan_prompt(load_preset("dsv4-flash"), 256 * 64, "dense")
    tails = [g for g in plan["groups"] if g["kind"] != "full"]
    assert sum(g["blocks"] for g in tails) == 104 * 64
    assert sum(g["stored_blocks"] for g in tails) == 5 * 64
    assert plan["bytes_per_token"] <= 20 * 1024


def test_sessions_count_whole_prompts_that_fit() -> None:
    layout = Layout((full(16),))
    assert plan_prompt(layout, 32, capacity_bytes=100)["sessions"] == 3
    assert plan_prompt(layout, 32, capacity_bytes=31)["sessions"] == 0
    assert plan_prompt(layout, 8, capacity_bytes=100)["sessions"] is None


def test_a_prompt_below_the_alignment_stores_nothing_and_says_so() -> None:
    plan = plan_prompt(Layout((full(16), swa(8, 20))), 7)
    assert (plan["stored_bytes"], plan["saved_fraction"], plan["bytes_per_token"]) == (0, 0, 0)
    assert (plan["hit_tokens_resend"], plan["hit_tokens_longer"]) == (0, 0)


def test_a_compressor_that_costs_its_window_is_noted() -> None:
    odd = Group(
        name="odd",
        kind=GroupKind.COMPRESSOR,
        block_tokens=4,
        block_bytes=1,
        ratio=3,
        window_tokens=6,
    )
    (note,) = plan_prompt(Layout((full(16), odd)), 100)["notes"]
    assert "'odd'" in note
    assert "multiple of ratio 3" in note
    assert plan_prompt(load_preset("dsv4-flash"), 100)["notes"] == []


@pytest.mark.parametrize(("tokens", "policy"), [(0, "dense"), (-1, "dense"), (10, "dens")])
def test_a_plan_that_cannot_be_is_refused(tokens: int, policy: str) -> None:
    with pytest.raises(ConfigError, match=r"write"):
        plan_prompt(Layout((full(16),)), tokens, policy)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_plans_a_million_tokens(name: str) -> None:
    plan = plan_prompt(load_preset(name), 1_000_000, "interval:4096")
    assert 0 < plan["stored_bytes"] <= plan["all_blocks_bytes"]
    assert plan["hit_tokens_longer"] >= 1_000_000 - 4096 - plan["alignment_tokens"]
