"""Cases of kind PLAN that are decided by reachability alone."""

from __future__ import annotations

import pytest

from tests.core.oracle import Oracle
from tests.core.tables import full, hit, mamba, stored, swa
from tierkv import reach
from tierkv.layout import Layout


def test_case_029_what_is_written_is_read_with_a_draft_window() -> None:
    groups = (full(256), swa(64, 128), swa(64, 128, "swa-draft", draft=True))
    layout, oracle = Layout(groups), Oracle.of(Layout(groups))
    kept = stored(layout, 1024)
    best = oracle.hit(1034, oracle.everything(1024))
    assert hit(layout, 1034, kept) == best > 0
    assert best == 768, "1024 needs a look-ahead block that the first prompt never made"


def test_case_031_the_short_last_segment_is_measured_from_its_own_end() -> None:
    layout = Layout((full(256), swa(64, 128, draft=True)))
    assert (1, 16) in stored(layout, 1024 + 128)
    oracle = Oracle.of(layout)
    for tokens in range(1, 2049):
        kept = stored(layout, tokens)
        assert kept == oracle.store(oracle.kept_boundaries("dense", tokens))
        for later in (tokens, tokens + 1, tokens + 300):
            best = oracle.hit(later, oracle.everything(tokens))
            assert hit(layout, later, kept) == best


def test_case_033_without_a_mark_nothing_is_a_draft_group() -> None:
    layout = Layout((full(16), *(mamba(16, f"mamba{i}") for i in range(3))))
    kept = stored(layout, 64)
    assert hit(layout, 64, kept) == 48
    assert hit(layout, 80, kept) == 64
    assert layout.lookahead_blocks == (0, 0, 0, 0)


@pytest.mark.parametrize(("tokens", "expected"), [(127, 64), (128, 96), (160, 128)])
@pytest.mark.parametrize("policy", ["dense", "end"])
def test_case_037_an_aligned_prompt_hits_itself_and_a_longer_sibling(
    tokens: int, expected: int, policy: str
) -> None:
    layout = Layout((full(32, draft=True),))
    kept = stored(layout, tokens, policy)
    assert hit(layout, tokens, kept) == expected
    assert hit(layout, tokens + 64, kept) == expected
    assert (0, expected // 32) in kept, "the look-ahead of the last boundary is planned"


def test_case_039_groups_looked_up_together_are_stored_together() -> None:
    layout = Layout((full(256), swa(64, 128, "a"), swa(64, 128, "b", draft=True)))
    for tokens in range(1, 1100, 37):
        _, a, b = reach.keep(layout, reach.DENSE, tokens)
        assert a.tolist() == b.tolist()


def test_case_040_the_blocks_loaded_are_the_blocks_looked_up() -> None:
    layout = Layout((swa(16, 32, extra=3),))
    assert reach.load_range(layout, 0, 64) == (1, 4)
    everything = {(0, i) for i in range(4)}
    assert hit(layout, 65, everything) == 64
    assert hit(layout, 65, everything - {(0, 1)}) == 16


def test_case_041_no_window_load_exceeds_its_bound() -> None:
    layout = Layout((full(16), swa(16, 2048)))
    for boundary in range(16, 2 * 2048 + 1, 16):
        for local in (0, boundary - 1000, boundary - 9):
            first, end = reach.load_range(layout, 1, boundary, local_tokens=max(0, local))
            assert 0 <= end - first <= 128
    assert reach.load_range(layout, 1, 4096) == (128, 256)


def test_case_045_a_state_at_the_end_of_a_chunk_is_kept() -> None:
    layout = Layout((full(256), mamba(256)))
    for tokens in [*range(8193, 8448), 8449]:
        kept = stored(layout, tokens, produced={8192})
        assert (1, 31) in kept
        assert hit(layout, tokens, kept) == 8192


def test_case_046_a_prefix_without_its_state_is_not_promised() -> None:
    layout = Layout((full(16), mamba(16)))
    present = {(0, i) for i in range(10)} | {(1, 4)}
    assert hit(layout, 161, present) == 5 * 16
    assert hit(layout, 161, present - {(1, 4)}) == 0
