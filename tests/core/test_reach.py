"""Reachability by example: the table's rows, policies, and the seed example."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.tables import full, hit, mamba, scratch, stored, swa
from tierkv import reach
from tierkv.errors import ConfigError
from tierkv.layout import Group, GroupKind, Layout


def compressor(block: int, ratio: int, window: int) -> Group:
    return Group(
        name="state",
        kind=GroupKind.COMPRESSOR,
        block_tokens=block,
        block_bytes=1,
        ratio=ratio,
        window_tokens=window,
    )


def chunked(block: int, chunk: int) -> Group:
    return Group(
        name="chunk",
        kind=GroupKind.CHUNKED_LOCAL,
        block_tokens=block,
        block_bytes=1,
        chunk_tokens=chunk,
    )


@pytest.mark.parametrize(
    ("group", "boundary", "expected"),
    [
        (full(256), 512, (0, 2)),
        (full(256, draft=True), 512, (0, 3)),
        (swa(64, 128), 512, (6, 8)),
        (swa(64, 129), 512, (6, 8)),
        (swa(64, 130), 512, (5, 8)),
        (swa(64, 128, extra=2), 512, (5, 8)),
        (swa(64, 1), 512, (8, 8)),
        (swa(64, 1, draft=True), 512, (8, 9)),
        (swa(64, 4096), 512, (0, 8)),
        (chunked(64, 192), 512, (6, 8)),
        (chunked(64, 512), 512, (8, 8)),
        (mamba(256), 512, (1, 2)),
        (compressor(4, 4, 8), 512, (127, 128)),
        (compressor(8, 128, 128), 512, (64, 64)),
        (compressor(4, 3, 6), 512, (126, 128)),
        (scratch(4), 512, (128, 128)),
    ],
)
def test_a_hit_needs_what_the_table_says(
    group: Group, boundary: int, expected: tuple[int, int]
) -> None:
    layout = Layout((full(256, "other"), group))
    assert reach.need(layout, 1, boundary) == expected


def test_swa_alignment_skip() -> None:
    layout = Layout((full(256), swa(64, 128)))
    assert reach.alignment_block_count(layout, 1) == 4
    kept = reach.keep(layout, reach.DENSE, 1024)
    assert kept[0].tolist() == [[0, 4]]
    assert kept[1].tolist() == [[2, 4], [6, 8], [10, 12], [14, 16]]


@pytest.mark.parametrize(
    ("groups", "per_segment", "kept"),
    [
        ((full(256), full(64, "small"), swa(64, 128)), 4, [[2, 4], [6, 8], [10, 12], [14, 16]]),
        ((full(512), full(256, "small"), swa(64, 128)), 8, [[6, 8], [14, 16]]),
        ((full(512), swa(64, 129)), 8, [[6, 8], [14, 16]]),
        ((full(512), swa(64, 130)), 8, [[5, 8], [13, 16]]),
        ((full(512), swa(64, 450)), 8, [[0, 16]]),
        ((full(256), swa(256, 128)), 1, [[0, 4]]),
        ((full(256), swa(256, 1)), 1, []),
        ((full(256), swa(64, 128, draft=True)), 4, [[2, 5], [6, 9], [10, 13]]),
    ],
)
def test_swa_alignment_skip_in_other_tables(
    groups: tuple[Group, ...], per_segment: int, kept: list[list[int]]
) -> None:
    layout, window = Layout(groups), len(groups) - 1
    assert reach.alignment_block_count(layout, window) == per_segment
    assert reach.keep(layout, reach.DENSE, 1024)[window].tolist() == kept


def test_block_sizes_that_do_not_divide_each_other() -> None:
    odd = Layout((full(3584), swa(1000, 2500)))
    step = odd.alignment_tokens
    assert (step, odd.hash_block_tokens) == (448_000, 8)
    kept = reach.keep(odd, reach.DENSE, 2 * step + 5)
    assert kept[0].tolist() == [[0, 250]]
    assert kept[1].tolist() == [[445, 448], [893, 896]]
    three = Layout((full(3584), swa(64, 128), compressor(4, 4, 8)))
    assert (three.alignment_tokens, three.hash_block_tokens) == (3584, 4)
    kept = reach.keep(three, reach.DENSE, 2 * 3584)
    assert [k.tolist() for k in kept] == [
        [[0, 2]],
        [[54, 56], [110, 112]],
        [[895, 896], [1791, 1792]],
    ]


@pytest.mark.parametrize("other", [swa(64, 257), swa(256, 128), swa(64, 1000)])
def test_a_window_that_covers_the_segment_skips_nothing(other: Group) -> None:
    layout = Layout((full(256), other))
    blocks = 1024 // other.block_tokens
    assert reach.keep(layout, reach.DENSE, 1024)[1].tolist() == [[0, blocks]]


def test_where_every_hit_ends_on_the_ratio_a_compressor_costs_its_overlap_only() -> None:
    exact = Layout((full(256), compressor(4, 4, 8)))
    assert not reach.falls_back_to_window(exact, 1)
    assert not reach.falls_back_to_window(exact, 0)
    odd = Layout((full(250), compressor(2, 4, 8)))
    assert reach.falls_back_to_window(odd, 1)
    assert reach.need(odd, 1, 250) == (121, 125)


@pytest.mark.parametrize("boundary", [0, -256, 100, 257])
def test_only_boundaries_are_asked_about(boundary: int) -> None:
    layout = Layout((full(256),))
    with pytest.raises(ValueError, match=f"boundary {boundary} is not a positive multiple"):
        reach.need(layout, 0, boundary)
    with pytest.raises(ValueError, match="alignment_tokens 256"):
        reach.load_range(layout, 0, boundary)


def test_a_block_is_named_by_the_hash_of_its_last_unit() -> None:
    layout = Layout((full(256), swa(64, 128), scratch(4)))
    assert layout.hash_block_tokens == 64
    assert [reach.block_hash_index(layout, 0, i) for i in (0, 1)] == [3, 7]
    assert [reach.block_hash_index(layout, 1, i) for i in (0, 1)] == [0, 1]
    with pytest.raises(ValueError, match=r"'scratch'.*no hash"):
        reach.block_hash_index(layout, 2, 0)
    assert reach.alignment_block_count(layout, 2) == 0


@pytest.mark.parametrize("text", ["auto", "auto:512", "dense", "end", "engine", "interval:4096"])
def test_a_policy_is_written_as_it_is_read(text: str) -> None:
    policy = reach.Policy.parse(text)
    assert str(policy) == text
    assert reach.Policy.parse(policy) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dens", "did you mean 'dense'"),
        ("", "write auto, dense, end, engine or interval:TOKENS"),
        ("dense:4", "write auto, dense, end, engine or interval:TOKENS"),
        ("auto:", "like auto:4096"),
        ("auto:0", "like auto:4096"),
        ("interval", "like interval:4096"),
        ("interval:0", "like interval:4096"),
        ("interval:-5", "like interval:4096"),
        ("interval:4k", "like interval:4096"),
        ("interval:²", "like interval:4096"),
    ],
)
def test_a_policy_that_is_not_known_is_refused_with_the_known_ones(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        reach.Policy.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "tokens", "expected"),
    [
        ("dense", 1023, [256, 512, 768]),
        ("dense", 1024, [256, 512, 768, 1024]),
        ("dense", 255, []),
        ("end", 1023, [768]),
        ("end", 1024, [768, 1024]),
        ("end", 256, [256]),
        ("end", 10, []),
        ("interval:512", 1100, [512, 1024]),
        ("interval:600", 1300, [512, 1024]),
        ("interval:1", 600, [256, 512]),
        ("interval:5000", 600, []),
    ],
)
def test_a_policy_keeps_these_boundaries(policy: str, tokens: int, expected: list[int]) -> None:
    layout = Layout((full(256), swa(64, 128)))
    kept = reach.boundaries(layout, reach.Policy.parse(policy), tokens)
    assert kept.tolist() == expected
    assert kept.dtype == np.int64


def test_junctions_are_kept_under_every_policy_where_a_hit_can_end() -> None:
    layout = Layout((full(256),))
    for text in ("end", "interval:2048"):
        policy = reach.Policy.parse(text)
        kept = reach.boundaries(layout, policy, 2100, junctions=[10, 700, 2099, 9999])
        assert kept.tolist() == [512, 2048]


def test_states_that_were_not_made_drop_a_boundary_only_where_there_are_states() -> None:
    made = {256, 777}
    states = Layout((full(256), mamba(256)))
    plain = Layout((full(256),))
    assert reach.boundaries(states, reach.DENSE, 1024, made).tolist() == [256]
    assert reach.boundaries(plain, reach.DENSE, 1024, made).tolist() == [256, 512, 768, 1024]
    assert reach.boundaries(states, reach.DENSE, 1024, set()).tolist() == []


def test_a_stored_window_alone_serves_a_layout_without_full_attention() -> None:
    layout = Layout((swa(16, 32), mamba(16)))
    kept = stored(layout, 160, "end")
    assert kept == {(0, 7), (0, 8), (0, 9), (1, 8), (1, 9)}
    assert hit(layout, 160, kept) == 144
    assert hit(layout, 161, kept) == 160


def test_the_engine_s_own_prefix_is_no_answer() -> None:
    layout = Layout((full(16),))
    four = {(0, i) for i in range(4)}
    assert hit(layout, 100, four, local_tokens=64) == 0
    assert hit(layout, 100, four, local_tokens=80) == 0
    assert hit(layout, 100, {(0, 5)}, local_tokens=80) == 96


def test_a_lookup_asks_few_questions_where_nothing_is_there() -> None:
    layout = Layout((full(256), swa(64, 128)))
    asked: list[tuple[int, int]] = []

    def nothing(group: int, block: int) -> bool:
        asked.append((group, block))
        return False

    assert reach.longest_hit(layout, 1_000_000, nothing) == 0
    assert asked == [(0, 0)]
