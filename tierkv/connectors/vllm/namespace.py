"""What of the engine decides the bytes of a block → a `tierkv.namespace.Namespace`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierkv.connectors.vllm.options import Options
from tierkv.device import Pages
from tierkv.errors import ConfigError
from tierkv.layout import Layout
from tierkv.namespace import (
    Namespace,
    fingerprint_of_model_dir,
    is_length_dependent,
    kv_config_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_COMMIT = re.compile(r"[0-9a-f]{40}")
_STABLE_HASHES = ("sha256", "sha256_cbor")
_DEFAULT_SEED = "vllm-none-hash"


def engine_namespace(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layout: Layout,
    pages: Pages,
    options: Options,
    *,
    version: str,
    tp_rank: int,
    pp_rank: int,
) -> Namespace:
    """The namespace of one rank. `ConfigError`, one line, where something cannot be known."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales measures the cache's scales anew in every process, so stored "
            "blocks would be read with other ones; turn it off"
        )
    parallel = vllm_config.parallel_config
    hf_config = _json(model.hf_config.to_dict())
    return Namespace(
        layout=layout,
        model=_model_name(model.model),
        identity=options.identity or _identity(vllm_config),
        kv_config=kv_config_of(hf_config),
        kv_dtype=f"{cache.cache_dtype} in {model.dtype}",
        quantization=str(model.quantization or ""),
        pages=_pages_text(vllm_config, kv_cache_config, pages),
        tp_size=parallel.tensor_parallel_size,
        tp_rank=tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=pp_rank,
        hash_algorithm=_hash_algorithm(cache.prefix_caching_hash_algo, version),
        hash_root=_hash_root(),
        salt=options.salt,
        max_tokens=model.max_model_len,
        length_dependent=is_length_dependent(hf_config),
    )


def check_hash_algorithm(algorithm: str) -> None:
    """`ConfigError` for block hashes that differ between processes: nothing would ever hit."""
    if algorithm not in _STABLE_HASHES and os.environ.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"prefix_caching_hash_algo {algorithm!r} starts from a random seed in every process; "
            "set --prefix-caching-hash-algo sha256, or PYTHONHASHSEED to a fixed number"
        )


def _hash_algorithm(algorithm: str, version: str) -> str:
    check_hash_algorithm(algorithm)
    # The engine hashes its own serialization of tokens and extra keys, which may change with it.
    return f"vllm-{'.'.join(version.split('.')[:2])}-{algorithm}"


def _hash_root() -> bytes:
    """Stands for the root of the engine's chain, which it derives from this seed."""
    return hashlib.sha256(os.environ.get("PYTHONHASHSEED", _DEFAULT_SEED).encode()).digest()


def _model_name(model: str) -> str:
    """The name; of a local folder the last part, so that moving it changes nothing."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _identity(vllm_config: VllmConfig) -> str:
    """Which weights: a commit, or the fingerprint of the model's folder."""
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    advice = 'write "identity": "..." in kv_connector_extra_config, another for other weights'
    if load_format.endswith("dummy"):
        raise ConfigError(f"load format {load_format!r} has no weight files; {advice}")
    if Path(model.model).is_dir():
        try:
            return fingerprint_of_model_dir(model.model)
        except ConfigError as exc:
            raise ConfigError(f"{exc}; {advice}") from exc
    for revision in (model.revision, getattr(model.hf_config, "_commit_hash", None)):
        if revision and _COMMIT.fullmatch(revision):
            return str(revision)
    raise ConfigError(f"the weights of {model.model!r} have no known revision; {advice}")


def _pages_text(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, pages: Pages) -> str:
    """Physical layout and packing: the engine's layout, order of bytes, and who fills the pages."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = sorted(
        {
            layers[name].get_attn_backend().get_name()
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
            if name in layers and hasattr(layers[name], "get_attn_backend")
        }
    )
    facts = {
        "layout": kv_cache_config.kv_cache_layout,
        "order": pages.signature,
        "backends": backends,
    }
    if vllm_config.device_config.device_type == "cpu":
        # On a CPU the attention kernels pack pages by what the processor can do.
        facts["cpu"] = [
            torch.backends.cpu.get_cpu_capability(),
            bool(torch.cpu._is_amx_tile_supported()),
        ]
    return json.dumps(facts, sort_keys=True)


def _json(config: dict[str, Any]) -> dict[str, Any]:
    """Plain JSON of a configuration; what JSON cannot say (dtypes) in words."""
    plain: dict[str, Any] = json.loads(json.dumps(config, sort_keys=True, default=str))
    return plain
