"""vLLM's own ``fs`` tier for `bench.disk_tier`: its manager, driven as vLLM drives it."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from bench.disk_engines import Engine, Job, Setup, split

_POLL_S: Final = 0.001
"""The engine asks for finished jobs once a step, which takes longer than this."""


def _config(block_bytes: int) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("kv",), group_id=0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig(name="bench", dtype="uint8"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


class VllmFsEngine(Engine):
    """Stores and loads through `FileSystemTierManager`, with the C extension where it is built."""

    name = "vllm-fs"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._ids = itertools.count(1)
        self._context = ReqContext(req_id="bench")
        self._waiting: dict[int, asyncio.Future[JobResult]] = {}
        self._poller: asyncio.Task[None] | None = None

    async def open(self) -> None:
        size = self.setup.block_bytes
        slots = np.frombuffer(self.setup.arena.view, np.uint8).reshape(-1, size)
        self._manager = await asyncio.to_thread(
            FileSystemTierManager,
            SimpleNamespace(config=_config(size), blocks_per_chunk=1),
            memoryview(slots),
            "fs",
            str(self.setup.directory),
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._manager.shutdown)

    async def move(self, job: Job) -> None:
        job_id = next(self._ids)
        transfer = TransferJob(
            job_id=job_id,
            keys=[make_offload_key(name, 0) for name in split(job.hashes)],
            chunk_ids=np.arange(job.first, job.first + job.count),
            is_promotion=not job.save,
            req_context=self._context,
        )
        done = self._waiting[job_id] = asyncio.get_running_loop().create_future()
        submit = self._manager.submit_store if job.save else self._manager.submit_load
        submit(transfer)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
            self._poller.add_done_callback(self._polled)
        try:
            result = await done
        finally:
            self._waiting.pop(job_id, None)
        if not result.success:
            raise RuntimeError("vllm-fs: a job failed")

    async def _poll(self) -> None:
        while self._waiting:
            for result in self._manager.get_finished_jobs():
                done = self._waiting.pop(result.job_id, None)
                if done is not None and not done.done():  # not given up meanwhile
                    done.set_result(result)
            await asyncio.sleep(_POLL_S)

    def _polled(self, poller: asyncio.Task[None]) -> None:
        """Nobody may wait for ever for what a poller that failed will not bring."""
        error = poller.exception() if not poller.cancelled() else RuntimeError("cancelled")
        if error is not None:
            for done in self._waiting.values():
                if not done.done():
                    done.set_exception(error)

    async def find(self, hashes: bytes) -> int:
        left = [make_offload_key(name, 0) for name in split(hashes)]
        context, hits = ReqContext(req_id=f"lookup {time.monotonic_ns()}"), 0
        while left:
            answers = [(key, self._manager.lookup(key, context)) for key in left]
            hits += sum(answer is LookupResult.HIT for _, answer in answers)
            left = [key for key, answer in answers if answer is LookupResult.RETRY]
            self._manager.on_schedule_end(None)
            await asyncio.sleep(_POLL_S if left else 0)
        self._manager.on_request_finished(context)
        return hits

    def forget(self, hashes: bytes) -> None:
        for name in split(hashes):
            path = self._manager.file_mapper.get_file_name(make_offload_key(name, 0))
            Path(path).unlink(missing_ok=True)

    def modes(self) -> dict[str, str]:
        return {
            "direct": "yes" if self._manager._use_o_direct else "no",
            "extension": "yes" if io._HAS_FSIO_C else "no",
        }
