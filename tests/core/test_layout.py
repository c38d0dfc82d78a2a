"""Layouts: resolved once, and one line for each that cannot be."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.core.tables import full, mamba, scratch, swa
from tierkv.errors import LayoutError
from tierkv.layout import Group, GroupKind, Layout

FULL: dict[str, Any] = {"name": "mla", "kind": "full", "block_tokens": 256, "block_bytes": 985600}
SWA: dict[str, Any] = {
    "name": "swa",
    "kind": "sliding_window",
    "block_tokens": 64,
    "window_tokens": 128,
    "block_bytes": 1607168,
}


def refusal(*groups: Any, **top: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        Layout.from_dict({"groups": list(groups), **top})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_example_of_the_design_is_read() -> None:
    example = {
        "hash_block_tokens": None,
        "groups": [FULL, {**SWA, "extra_tokens": 0, "draft": False}],
    }
    layout = Layout.from_dict(example)
    assert (layout.hash_block_tokens, layout.alignment_tokens) == (64, 256)
    assert layout.block_bytes == (985600, 1607168)
    assert layout.lookahead_blocks == (0, 0)


def test_one_group_s_unit_is_its_block_and_scratch_counts_for_nothing() -> None:
    layout = Layout((full(48), scratch(5)))
    assert (layout.hash_block_tokens, layout.alignment_tokens) == (48, 48)
    odd = Layout((full(3584), swa(1000, 9)))
    assert (odd.hash_block_tokens, odd.alignment_tokens) == (8, 448_000)


def test_an_engine_may_say_otherwise() -> None:
    layout = Layout((full(256),), hash_block_tokens=4, alignment_tokens=512)
    assert (layout.hash_block_tokens, layout.alignment_tokens) == (4, 512)


def test_every_kind_survives_its_json_form_and_a_pickle() -> None:
    groups = [
        FULL,
        {**SWA, "extra_tokens": 3, "draft": True, "padded_block_bytes": 2_000_000},
        {
            "name": "c",
            "kind": "chunked_local",
            "block_tokens": 64,
            "chunk_tokens": 8192,
            "block_bytes": 1,
        },
        {"name": "r", "kind": "recurrent", "block_tokens": 256, "block_bytes": 1},
        {
            "name": "k",
            "kind": "compressor",
            "block_tokens": 4,
            "ratio": 4,
            "window_tokens": 8,
            "block_bytes": 1,
        },
        {"name": "s", "kind": "scratch", "block_tokens": 3, "block_bytes": 1},
    ]
    layout = Layout.from_dict({"groups": groups})
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout.to_dict()["groups"] == groups


def test_a_mark_is_shared_by_groups_of_equal_kind_block_and_window() -> None:
    layout = Layout(
        (
            full(64),
            full(64, "twin", draft=True),
            full(128, "larger"),
            swa(64, 128),
            swa(64, 128, "twin window", draft=True),
            swa(64, 256, "wider"),
        )
    )
    assert layout.lookahead_blocks == (1, 1, 0, 1, 1, 0)


def test_states_and_scratch_have_no_lookahead_even_where_marked() -> None:
    state = Group(name="r", kind=GroupKind.RECURRENT, block_tokens=64, block_bytes=1, draft=True)
    spare = Group(name="s", kind=GroupKind.SCRATCH, block_tokens=64, block_bytes=1, draft=True)
    assert Layout((full(64), state, spare, mamba(64))).lookahead_blocks == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_tokens": 0}, "group 'swa': block_tokens is 0; write 1 or more"),
        ({"block_bytes": 0}, "group 'swa': block_bytes is 0; write 1 or more"),
        ({"window_tokens": 0}, "group 'swa': window_tokens is 0; write 1 or more"),
        ({"window_tokens": -1}, "window_tokens is -1; write a whole number"),
        ({"block_tokens": 1.5}, "block_tokens is 1.5; write a whole number"),
        ({"block_tokens": True}, "block_tokens is True; write a whole number"),
        ({"padded_block_bytes": 5}, "padded_block_bytes 5 is below block_bytes 1607168"),
        ({"chunk_tokens": 8}, "chunk_tokens belongs to kind 'chunked_local'"),
        ({"ratio": 8}, "ratio belongs to kind 'compressor'; this group is 'sliding_window'"),
        ({"draft": "yes"}, "draft is 'yes'; write true or false"),
        ({"kind": "sliding_windw"}, "did you mean 'sliding_window'"),
        ({"window": 8}, "unknown key 'window' (did you mean 'window_tokens'?)"),
        ({"name": ""}, "has no name"),
    ],
)
def test_a_group_that_cannot_be_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    assert says in refusal(FULL, {**SWA, **change})


@pytest.mark.parametrize("key", ["name", "kind", "block_tokens", "block_bytes"])
def test_a_missing_key_is_named(key: str) -> None:
    assert f"groups[0]: {key!r} is missing" in refusal({k: v for k, v in FULL.items() if k != key})


def test_a_window_on_another_kind_is_refused_and_both_its_kinds_are_named() -> None:
    message = refusal({**FULL, "window_tokens": 4})
    assert "window_tokens belongs to kind 'sliding_window' or 'compressor'" in message


def test_a_compressor_needs_a_ratio_and_a_window_that_holds_it() -> None:
    base = {"name": "k", "kind": "compressor", "block_tokens": 4, "block_bytes": 1}
    assert "window_tokens is 0" in refusal({**base, "ratio": 4})
    assert "ratio is 0; write 1 or more" in refusal({**base, "window_tokens": 4})
    assert "window_tokens 4 is below ratio 8" in refusal({**base, "window_tokens": 4, "ratio": 8})
    assert "chunk_tokens is 0" in refusal({**base, "kind": "chunked_local"})


def test_a_layout_that_cannot_be_is_refused_in_one_line() -> None:
    assert "at least one group" in refusal()
    assert "'mla' is used twice" in refusal(FULL, FULL)
    assert "no group is reusable" in refusal({**FULL, "kind": "scratch"})
    assert "set hash_block_tokens to 64" in refusal(FULL, SWA, hash_block_tokens=128)
    assert "multiple of 256" in refusal(FULL, SWA, alignment_tokens=128)
    assert "did you mean 'groups'" in refusal(FULL, group=[])
    assert "groups[0]: must be an object" in refusal(7)


def test_a_group_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(LayoutError, match="did you mean 'swa'"):
        Layout((full(64), swa(64, 2))).index_of("swaa")
    assert Layout((full(64), swa(64, 2))).index_of("swa") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"groups": [{}]}', r"groups\[0\]: 'name' is missing"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_not_a_layout_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "layout.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LayoutError, match=says) as caught:
        Layout.from_file(path)
    assert str(path) in str(caught.value)
