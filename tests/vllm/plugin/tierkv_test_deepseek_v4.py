"""A vLLM general plugin for tests: DeepSeek V4 on a CPU, without Triton and with prefix caching.

DeepSeek V3 keeps its prefix caching, too.

vLLM 0.32 computes DeepSeek V4 on CPUs, but what prepares the metadata of a step is written in
Triton alone. Its own registry of kernel replacements takes the plain torch versions below. They
cover what the tests use: one rank, no images.

It works by being on the path: `PYTHONPATH=tests/vllm/plugin`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

MLA = "vllm.v1.attention.backends.mla"


def _spans(starts: Tensor, lengths: Tensor) -> list[tuple[int, int, int, Tensor]]:
    """For each request: its number, its rows `[first, end)` and the position of each row."""
    rows = starts.tolist()
    spans = []
    for request, (first, end) in enumerate(itertools.pairwise(rows)):
        total = int(lengths[request])
        spans.append((request, first, end, torch.arange(total - (end - first), total)))
    return spans


def request_of_each_token(
    query_start_loc: Tensor,
    output: Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    **_: Any,
) -> None:
    """Rows past `num_mapped` are padding and belong to request 0."""
    counts = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    owners = torch.repeat_interleave(torch.arange(num_reqs), counts.long())[:num_mapped]
    output[:num_tokens] = 0
    output[: min(len(owners), num_tokens)] = owners[:num_tokens].to(output.dtype)


def window_slots(
    indices: Tensor,
    _indices_stride: int,
    lens: Tensor,
    window: int,
    width: int,
    _left: Tensor,
    _right: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    owners: Tensor,
    valid: Tensor,
    block_table: Tensor,
    _table_stride: int,
    block_size: int,
    replay_start: Tensor,
    first_token: int,
    *_: Any,
) -> None:
    """Slots of the window that each token sees. The CPU kernels do not read them."""
    flat = indices.view(indices.shape[0], -1)
    for row in range(min(flat.shape[0], len(owners) - first_token)):
        token = first_token + row
        flat[row, :width] = -1
        lens[row] = 0
        if not valid[token]:
            continue
        r = int(owners[token])
        last = int(seq_lens[r]) - int(query_start_loc[r + 1]) + token
        seen = torch.arange(max(0, last - window + 1, int(replay_start[r])), last + 1)
        slots = block_table[r][seen // block_size] * block_size + seen % block_size
        flat[row, : len(seen)] = slots.to(flat.dtype)
        lens[row] = len(seen)


def tokens_to_gather(
    output: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    replay_start: Tensor,
    prefills: int,
    decodes: int,
    window: int,
    *_: Any,
) -> None:
    """A prefill gathers its own tokens and what lies before them in the window."""
    own = (query_start_loc[1:] - query_start_loc[:-1])[decodes : decodes + prefills]
    there = slice(decodes, decodes + prefills)
    before = seq_lens[there] - own - replay_start[there]
    output[:prefills] = (own + before.clamp(0, window - 1)).to(output.dtype)


def compressed_slots(
    output: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    _table_stride: int,
    block_size: int,
    ranks: int,
    _interleave: int,
    ratio: int,
    nowhere: int,
    *_: Any,
) -> None:
    """Every token that completes an entry of `ratio` tokens has a slot for it."""
    assert ranks == 1
    for r, first, end, positions in _spans(query_start_loc, seq_lens):
        entries = positions // ratio
        completes = (positions % ratio == ratio - 1) & (slots[first:end] != nowhere)
        output[first:end] = nowhere
        done = entries[completes]
        where = block_table[r].long()[done // block_size] * block_size + done % block_size
        output[first:end][completes] = where.to(output.dtype)


def indexer_rows(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    entry_starts: Tensor,
    row_starts: Tensor,
    owners: Tensor,
    first_key: Tensor,
    end_key: Tensor,
    first_row: int,
    end_row: int,
    _rank: int,
    ranks: int,
    _interleave: int,
    _block: int,
    ratio: int,
    *_: Any,
) -> None:
    """Which entries each row of a chunk may look at, and which request each entry belongs to."""
    assert ranks == 1
    for r, first, end, positions in _spans(query_start_loc, seq_lens):
        owners[int(entry_starts[r]) : int(entry_starts[r + 1])] = r
        rows = torch.arange(first, end)
        here = (rows >= first_row) & (rows < end_row)
        base = int(row_starts[r])
        first_key[rows[here] - first_row] = base
        visible = base + (positions[here] + 1) // ratio
        end_key[rows[here] - first_row] = visible.to(end_key.dtype)


def _replace_kernels() -> None:
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels

    # The base class asks for five kinds of layer, and the CPU's answer names three of them.
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda *_: defaultdict(type(None))
    if not HAS_TRITON:
        register_kernels({
            "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": request_of_each_token,
            f"{MLA}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": window_slots,
            f"{MLA}.sparse_swa.ComputePrefillMetadataKernel.kernel": tokens_to_gather,
            f"{MLA}.compressor_utils.CompressedSlotMappingKernel.kernel": compressed_slots,
            f"{MLA}.indexer.BuildPrefillChunkMetadataKernel.kernel": indexer_rows,
        })  # fmt: skip


def register() -> None:
    """Called by vLLM once per process."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config

    def check_and_update_config(_cls: type, config: Any) -> None:
        model = config.model_config
        if model is None or model.hf_config.model_type not in ("deepseek_v3", "deepseek_v4"):
            original(config)
            return
        if model.hf_config.model_type == "deepseek_v4":
            _replace_kernels()
        # Processors without AMX lose prefix caching and chunked prefill here; the tests need both.
        scheduler, cache = config.scheduler_config, config.cache_config
        wanted = scheduler.enable_chunked_prefill, cache.enable_prefix_caching
        budget = scheduler.max_num_batched_tokens
        original(config)
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching = wanted
        scheduler.max_num_batched_tokens = budget

    platform.check_and_update_config = classmethod(check_and_update_config)
