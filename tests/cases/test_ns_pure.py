"""Cases of kind NS that are decided by the namespace alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import ConfigError
from tierkv.layout import Group, GroupKind, Layout
from tierkv.namespace import Namespace, fingerprint_of_model_dir, kv_config_of


def mla(block_bytes: int = 18432) -> Layout:
    return Layout(
        (
            Group(name="mla", kind=GroupKind.FULL, block_tokens=16, block_bytes=block_bytes),
            Group(name="scratch", kind=GroupKind.SCRATCH, block_tokens=4, block_bytes=1),
        )
    )


def ns(**changes: Any) -> Namespace:
    return Namespace(**{"layout": mla(), "model": "m", "identity": "r1", **changes})


def test_case_002_another_tensor_parallel_size_shares_nothing_unless_declared() -> None:
    assert ns(tp_size=1).digest != ns(tp_size=2).digest
    free = {"topology_free": {"mla": 18432}}
    assert ns(tp_size=1, **free).digest == ns(tp_size=2, tp_rank=1, **free).digest


def test_case_002_one_undeclared_group_binds_them_all() -> None:
    two = Layout(
        (*mla().groups[:1], Group(name="f", kind=GroupKind.FULL, block_tokens=16, block_bytes=1))
    )
    free = {"layout": two, "topology_free": {"mla": 18432}}
    assert ns(tp_size=1, **free).digest != ns(tp_size=2, **free).digest


def test_case_002_009_pipeline_stages_never_share_even_where_declared() -> None:
    free = {"topology_free": {"mla": 18432}}
    stages = [ns(pp_size=2, pp_rank=r, **free).digest for r in (0, 1)]
    assert stages[0] != stages[1]


def test_case_004_another_revision_shares_nothing(tmp_path: Path) -> None:
    assert ns(identity="r1").digest != ns(identity="r2").digest
    with pytest.raises(ConfigError, match="no identity"):
        ns(identity="")
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64}))
    with pytest.raises(ConfigError, match="write an identity"):
        fingerprint_of_model_dir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + b"a" * 100)
    first = fingerprint_of_model_dir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + b"a" * 101)
    assert fingerprint_of_model_dir(tmp_path) != first


def test_case_005_rope_counts_and_labels_do_not() -> None:
    config = {"rope_scaling": {"factor": 1}, "_commit_hash": "a", "_name_or_path": "x"}
    scaled = {**config, "rope_scaling": {"factor": 2}}
    renamed = {**config, "_commit_hash": "b", "_name_or_path": "y"}

    def digest(hf_config: dict[str, Any], **more: Any) -> bytes:
        return ns(kv_config=kv_config_of(hf_config), **more).digest

    assert digest(config) != digest(scaled)
    assert digest(config) == digest(renamed)
    flagged = {"length_dependent": True}
    assert digest(config, max_tokens=1, **flagged) != digest(config, max_tokens=2, **flagged)
    assert digest(config, max_tokens=1) == digest(config, max_tokens=2)


def test_case_006_a_declared_group_of_another_size_is_refused_with_both_numbers() -> None:
    free = {"mla": 18432}
    assert ns(tp_size=2, topology_free=free).is_topology_free
    with pytest.raises(ConfigError, match=r"18432 bytes.*has 9216 at tp_size 2"):
        ns(layout=mla(9216), tp_size=2, topology_free=free)


def test_case_023_another_salt_shares_nothing() -> None:
    assert len({ns(salt=s).digest for s in ("", "s1", "s2")}) == 3
