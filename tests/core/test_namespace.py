"""The namespace: what changes the bytes changes the digest, what does not leaves it alone."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import ConfigError, LayoutError
from tierkv.layout import Group, GroupKind, Layout
from tierkv.namespace import (
    Namespace,
    fingerprint_of_model_dir,
    is_length_dependent,
    kv_config_of,
)


def layout(**changes: Any) -> Layout:
    group = {"name": "full", "kind": GroupKind.FULL, "block_tokens": 16, "block_bytes": 4096}
    window = Group(
        name="swa",
        kind=GroupKind.SLIDING_WINDOW,
        block_tokens=16,
        block_bytes=1024,
        window_tokens=32,
    )
    return Layout((Group(**{**group, **changes}), window))


BASE: dict[str, Any] = {
    "layout": layout(),
    "model": "m",
    "identity": "r1",
    "kv_config": {"rope_scaling": {"factor": 1.0}, "head_dim": 128},
    "kv_dtype": "bfloat16",
    "quantization": "none",
    "pages": "LBHNC",
    "tp_size": 2,
    "pp_size": 2,
    "cp_size": 2,
    "max_tokens": 4096,
    "length_dependent": True,
}
CHANGES: dict[str, Any] = {
    "model": "m2",
    "identity": "r2",
    "kv_config": {"rope_scaling": {"factor": 2.0}, "head_dim": 128},
    "kv_dtype": "fp8_e4m3",
    "quantization": "kv_scales",
    "pages": "BLHNC",
    "tp_size": 4,
    "tp_rank": 1,
    "pp_size": 4,
    "pp_rank": 1,
    "cp_size": 4,
    "cp_rank": 1,
    "hash_algorithm": "sha256_cbor",
    "hash_root": bytes(32),
    "salt": "tenant",
    "max_tokens": 8192,
    "format_version": 2,
}
LAYOUTS = {
    "a block's bytes": layout(block_bytes=8192),
    "a block's tokens": layout(block_tokens=32),
    "a group's kind": layout(kind=GroupKind.RECURRENT),
    "a group's name": layout(name="other"),
    "the order of groups": Layout(layout().groups[::-1]),
    "a group less": Layout(layout().groups[:1]),
    "the hash unit": Layout(layout().groups, hash_block_tokens=8),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_counts_alone(name: str) -> None:
    changed = Namespace(**{**BASE, name: CHANGES[name]})
    assert changed.digest != Namespace(**BASE).digest
    assert len(changed.digest) == 32


def test_no_field_was_left_out_of_the_test_above() -> None:
    fields = {f.name for f in dataclasses.fields(Namespace) if f.init}
    assert fields == {*CHANGES, "layout", "topology_free", "length_dependent"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_group_table_counts(name: str) -> None:
    assert Namespace(**{**BASE, "layout": LAYOUTS[name]}).digest != Namespace(**BASE).digest


def test_padding_and_alignment_do_not_count() -> None:
    padded = Layout(layout(padded_block_bytes=9000).groups, alignment_tokens=64)
    assert Namespace(**{**BASE, "layout": padded}).digest == Namespace(**BASE).digest


def test_the_order_of_configuration_keys_does_not_count() -> None:
    turned = {"head_dim": 128, "rope_scaling": {"factor": 1.0}}
    assert Namespace(**{**BASE, "kv_config": turned}).digest == Namespace(**BASE).digest


def test_the_digest_is_fixed_for_ever() -> None:
    assert (
        Namespace(**BASE).digest.hex()
        == "a1194e0d4ca7c2f22b77f6d7ff0a7c5346fe443d3707fdfb865365ea6eda6baa"
    )


def test_each_rank_has_its_own_digest_and_says_so() -> None:
    base = Namespace(**BASE)
    ranks = [
        base.for_rank(tp_rank=t, pp_rank=p, cp_rank=c)
        for t in (0, 1)
        for p in (0, 1)
        for c in (0, 1)
    ]
    assert len({r.digest for r in ranks}) == 8
    assert len({r.text for r in ranks}) == 8
    assert base.for_rank() == base
    assert "m@r1" in base.text
    assert "tp=0/2" in base.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": ""}, "model is empty"),
        ({"identity": ""}, "has no identity; write a revision"),
        ({"tp_rank": 2}, "tp_rank 2 of tp_size 2"),
        ({"pp_size": 0}, "pp_size 0"),
        ({"kv_config": {"x": object()}}, "not plain JSON"),
        ({"kv_config": {"x": float("nan")}}, "not plain JSON"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Namespace(**{**BASE, **change})
    assert "\n" not in str(caught.value)


def test_a_declared_group_must_exist() -> None:
    with pytest.raises(LayoutError, match="did you mean 'full'"):
        Namespace(**{**BASE, "topology_free": {"ful": 4096}})


def test_a_text_states_the_identity() -> None:
    made = Namespace.of_text("org/my@model@rev1", layout())
    assert (made.model, made.identity) == ("org/my@model", "rev1")
    assert made.digest != Namespace.of_text("org/my@model@rev2", layout()).digest
    assert made.digest != Namespace.of_text("org/my@model@rev1", layout(), salt="s").digest


@pytest.mark.parametrize("text", ["my-model", "my-model@", "@rev1", ""])
def test_a_text_without_a_revision_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write model@revision"):
        Namespace.of_text(text, layout())


def test_cosmetic_fields_are_dropped_at_every_depth_and_unknown_ones_stay() -> None:
    config = {
        "_name_or_path": "/tmp/a",
        "transformers_version": "5",
        "rope_theta": 1e6,
        "something_new": 1,
        "text_config": {"_commit_hash": "x", "head_dim": 64},
    }
    assert kv_config_of(config) == {
        "rope_theta": 1e6,
        "something_new": 1,
        "text_config": {"head_dim": 64},
    }


def test_rope_that_looks_at_the_length_is_recognized() -> None:
    assert is_length_dependent({"rope_scaling": {"rope_type": "longrope"}})
    assert is_length_dependent({"text_config": {"rope_parameters": {"type": "dynamic"}}})
    assert not is_length_dependent({"rope_scaling": {"rope_type": "yarn", "factor": 4}})


def write_model(folder: Path, *, config: dict[str, Any] | None = None, fill: bytes = b"w") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"head_dim": 64}))
    header = json.dumps({"w": {"dtype": "U8", "shape": [99], "data_offsets": [0, 99]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + fill * 20_000
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_folder_is_known_by_its_weights_and_not_by_its_place(tmp_path: Path) -> None:
    first = fingerprint_of_model_dir(write_model(tmp_path / "a"))
    assert first == fingerprint_of_model_dir(write_model(tmp_path / "b"))
    cosmetic = {"head_dim": 64, "_name_or_path": "elsewhere"}
    assert first == fingerprint_of_model_dir(write_model(tmp_path / "c", config=cosmetic))
    others = [
        write_model(tmp_path / "d", config={"head_dim": 128}),
        write_model(tmp_path / "e", fill=b"v"),
        write_model(tmp_path / "f", fill=b"ww"),
    ]
    assert len({first, *map(fingerprint_of_model_dir, others)}) == 4


def test_a_renamed_or_added_weight_file_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    seen = {fingerprint_of_model_dir(folder)}
    (folder / "extra.bin").write_bytes(b"")
    seen.add(fingerprint_of_model_dir(folder))
    (folder / "extra.bin").rename(folder / "extra2.bin")
    seen.add(fingerprint_of_model_dir(folder))
    assert len(seen) == 3


def test_a_folder_without_weights_or_configuration_asks_for_an_identity(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read.*write an identity"):
        fingerprint_of_model_dir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no weight files.*write an identity"):
        fingerprint_of_model_dir(tmp_path)
