"""Presets: every file says where it comes from, and its bytes follow from public numbers."""

from __future__ import annotations

import pytest

from tierkv.errors import ConfigError
from tierkv.presets import load_preset, preset, preset_names


def kv(layers: int, heads: int, head_dim: int, tokens: int) -> int:
    """Bytes of keys and values in bfloat16."""
    return layers * 2 * heads * head_dim * 2 * tokens


def gdn_state(key_heads: int, value_heads: int, head_dim: int, kernel: int) -> int:
    """Bytes of one gated-delta-net layer's state: convolution in bfloat16, recurrence float32."""
    channels = (2 * key_heads + value_heads) * head_dim
    return (kernel - 1) * channels * 2 + value_heads * head_dim * head_dim * 4


EXPECTED = {
    "llama3-70b": [("full", kv(80, 8, 128, 16))],
    "deepseek-v3": [("full", 61 * (512 + 64) * 2 * 64)],
    "gemma3-27b": [("full", kv(10, 16, 128, 16)), ("sliding_window", kv(52, 16, 128, 16))],
    "gpt-oss-120b": [("sliding_window", kv(18, 8, 64, 16)), ("full", kv(18, 8, 64, 16))],
    "qwen3-next-80b": [
        ("recurrent", 36 * gdn_state(16, 32, 128, 4)),
        ("full", kv(12, 2, 256, 1056)),
    ],
    "dsv4-flash": [
        ("sliding_window", 22 * 37376),
        ("sliding_window", 21 * 37376),
        ("full", 985664),
        ("compressor", 860160),
        ("compressor", 655360),
    ],
}


def test_the_presets_are_those_that_are_checked_here() -> None:
    assert preset_names() == tuple(sorted(EXPECTED))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_s_bytes_follow_from_its_source(name: str) -> None:
    made = preset(name)
    assert [(str(g.kind), g.block_bytes) for g in made.layout.groups] == EXPECTED[name]
    assert len(made.source) > 80
    assert made.name == name
    assert load_preset(name) == made.layout


def test_the_state_formula_gives_what_the_engine_allocated_for_a_small_model() -> None:
    # vLLM 0.32.0, Qwen3-Next with 2 key heads and 4 value heads of 128: 268288 bytes a layer.
    assert gdn_state(2, 4, 128, 4) == 268_288


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-70b'.*dsv4-flash") as caught:
        load_preset("lama3-70b")
    assert "\n" not in str(caught.value)
