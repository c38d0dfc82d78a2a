"""Which groups are compressor states: told by the worker's layers, agreed on by the ranks."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stub import BLOCK, Stub, engine_config, full_spec, window_spec
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowMLASpec

from tierkv.connectors.vllm.layout import (
    STATE_LAYERS,
    agreed_state_ratios,
    engine_layout,
    worker_state_ratios,
)
from tierkv.connectors.vllm.scheduler import SchedulerSide
from tierkv.layout import GroupKind


class CompressorStateCache:
    """Stands for the engine's layer."""


class Other:
    """A layer that is something else."""


MODEL = SimpleNamespace(compress_ratios=[16, 8])


@pytest.fixture(autouse=True)
def a_model_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    [(name, cls)] = STATE_LAYERS
    module = ModuleType(name)
    setattr(module, cls, CompressorStateCache)
    monkeypatch.setitem(sys.modules, name, module)


def state_spec(window: int, **more: Any) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=window,
        **more,
    )


def config_with(spec: Any, *names: str) -> KVCacheConfig:
    """A full group, and one of these layers."""
    config = engine_config(full_spec(), spec)
    config.kv_cache_groups[1].layer_names = list(names)
    config.kv_cache_tensors[1].layers = list(names)
    return config


def told(spec: Any, *layers: object, model: object = MODEL, numbers: tuple[int, ...] = ()) -> Any:
    """What the worker says of the second group."""
    places = numbers or (0,) * len(layers)
    names = [f"model.layers.{n}.attn.{i}" for i, n in enumerate(places)]
    config = config_with(spec, *names)
    return worker_state_ratios(config, dict(zip(names, layers, strict=True)), model)[1]


def test_layers_of_the_known_class_are_states_of_their_models_ratio() -> None:
    one, two = CompressorStateCache(), CompressorStateCache()
    assert told(state_spec(16), one, two) == 16
    assert told(state_spec(32), one, two) == 16
    assert told(state_spec(16), one, numbers=(1,)) == 8


@pytest.mark.parametrize(
    ("spec", "layers", "more"),
    [
        (state_spec(16), [Other(), Other()], {}),
        (state_spec(16), [CompressorStateCache(), Other()], {}),
        (state_spec(16), [type("Sub", (CompressorStateCache,), {})()], {}),
        (state_spec(16), [CompressorStateCache()], {"model": SimpleNamespace()}),
        (state_spec(16), [CompressorStateCache()], {"numbers": (7,)}),
        (state_spec(64), [CompressorStateCache()], {}),
        (window_spec(16), [CompressorStateCache()], {}),
        (state_spec(16), [CompressorStateCache()] * 2, {"numbers": (0, 1)}),
    ],
    ids=[
        "another class",
        "mixed",
        "a subclass",
        "no ratios",
        "no such layer",
        "another window",
        "another specification",
        "two ratios",
    ],
)
def test_what_is_not_recognized_is_a_window(
    spec: Any, layers: list[object], more: dict[str, Any]
) -> None:
    assert told(spec, *layers, **more) == 0


def test_where_the_model_was_never_imported_nothing_is_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, STATE_LAYERS[0][0])
    assert told(state_spec(16), CompressorStateCache()) == 0
    assert told(state_spec(16), None) == 0


def test_a_group_of_states_becomes_a_compressor_unless_more_is_retained() -> None:
    config = config_with(state_spec(32), "model.layers.0.attn.0")
    state = engine_layout(config, [1, 1], [0, 16]).groups[1]
    assert (state.kind, state.ratio, state.window_tokens) == (GroupKind.COMPRESSOR, 16, 32)
    longer = config_with(state_spec(32, extra_retained_tokens=3), "model.layers.0.attn.0")
    for layout in (
        engine_layout(longer, [1, 1], [0, 16]),
        engine_layout(config, [1, 1], [0, None]),
    ):
        assert layout.groups[1].kind is GroupKind.SLIDING_WINDOW
    # Whatever a rank says of it: a full group is none.
    assert engine_layout(config, [1, 1], [16, 16]).groups[0].kind is GroupKind.FULL


def test_ranks_agree_or_the_group_is_a_window_and_ranks_without_layers_do_not_vote() -> None:
    assert agreed_state_ratios([(0, 4, 4), (0, 4, None)]) == (0, 4, 4)
    assert agreed_state_ratios([(0, 4, 4), (0, 128, 0)]) == (0, 0, 0)
    assert agreed_state_ratios([(None,), (None,)]) == (None,)
    config = config_with(state_spec(16))
    assert worker_state_ratios(config, {}, MODEL) == (0, None)


def test_the_ledger_gets_what_the_handshakes_say() -> None:
    stub = Stub(full_spec(), state_spec(16))
    shake = stub.worker.handshake((0, 16))
    two = SchedulerSide(stub.options, stub.config, 2)
    two.start({0: shake, 1: dataclasses.replace(shake, rank=1, state_ratios=(0, None))})
    assert two.ledger.layout.groups[1].kind is GroupKind.COMPRESSOR
    assert two.ledger.layout.groups[1].ratio == 16
