"""The connector's two sides without an engine: real specs, real pages, a storage half in a dict."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from tierkv.blocks import (
    NO_KEYS,
    Event,
    Move,
    MoveDone,
    MoveKind,
    Outcome,
    Recovered,
)
from tierkv.connectors.vllm.layout import engine_layout, worker_block_bytes, worker_pages
from tierkv.connectors.vllm.options import Options
from tierkv.connectors.vllm.scheduler import SchedulerSide
from tierkv.connectors.vllm.wire import StepMetadata
from tierkv.connectors.vllm.worker import WorkerSide
from tierkv.device import Pages
from tierkv.pinned import Arena
from tierkv.reach import DENSE
from tierkv.storage import StorageConfig

BLOCK = 16
BLOCKS = 64


def full_spec(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32, **more
    )


def window_spec(window: int = 32, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float32,
        sliding_window=window,
        **more,
    )


def engine_config(*specs: Any, unit: int = BLOCK, alignment: int = BLOCK) -> KVCacheConfig:
    """One group of two layers for each spec; the groups overlay one allocation, as in vLLM."""
    groups, tensors = [], []
    for g, spec in enumerate(specs):
        names = [f"{g}.a", f"{g}.b"]
        page = spec.page_size_bytes
        size = 2 * page * BLOCKS
        tensors.append(KVCacheTensor(size, names, page * BLOCKS, page))
        groups.append(KVCacheGroupSpec([*names, f"{g}.shares-a"], spec))
    return KVCacheConfig(
        BLOCKS,
        tensors,
        groups,
        kv_cache_layout="LBHNC",
        hash_block_size=unit,
        cache_hit_alignment_tokens=alignment,
    )


def no_states(config: KVCacheConfig) -> tuple[int, ...]:
    """What a worker says of groups that hold no compressor states."""
    return (0,) * len(config.kv_cache_groups)


def caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Layer tensors (B, H, N, C) over one allocation, filled with noise."""
    size = max(t.size for t in config.kv_cache_tensors)
    noise = torch.randint(0, 255, (size,), dtype=torch.uint8)
    made = {}
    for tensor, group in zip(config.kv_cache_tensors, config.kv_cache_groups, strict=True):
        spec = group.kv_cache_spec
        shape = (BLOCKS, spec.num_heads, spec.block_size, spec.state_content_size_bytes)
        for layer, name in enumerate(tensor.layers):
            start = layer * tensor.layer_stride
            strides = (tensor.block_stride, shape[2] * shape[3], shape[3], 1)
            made[name] = torch.as_strided(noise, shape, strides, start)
        made[group.layer_names[-1]] = made[tensor.layers[0]]
    return made


class DictStorage:
    """A storage half whose answers a test decides: outcomes by hash, or none at all for a while."""

    def __init__(self, config: StorageConfig, arena: Arena) -> None:
        self.config, self.arena = config, arena
        self.blocks: dict[tuple[int, bytes], bytes] = {}
        self.outcomes: dict[bytes, Outcome] = {}
        self.silent = False
        self.events: list[Event] = []
        self.moves: list[Move] = []
        self.agreed: list[int] = []
        self.appraisals: list[tuple[int, list[bool]]] = []
        self.epochs: list[int] = []

    def wait_open(self, timeout_s: float) -> Recovered:
        return Recovered(NO_KEYS)

    def submit(self, move: Move) -> None:
        self.moves.append(move)
        if not self.silent:
            self.events.append(MoveDone(move.id, self.carry_out(move)))

    def carry_out(self, move: Move) -> np.ndarray:
        outcomes = []
        offsets = move.offsets.tolist() or [0] * len(move)
        for row, ((group, name), offset) in enumerate(zip(move.keys, offsets, strict=True)):
            slot = self.arena.view[offset : offset + self.config.block_bytes[group]]
            outcome = self.outcomes.get(name, Outcome.DONE)
            if move.kind is MoveKind.SAVE and outcome is Outcome.DONE:
                self.blocks[group, name] = bytes(slot)
            if move.kind is MoveKind.LOAD and move.from_tier[row] and outcome is Outcome.DONE:
                slot[:] = self.blocks[group, name]
            outcomes.append(outcome)
        return np.array(outcomes, np.uint8)

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def agree(self, retire_id: int) -> None:
        self.agreed.append(retire_id)

    def appraised(self, question_id: int, worth: np.ndarray) -> None:
        self.appraisals.append((question_id, worth.tolist()))

    def rotate(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self, *, deadline_s: float) -> bool:
        return True


def request(name: str, tokens: int, *, computed: int = 0, lora: object = None) -> SimpleNamespace:
    """What the connector reads of an engine's request; equal first letters share a prompt."""
    chain, parent = [], name[0].encode()
    for unit in range(tokens // BLOCK):
        parent = hashlib.sha256(parent + bytes([unit])).digest()
        chain.append(parent)
    return SimpleNamespace(
        request_id=name,
        block_hashes=chain,
        num_tokens=tokens,
        num_computed_tokens=computed,
        lora_request=lora,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
    )


class Stub:
    """A scheduler side and a worker side that talk as they do through the engine."""

    def __init__(self, *specs: Any, pinned: int = 1 << 20, **options: Any) -> None:
        self.config = engine_config(*(specs or (full_spec(),)))
        self.options = Options(**{"pinned": pinned, "policy": DENSE, **options})
        layout = engine_layout(self.config, worker_block_bytes(self.config))
        self.caches = caches(self.config)
        pages = Pages(layout, worker_pages(self.config, layout, self.caches))
        storage = StorageConfig(
            url="memory://",
            namespace=bytes(32),
            namespace_text="stub",
            arena_bytes=pinned,
            block_bytes=layout.block_bytes,
        )
        self.worker = WorkerSide(self.options, layout, pages, storage, DictStorage)
        self.scheduler = SchedulerSide(self.options, self.config, 1)
        self.scheduler.start({0: self.worker.handshake(no_states(self.config))})
        self.layout = layout

    @property
    def storage(self) -> DictStorage:
        storage = self.worker.storage
        assert isinstance(storage, DictStorage)
        return storage

    def step(
        self, running: dict[str, tuple[int, tuple[list[int], ...]]] | None = None
    ) -> tuple[StepMetadata, Any]:
        """One engine step: `running` maps request ids to scheduled tokens and block tables."""
        running = running or {}
        self.scheduler.bind_tables(
            lambda name: [[SimpleNamespace(block_id=i) for i in ids] for ids in running[name][1]]
        )
        output = SimpleNamespace(
            num_scheduled_tokens={name: tokens for name, (tokens, _) in running.items()}
        )
        metadata = self.scheduler.step_metadata(output)
        self.worker.load(metadata)
        self.worker.save(metadata)
        results = self.worker.results()
        events = self.worker.events()
        if events is not None:
            self.scheduler.apply(events)
        return metadata, results

    def compute(self, made: SimpleNamespace, tables: tuple[list[int], ...]) -> StepMetadata:
        """Have a new request computed in one step."""
        self.scheduler.allocated(made, blocks(tables), 0)
        metadata, _ = self.step({made.request_id: (made.num_tokens, tables)})
        self.step()
        made.num_computed_tokens = made.num_tokens
        return metadata

    def page_bytes(self, group: int, block_id: int) -> bytes:
        """One block's bytes, layer by layer."""
        names = self.config.kv_cache_tensors[group].layers
        return b"".join(bytes(self.caches[n][block_id].flatten().numpy()) for n in names)


def blocks(tables: tuple[list[int], ...]) -> SimpleNamespace:
    """The engine's KVCacheBlocks, as far as it is asked."""
    return SimpleNamespace(get_block_ids=lambda: tables)
