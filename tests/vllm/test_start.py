"""What is refused at start, in one line that says what to write; what the namespace holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stub import BLOCK, caches, engine_config, full_spec, window_spec
from vllm.v1.kv_cache_interface import CrossAttentionSpec, UniformTypeKVCacheSpecs

from tierkv.connectors.vllm.layout import engine_layout, worker_block_bytes, worker_pages
from tierkv.connectors.vllm.namespace import check_hash_algorithm, engine_namespace
from tierkv.connectors.vllm.options import Options
from tierkv.connectors.vllm.version import check_settings, check_version
from tierkv.device import Pages
from tierkv.errors import BackendNotFoundError, ConfigError, StoreBusyError
from tierkv.keeper import KeeperClient
from tierkv.layout import GroupKind
from tierkv.namespace import Namespace
from tierkv.pinned import Arena

# Options, version, settings. ---------------------------------------------------------------------


def test_options_are_parsed_once_with_units() -> None:
    options = Options.parse(
        {"url": "nvme:///mnt/kv?capacity=1TiB", "pinned": "2GiB", "policy": "interval:4096"}
    )
    assert options.pinned == 2 << 30
    assert str(options.policy) == "interval:4096"
    assert Options.parse({}) == Options()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pined": "2GiB"}, "unknown option 'pined' (did you mean 'pinned'?)"),
        ({"pinned": "2Gb/s"}, "pinned: '2Gb/s' is not a size"),
        ({"pinned": 0}, "pinned is 0; write a size like 8GiB"),
        ({"url": "/mnt/kv"}, "has no scheme"),
        ({"url": 7}, "url is 7; write a string"),
        ({"policy": "dens"}, "did you mean 'dense'?"),
        ({"load_timeout_s": 0}, "load_timeout_s is 0; write seconds above 0"),
        ({"io_threads": True}, "io_threads is True; write a whole number above 0"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options.parse(given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.3+cpu", "0.32.1.dev4"])
def test_supported_engine_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev"])
def test_other_engine_versions_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(ConfigError, match=r"install 'vllm>=0\.32,<0\.33'"):
        check_version(version)


def settings(**changed: Any) -> SimpleNamespace:
    transfer = {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    for table in (transfer, parallel):
        table.update({k: v for k, v in changed.items() if k in table})
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer), parallel_config=SimpleNamespace(**parallel)
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kv_load_failure_policy": "fail"}, 'add "kv_load_failure_policy": "recompute"'),
        ({"kv_role": "kv_producer"}, 'write "kv_role": "kv_both"'),
        ({"decode_context_parallel_size": 2}, "set it to 1"),
    ],
)
def test_a_setting_that_would_hurt_is_refused(changed: dict[str, Any], says: str) -> None:
    check_settings(settings())
    with pytest.raises(ConfigError) as caught:
        check_settings(settings(**changed))
    assert says in str(caught.value)


def test_case_014_hashes_that_differ_between_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_hash_algorithm("sha256")
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256"):
        check_hash_algorithm("xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_hash_algorithm("xxhash")


# Layout. -----------------------------------------------------------------------------------------


def test_kinds_windows_and_real_bytes_come_from_the_specs() -> None:
    config = engine_config(full_spec(), window_spec(48, extra_retained_tokens=3))
    layout = engine_layout(config, worker_block_bytes(config))
    full, window = layout.groups
    assert (full.kind, full.block_tokens) == (GroupKind.FULL, BLOCK)
    assert full.block_bytes == 2 * full_spec().real_page_size_bytes
    assert (window.kind, window.window_tokens, window.extra_tokens) == (
        GroupKind.SLIDING_WINDOW,
        48,
        3,
    )


def test_blocks_that_kernels_see_as_several_are_still_one_block() -> None:
    config = engine_config(full_spec())
    whole = caches(config)
    halves = {
        name: t.reshape(2 * len(t), t.shape[1], t.shape[2] // 2, t.shape[3])
        for name, t in whole.items()
    }
    layout = engine_layout(config, worker_block_bytes(config))
    for tensor in worker_pages(config, layout, halves)["0.full"]:
        assert tensor.shape[0] == config.num_blocks
    Pages(layout, worker_pages(config, layout, halves))


def test_layers_of_one_group_may_differ_in_size_but_not_in_window() -> None:
    config = engine_config(full_spec())
    wide = dataclasses.replace(full_spec(), head_size=16, head_size_v=16)
    group = config.kv_cache_groups[0]
    group.kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"0.a": full_spec(), "0.b": wide}
    )
    assert worker_block_bytes(config) == (
        full_spec().real_page_size_bytes + wide.real_page_size_bytes,
    )
    group.kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"0.a": window_spec(32), "0.b": window_spec(64)}
    )
    with pytest.raises(ConfigError, match="layers differ"):
        engine_layout(config, [1])


def test_the_hash_unit_and_alignment_are_the_engines() -> None:
    config = engine_config(full_spec(), window_spec(), unit=8, alignment=64)
    layout = engine_layout(config, [1, 1])
    assert (layout.hash_block_tokens, layout.alignment_tokens) == (8, 64)


def test_case_051_a_block_below_the_hash_unit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"block_tokens 16 is not a multiple.*unit|32"):
        engine_layout(engine_config(full_spec(), unit=32, alignment=32), [1])


def test_groups_that_are_never_reused_are_scratch() -> None:
    config = engine_config(full_spec(), window_spec())
    config.kv_cache_groups[1].enable_kv_transfer = False
    layout = engine_layout(config, worker_block_bytes(config))
    assert [g.kind for g in layout.groups] == [GroupKind.FULL, GroupKind.SCRATCH]
    assert set(worker_pages(config, layout, caches(config))) == {"0.full"}


def test_unsupported_groups_are_refused_by_name() -> None:
    state = CrossAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
    mixed = engine_config(full_spec())
    mixed.kv_cache_groups[0].kv_cache_spec = state
    with pytest.raises(ConfigError, match="CrossAttentionSpec layers are not supported yet"):
        engine_layout(mixed, [1])


def test_an_engine_that_resolved_no_hash_unit_is_refused() -> None:
    config = engine_config(full_spec())
    config.hash_block_size = None
    with pytest.raises(ConfigError, match="hash_block_size"):
        engine_layout(config, [1])


# Namespace. --------------------------------------------------------------------------------------


def engine_of(model: str = "org/model", **changed: Any) -> SimpleNamespace:
    """The parts of a VllmConfig that decide bytes."""
    facts: dict[str, Any] = {
        "revision": "0" * 40,
        "hf": {"rope_theta": 10000.0, "head_dim": 8},
        "cache_dtype": "auto",
        "dtype": torch.float32,
        "load_format": "auto",
        "tp": 1,
        "max_model_len": 1024,
        "scales": False,
        "hash": "sha256",
    }
    facts.update(changed)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=facts["revision"],
            dtype=facts["dtype"],
            quantization=None,
            max_model_len=facts["max_model_len"],
            hf_config=SimpleNamespace(to_dict=lambda: facts["hf"]),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=facts["cache_dtype"],
            prefix_caching_hash_algo=facts["hash"],
            calculate_kv_scales=facts["scales"],
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=facts["tp"], pipeline_parallel_size=1),
        load_config=SimpleNamespace(load_format=facts["load_format"]),
        compilation_config=SimpleNamespace(static_forward_context={}),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def namespace(
    vllm_config: SimpleNamespace | None = None,
    *,
    options: Options | None = None,
    version: str = "0.32.0",
    tp_rank: int = 0,
) -> Namespace:
    config = engine_config(full_spec())
    layout = engine_layout(config, worker_block_bytes(config))
    pages = Pages(layout, worker_pages(config, layout, caches(config)))
    return engine_namespace(
        vllm_config or engine_of(),
        config,
        layout,
        pages,
        options or Options(),
        version=version,
        tp_rank=tp_rank,
        pp_rank=0,
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"revision": "1" * 40},
        {"hf": {"rope_theta": 20000.0, "head_dim": 8}},
        {"cache_dtype": "fp8"},
        {"dtype": torch.bfloat16},
        {"hash": "sha256_cbor"},
        {"tp": 2},
    ],
)
def test_case_002_004_005_007_what_changes_bytes_changes_the_namespace(
    changed: dict[str, Any],
) -> None:
    assert namespace(engine_of(**changed)).digest != namespace().digest


def test_salt_engine_version_and_rank_change_the_namespace_and_labels_do_not() -> None:
    base = namespace().digest
    assert namespace(options=Options(salt="x")).digest != base
    assert namespace(version="0.33.0").digest != base
    assert namespace(version="0.32.7").digest == base
    two = engine_of(tp=2)
    assert namespace(two, tp_rank=1).digest != namespace(two).digest
    labelled = {"rope_theta": 10000.0, "head_dim": 8, "transformers_version": "9"}
    assert namespace(engine_of(hf=labelled)).digest == base


def test_the_longest_context_counts_only_where_kv_depends_on_it() -> None:
    assert namespace(engine_of(max_model_len=2048)).digest == namespace().digest
    long = {"rope_scaling": {"rope_type": "longrope"}}
    ours, theirs = engine_of(hf=long), engine_of(hf=long, max_model_len=2048)
    assert namespace(ours).digest != namespace(theirs).digest


@pytest.mark.parametrize("changed", [{"revision": None}, {"revision": "main"}])
def test_weights_that_cannot_be_told_need_an_identity(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='write "identity"'):
        namespace(engine_of(**changed))
    assert namespace(engine_of(**changed), options=Options(identity="mine"))


def test_a_folder_without_weight_files_needs_an_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r'no weight files.*write "identity"'):
        namespace(engine_of(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    assert namespace(engine_of(str(tmp_path))).identity.startswith("dir-")
    with pytest.raises(ConfigError, match=r'dummy.*write "identity"'):
        namespace(engine_of(str(tmp_path), load_format="dummy"))


def test_scales_that_are_measured_anew_are_refused() -> None:
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        namespace(engine_of(scales=True))


# On the real engine. -----------------------------------------------------------------------------


def test_a_wrong_scheme_ends_the_engines_start_with_one_line(store: Path) -> None:
    from engines import engine

    with (
        pytest.raises(BackendNotFoundError, match="did you mean 'nvme'"),
        engine("tinyllama", extra={"url": f"nvmee://{store}"}),
    ):
        pass


def test_a_store_in_use_ends_the_second_engines_start_with_its_owner(store: Path) -> None:
    from engines import engine
    from stores import nvme

    with engine("tinyllama", extra=nvme(store)) as first:
        config = first.worker_side.storage._config
    # What holds the store of an engine is its keeper, a process of its own: one without an engine.
    with Arena.create(config.arena_bytes) as arena:
        keeper = KeeperClient(config, arena)
        try:
            keeper.wait_open(60)
            with (
                pytest.raises(StoreBusyError, match=f"in use by .*{keeper.pid}") as told,
                engine("tinyllama", extra=nvme(store)),
            ):
                pass
        finally:
            keeper.close(deadline_s=1)
    assert "\n" not in str(told.value)
