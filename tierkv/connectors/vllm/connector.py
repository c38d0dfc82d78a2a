"""`TierKVConnector`, the one class that users name. It only passes on, by role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.connectors.vllm import layout as engine
from tierkv.connectors.vllm.events import kv_events
from tierkv.connectors.vllm.namespace import check_hash_algorithm, engine_namespace
from tierkv.connectors.vllm.options import Options
from tierkv.connectors.vllm.scheduler import SchedulerSide
from tierkv.connectors.vllm.stats import TierKVMetrics, TierKVStats
from tierkv.connectors.vllm.version import check_settings, check_version
from tierkv.connectors.vllm.wire import Handshake, StepMetadata, WorkerEvents
from tierkv.connectors.vllm.worker import WorkerSide
from tierkv.device import Pages
from tierkv.storage import StorageConfig

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's interface over `SchedulerSide` in the scheduler and `WorkerSide` in each worker.

    Raises `ConfigError` (one line: what, where, what to write instead) for an engine version,
    setting, option or KV cache group that it does not support.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        speculative = vllm_config.speculative_config
        kv_cache_config = engine.with_draft_groups(
            kv_cache_config, speculative is not None and speculative.use_eagle_block_drop()
        )
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        check_settings(vllm_config)
        check_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
        self._options = Options.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._state_ratios: tuple[int | None, ...] = ()
        if role is KVConnectorRole.SCHEDULER:
            world = vllm_config.parallel_config.world_size
            publishes = vllm_config.kv_events_config
            self._scheduler = SchedulerSide(
                self._options,
                kv_cache_config,
                world,
                events=publishes is not None and publishes.enable_kv_cache_events,
            )

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler role's half."""
        if self._scheduler is None:
            raise RuntimeError(f"{self.role} has no scheduler side")
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The worker role's half; it exists once the KV caches are registered."""
        if self._worker is None:
            raise RuntimeError(f"{self.role} has no worker side (yet)")
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is a later miss, nothing else."""
        return False

    # Worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Compile the pages, make the arena, start the keeper."""
        from vllm.distributed import get_pp_group, get_tp_group

        config, options = self._kv_cache_config, self._options
        parallel = self._vllm_config.parallel_config
        tp_rank, pp_rank = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        rank = pp_rank * parallel.tensor_parallel_size + tp_rank
        self._state_ratios = engine.worker_state_ratios(
            config,
            self._vllm_config.compilation_config.static_forward_context,
            self._vllm_config.model_config.hf_text_config,
        )
        layout = engine.engine_layout(config, engine.worker_block_bytes(config), self._state_ratios)
        pages = Pages(layout, engine.worker_pages(config, layout, kv_caches))
        namespace = engine_namespace(
            self._vllm_config,
            config,
            layout,
            pages,
            options,
            version=vllm.__version__,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
        )
        storage = StorageConfig(
            url=options.url,
            namespace=namespace.digest,
            namespace_text=namespace.text,
            arena_bytes=options.pinned,
            block_bytes=layout.block_bytes,
            rank=rank,
            data_parallel_rank=parallel.data_parallel_rank,
            read_timeout_s=options.read_timeout_s,
            write_timeout_s=options.write_timeout_s,
            hang_timeout_s=options.hang_timeout_s,
            io_threads=options.io_threads,
            codec=options.codec,
        )
        self._worker = WorkerSide(options, layout, pages, storage)

    def get_handshake_metadata(self) -> Handshake:
        """Sizes and recovered keys of this rank; waits, bounded, until its tier is open."""
        return self.worker.handshake(self._state_ratios)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Nothing: the engine's stream goes on only when a save has read its pages (`worker`)."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carry out commands and start this step's loads; they end in later steps."""
        self.worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end before the engine schedules their request."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved in `wait_for_save`; not every model calls this."""

    def wait_for_save(self) -> None:
        """Copy what this step completed into the arena and send it on to the tier."""
        self.worker.save(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load ended, and which of them failed."""
        return self.worker.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to recompute; only ever non-empty with one full-attention group."""
        return self.worker.failed_block_ids()

    def build_connector_worker_meta(self) -> WorkerEvents | None:
        """This rank's events for the scheduler side."""
        return self.worker.events()

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise TypeError(f"metadata of another connector: {type(metadata).__name__}")
        return metadata

    # Scheduler ---------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the way to the block tables: the lists themselves, not copies of ids."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind_tables(lambda name: kv_cache_manager.get_blocks(name).blocks)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The workers' sizes and what their tiers recovered, keyed by (pp_rank, tp_rank)."""
        self.scheduler.start({shake.rank: shake for shake in metadata.values()})

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own; None where it should ask again."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load into these blocks, if there is one."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where the load just ordered comes from: pinned RAM is HOST, the storage tier DISK."""
        host, disk = self.scheduler.hit_sources(request, num_external_tokens)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """This step's orders for the workers."""
        return self.scheduler.step_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in the workers' events."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerEvents):
            self.scheduler.apply(report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is gone. Its blocks are free at once: what is saved lies in the arena."""
        self.scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with several groups."""
        self.scheduler.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping while moves are out, within a bound."""
        return self.scheduler.pending()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """`BlockStored` and `BlockRemoved` for what can be loaded from pinned RAM or the tier."""
        return list(kv_events(self.scheduler.news()))

    def reset_cache(self) -> bool:
        """Everything older is a miss from now on, in every tier (new weights)."""
        self.scheduler.rotate()
        return True

    # Both --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Worker: wait for saves on their way, within a bound, and close the keeper."""
        if self._worker is not None:
            self._worker.shutdown()

    def get_kv_connector_stats(self) -> TierKVStats | None:
        """Counters since the last call."""
        if self._scheduler is not None:
            return self._scheduler.stats()
        return self.worker.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierKVStats:
        """Stats that travelled as a dict."""
        return TierKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierKVMetrics:
        """`tierkv_*` on the engine's `/metrics`."""
        return TierKVMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
