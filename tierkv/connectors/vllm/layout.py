"""The engine's KV cache specs → a `tierkv.layout.Layout`, and its tensors → pages by group.

The group table (kind, block, window) is the same on the scheduler and on every worker; sizes are
the worker's, because only it sees one spec per layer. The hash unit and the alignment are the
engine's own.

The specs of compressor states say that they are sliding windows. What they are, the worker tells
from the layers themselves; what it does not know stays a window, which costs space and is right.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    group_kernel_blocks,
    iter_layer_specs,
)

from tierkv.errors import ConfigError
from tierkv.layout import Group, GroupKind, Layout

STATE_LAYERS: Final = (("vllm.models.deepseek_v4.compressor", "CompressorStateCache"),)
"""Modules and classes of layers that hold the states of a compressor.

At a token that ends an entry of `ratio` tokens its model reads the window up to there, and at no
other one. A class belongs here once that was seen on a real engine (`test_deepseek_v4`).
"""

_LAYER_NUMBER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Row(NamedTuple):
    """What a group's specs say of reachability."""

    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    extra_tokens: int = 0
    chunk_tokens: int = 0
    ratio: int = 0
    draft: bool = False


def engine_layout(
    config: KVCacheConfig, block_bytes: Sequence[int], state_ratios: Sequence[int | None] = ()
) -> Layout:
    """The layout of an engine whose groups hold `block_bytes` real bytes per block.

    state_ratios: what `worker_state_ratios` says (by default: no group holds compressor states).

    Raises `ConfigError` for a kind of group that is not supported, or where the engine has not
    resolved its hash unit and alignment.
    """
    if not config.hash_block_size or not config.cache_hit_alignment_tokens:
        raise ConfigError(
            "the engine gives no hash_block_size or cache_hit_alignment_tokens; "
            "tierkv needs both and works with vLLM 0.32"
        )
    ratios = state_ratios or [None] * len(config.kv_cache_groups)
    rows = [
        _state_row(_row(i, group), ratio)
        for i, (group, ratio) in enumerate(zip(config.kv_cache_groups, ratios, strict=True))
    ]
    sizes = [row.block_tokens for row in rows if row.kind is not GroupKind.SCRATCH]
    return Layout(
        tuple(
            Group(name=group_name(i, row), block_bytes=max(nbytes, 1), **row._asdict())
            for i, (row, nbytes) in enumerate(zip(rows, block_bytes, strict=True))
        ),
        config.hash_block_size,
        # Hits of the engine itself may end inside a recurrent block; ours never do.
        math.lcm(config.cache_hit_alignment_tokens, *sizes),
    )


def with_draft_groups(config: KVCacheConfig, drops_last_block: bool) -> KVCacheConfig:
    """The configuration with its draft groups marked as the engine treats them.

    drops_last_block: whether the engine's own hits drop a block for the sake of a draft model
        (`SpeculativeConfig.use_eagle_block_drop`). Where it does and no group is marked, every
        group is one: draft layers often share the target's group.
    """
    if not drops_last_block or any(group.is_eagle_group for group in config.kv_cache_groups):
        return config
    groups = [dataclasses.replace(g, is_eagle_group=True) for g in config.kv_cache_groups]
    return dataclasses.replace(config, kv_cache_groups=groups)


def states_by_offer(config: KVCacheConfig) -> tuple[int, ...]:
    """Recurrent groups whose block tables do not tell where a state was taken.

    In a plain "align" table the block that ends at a boundary is there only if a step ended
    there, and it holds the state of exactly that boundary. Speculative decoding moves blocks
    within the table, a backend that exports checkpoints takes them inside a step, and hits that
    end inside a block share it. Then only what the engine offers (`boundary_state_offloads`) is a
    state.
    """
    alignment = config.cache_hit_alignment_tokens or 1
    return tuple(
        g
        for g, group in enumerate(config.kv_cache_groups)
        if any(
            isinstance(spec, MambaSpec)
            and (
                spec.num_speculative_blocks
                or spec.num_prefill_checkpoint_blocks
                or alignment % spec.block_size
            )
            for spec in iter_layer_specs(group.kv_cache_spec)
        )
    )


def group_name(index: int, row: Row) -> str:
    """A group's name: its position and its kind, equal on every rank."""
    return f"{index}.{row.kind}"


def offered_states(
    layout: Layout, group: int, offers: Sequence[tuple[int, int, int]], null_block_id: int
) -> list[int]:
    """A block table of `group` that holds the states offered with this step and nothing else.

    offers: (group, block id, tokens), as the engine says them; those that end inside a block are
        of no use to us.
    """
    size = layout.groups[group].block_tokens
    at = {end // size - 1: block for g, block, end in offers if g == group and not end % size}
    return [at.get(i, null_block_id) for i in range(max(at, default=-1) + 1)]


def worker_block_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """Real bytes of one block on this rank, one entry a group; padding is not counted."""
    return tuple(
        sum(spec.real_page_size_bytes for spec in _layers(config, group).values())
        if _reusable(group)
        else 1
        for group in config.kv_cache_groups
    )


def worker_pages(
    config: KVCacheConfig, layout: Layout, kv_caches: Mapping[str, Any]
) -> dict[str, list[torch.Tensor]]:
    """The tensors of each reusable group by name, dim 0 the engine's block id.

    kv_caches: layer name → tensor, or a sequence of them (recurrent layers). Layers that own no
    memory (they share another layer's) and memory that no layer owns are left out.
    """
    pages: dict[str, list[torch.Tensor]] = {}
    for group, ours in zip(config.kv_cache_groups, layout.groups, strict=True):
        if not ours.reusable:
            continue
        pages[ours.name] = []
        for name in _layers(config, group):
            cache = kv_caches[name]
            parts = [cache] if isinstance(cache, torch.Tensor) else list(cache)
            pages[ours.name] += [group_kernel_blocks(t, config.num_blocks) for t in parts]
    return pages


def worker_state_ratios(
    config: KVCacheConfig, layers: Mapping[str, object], model_config: object
) -> tuple[int | None, ...]:
    """For each group the ratio of the compressor whose states all of its layers on this rank are.

    0: they are something else. None: this rank has no layers of the group, so it cannot tell.

    layers: layer name → layer, of the model as it runs. model_config: the model's configuration,
    whose `compress_ratios` has one ratio for each layer.
    """
    by_number = getattr(model_config, "compress_ratios", None) or ()
    return tuple(
        _common({_state_ratio(name, layers.get(name), spec, by_number) for name, spec in owned})
        for group in config.kv_cache_groups
        for owned in [_layers(config, group).items()]
    )


def agreed_state_ratios(ranks: Sequence[Sequence[int | None]]) -> tuple[int | None, ...]:
    """What the ranks say together; 0 for a group on which those that can tell do not agree."""
    return tuple(_common(set(told) - {None}) for told in zip(*ranks, strict=True))


def _common(ratios: set[int | None]) -> int | None:
    if not ratios:
        return None
    return next(iter(ratios)) if len(ratios) == 1 else 0


def _state_ratio(name: str, layer: object, spec: KVCacheSpec, by_number: Sequence[int]) -> int:
    """The ratio of the compressor whose states this layer holds, or 0."""
    # Where no such model was built, its module was not imported, and none of its layers is here.
    classes = [getattr(sys.modules.get(module), cls, None) for module, cls in STATE_LAYERS]
    number = _LAYER_NUMBER.search(name)
    if type(layer) not in classes or type(spec) is not SlidingWindowMLASpec or number is None:
        return 0
    position = int(number[1])
    ratio = int(by_number[position] or 0) if position < len(by_number) else 0
    # An entry reads its own tokens, or those of the entry before it as well.
    return ratio if spec.sliding_window in (ratio, 2 * ratio) else 0


def _state_row(row: Row, ratio: int | None) -> Row:
    """The row of a group of compressor states of this ratio, if it has one."""
    if not ratio or row.kind is not GroupKind.SLIDING_WINDOW or row.extra_tokens:
        return row  # tokens kept beyond the window will be computed again: all of it is read
    return row._replace(kind=GroupKind.COMPRESSOR, ratio=ratio)


def _layers(config: KVCacheConfig, group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """The group's layers that own memory, with the spec of each."""
    owners = {name for tensor in config.kv_cache_tensors for name in tensor.layers}
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    return {
        name: spec if per_layer is None else per_layer[name]
        for name in group.layer_names
        if name in owners
    }


def _reusable(group: KVCacheGroupSpec) -> bool:
    return bool(group.enable_kv_transfer and group.kv_cache_spec.prefix_cacheable)


def _row(index: int, group: KVCacheGroupSpec) -> Row:
    spec = group.kv_cache_spec
    where = f"KV cache group {index} ({type(spec).__name__})"
    if group.host_resident or spec.prefix_replay_tokens:
        raise ConfigError(f"{where}: host-resident and replayed groups are not supported")
    if not _reusable(group):
        return Row(GroupKind.SCRATCH, spec.block_size)
    rows = {_spec_row(where, layer) for layer in iter_layer_specs(spec)}
    if len(rows) != 1:
        raise ConfigError(f"{where}: its layers differ in kind, block or window: {sorted(rows)}")
    return rows.pop()._replace(draft=group.is_eagle_group)


def _spec_row(where: str, spec: KVCacheSpec) -> Row:
    # By exact type: a subclass may read other blocks than its base does.
    kind = type(spec)
    if kind in (FullAttentionSpec, MLAAttentionSpec):
        return Row(GroupKind.FULL, spec.block_size)
    if kind in (SlidingWindowSpec, SlidingWindowMLASpec):
        return Row(
            GroupKind.SLIDING_WINDOW,
            spec.block_size,
            window_tokens=spec.sliding_window,
            extra_tokens=spec.extra_retained_tokens,
        )
    if kind is ChunkedLocalAttentionSpec:
        chunk = spec.attention_chunk_size
        return Row(GroupKind.CHUNKED_LOCAL, spec.block_size, chunk_tokens=chunk)
    if kind is MambaSpec:
        return _recurrent_row(where, spec)
    raise ConfigError(f"{where}: {kind.__name__} layers are not supported yet")


def _recurrent_row(where: str, spec: MambaSpec) -> Row:
    if spec.mamba_cache_mode == "none":
        raise ConfigError(
            f"{where}: the engine keeps no states to go on from; "
            "start it with --enable-prefix-caching, and without --mamba-cache-mode none"
        )
    if spec.mamba_cache_mode != "align" and spec.num_speculative_blocks:
        raise ConfigError(
            f"{where}: with speculative decoding and --mamba-cache-mode "
            f"{spec.mamba_cache_mode} states may be those of rejected tokens; "
            "write --mamba-cache-mode align"
        )
    return Row(GroupKind.RECURRENT, spec.block_size)
