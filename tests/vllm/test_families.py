"""Every model family: hits as long as the engine's own, the same output, and twins that see it."""

from __future__ import annotations

import pytest
from families import FAMILIES, PROMPTS, Family, measure, planned_bytes

from tierkv.layout import GroupKind
from tierkv.plan import plan_prompt

# DeepSeek V4 has a file of its own, and takes long.
each = pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.model != "tinydsv4"], ids=lambda f: f.model
)


@each
def test_hits_are_the_engines_own_and_so_is_the_output(family: Family) -> None:
    found = measure(family)
    assert found.equal_hits
    assert min(found.hit_tokens) > family.tokens // 2
    assert found.equal_output
    assert [a.cached_tokens for a in found.ours[0]] == [0] * PROMPTS


@each
def test_pages_hold_what_was_saved_and_a_hit_moves_what_it_reads(family: Family) -> None:
    found = measure(family)
    assert found.loaded_blocks > 0
    assert found.wrong_blocks == 0
    assert found.hit_bytes == sum(planned_bytes(found.layout, n) for n in found.hit_tokens)


@each
def test_twin_sees_every_group_whose_loaded_bytes_are_wrong(family: Family) -> None:
    found = measure(family)
    assert list(found.corrupted) == list(range(len(found.layout.groups)))
    assert found.sees_corruption


@each
def test_a_prompt_takes_the_bytes_that_the_plan_says(family: Family) -> None:
    found = measure(family)
    figure = plan_prompt(found.layout, family.tokens)
    assert found.stored_bytes == figure["stored_bytes"] * PROMPTS
    assert found.stored_bytes <= found.offered_bytes
    window_free = all(g.kind is GroupKind.FULL for g in found.layout.groups)
    assert (found.stored_bytes == found.offered_bytes) == window_free


def test_each_kind_of_group_is_there() -> None:
    kinds = {g.kind for f in FAMILIES if f.model != "tinydsv4" for g in measure(f).layout.groups}
    assert kinds == {
        GroupKind.FULL,
        GroupKind.SLIDING_WINDOW,
        GroupKind.CHUNKED_LOCAL,
        GroupKind.RECURRENT,
    }
