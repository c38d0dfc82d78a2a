"""Cases of kind GROUP that are decided by layout, reachability and hashes alone."""

from __future__ import annotations

import pytest

from tests.core.tables import full, hit, mamba, scratch, stored, swa
from tierkv import reach
from tierkv.errors import LayoutError
from tierkv.hashing import chain
from tierkv.layout import Layout


def test_case_050_scratch_and_four_states_beside_a_large_block() -> None:
    states = tuple(mamba(3584, f"mamba{i}") for i in range(4))
    layout = Layout((full(3584), scratch(4), *states, swa(64, 128, draft=True)))
    assert (layout.hash_block_tokens, layout.alignment_tokens) == (64, 3584)
    kept = stored(layout, 2 * 3584 + 64)
    assert not [block for block in kept if block[0] == 1], "scratch is never stored"
    assert hit(layout, 2 * 3584 + 65, kept) == 7168


def test_case_051_a_block_below_the_hash_unit_is_scratch_or_a_clear_error() -> None:
    assert Layout((full(8704), scratch(4))).hash_block_tokens == 8704
    with pytest.raises(LayoutError) as caught:
        Layout((full(8704), full(4, "small")), hash_block_tokens=8704)
    for words in ("'small'", "block_tokens 4", "hash_block_tokens 8704", "to 4", "'scratch'"):
        assert words in str(caught.value)


def test_case_053_blocks_per_segment_are_counted_by_group() -> None:
    layout = Layout((full(256), full(256, "b"), swa(64, 128)))
    assert [reach.alignment_block_count(layout, g) for g in range(3)] == [1, 1, 4]


def test_case_054_an_exact_prompt_stops_at_the_state_before_its_end() -> None:
    layout = Layout((full(16), mamba(16)))
    kept = stored(layout, 65)
    assert hit(layout, 64, kept) == 48
    assert reach.need(layout, 1, 48) == (2, 3)
    assert hit(layout, 65, kept) == 64
    assert reach.need(layout, 1, 64) == (3, 4)


def test_case_056_a_full_hit_is_aligned_and_its_keys_agree() -> None:
    layout = Layout((full(16),))
    for tokens in range(1, 258):
        kept = stored(layout, tokens)
        found = hit(layout, tokens, kept)
        assert found == (tokens - 1) // 16 * 16
        if found:
            first, end = reach.load_range(layout, 0, found)
            assert end - first == found // 16


def test_case_059_a_window_load_names_only_blocks_of_the_window() -> None:
    assert reach.load_range(Layout((full(16), swa(16, 32))), 1, 256) == (14, 16)


def test_case_061_a_state_hit_is_aligned_and_needs_exactly_one_block() -> None:
    layout = Layout((full(16), mamba(48)))
    kept = stored(layout, 500)
    for tokens in range(1, 501):
        found = hit(layout, tokens, kept)
        assert found % 48 == 0
        if found:
            first, end = reach.need(layout, 1, found)
            assert (end - first, end * 48) == (1, found)


def test_case_063_a_hit_never_hands_out_kv_beyond_its_state() -> None:
    layout = Layout((full(16), mamba(16)))
    present = {(0, i) for i in range(10)} | {(1, 7)}
    assert hit(layout, 161, present) == 8 * 16
    assert reach.load_range(layout, 0, 128) == (0, 8)
    assert reach.load_range(layout, 1, 128) == (7, 8)


def test_case_064_a_load_starts_at_a_block_boundary() -> None:
    layout = Layout((full(16),))
    kept = stored(layout, 70)
    assert kept == {(0, i) for i in range(4)}
    assert hit(layout, 70, kept, local_tokens=50) == 64
    assert reach.load_range(layout, 0, 64, local_tokens=50) == (3, 4)


def test_case_065_a_hit_inside_a_block_is_not_reported() -> None:
    layout = Layout((full(16),))
    assert reach.longest_hit(layout, 100, lambda *_: True, max_boundary=40) == 32


@pytest.mark.parametrize("policy", ["dense", "end"])
def test_case_066_a_state_is_kept_where_prompts_branch(policy: str) -> None:
    layout = Layout((full(32), mamba(32)))
    kept = stored(layout, 128, policy, junctions=[100])
    assert (1, 2) in kept
    in_common = {(g, i) for g, i in kept if (i + 1) * 32 <= 100}
    assert hit(layout, 128, in_common) == 96


def test_case_068_nothing_below_the_alignment_is_a_hit() -> None:
    layout = Layout((full(48), full(64, "b")))
    assert layout.alignment_tokens == 192
    assert reach.longest_hit(layout, 192, lambda *_: True) == 0
    assert reach.longest_hit(layout, 193, lambda *_: True) == 192


def test_case_069_sharing_a_part_of_a_block_is_no_hit() -> None:
    layout = Layout((full(1152),), hash_block_tokens=64)
    first = list(range(1152))
    second = [*first[:64], *range(5000, 5000 + 1200)]
    names = {chain(first, 64).hashes[reach.block_hash_index(layout, 0, 0)]}
    theirs = chain(second, 64)
    assert theirs.hashes[0] == chain(first, 64).hashes[0]

    def present(group: int, block: int) -> bool:
        return theirs.hashes[reach.block_hash_index(layout, group, block)] in names

    assert reach.longest_hit(layout, len(second), present) == 0
