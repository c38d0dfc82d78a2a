"""What the connector adds to a scheduler step, beside vLLM's own offloading connector.

``python -m bench.vllm_scheduler`` (in the environment with vLLM) gives `SchedulerSide` and vLLM's
`OffloadingConnectorScheduler` (with its CPU manager) the same requests, block tables and steps, one
after the other, without an engine or any data. Both get room for everything and keep their
defaults, so vLLM's keeps prompts only. Times are the sum of all calls that one step makes, in
milliseconds of this thread's CPU: these calls neither wait nor do I/O, so on a machine that is not
shared that is the time.

decode: every running request computes one more token; blocks fill up in turn.
prefill: the same while one more prompt of this length, of which nothing is stored, is computed in
    chunks of ``--chunk`` tokens: lookup, allocation and saves included.
hit: the same while one more prompt is scheduled of which everything is stored: lookup and order of
    the load. The load's end, and the request's, are steps of their own and not counted.

Layouts: `full` is one group of full attention, `hybrid` the same beside a window of 1,024 tokens.
``--check`` exits with 1 unless ours takes at most half of vLLM's time at the longest prompts
(medians, each scenario) and at most 1 ms in the 99th percentile of decode steps. ``--json`` prints
one object.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tierkv.blocks import Copied, Move, MoveDone, Outcome, pack_event
from tierkv.connectors.vllm.options import Options
from tierkv.connectors.vllm.scheduler import SchedulerSide
from tierkv.connectors.vllm.wire import Handshake, WorkerEvents

BLOCK = 16
WINDOW = 1024
GOAL_RATIO, GOAL_P99_MS = 0.5, 1.0
_MANY = 1 << 24
_NULL = KVCacheBlock(0, is_null=True)


def cache_config(layout: str) -> KVCacheConfig:
    """The engine's description of the cache, as its scheduler sees it."""
    common = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    specs = [FullAttentionSpec(**common)]
    if layout == "hybrid":
        specs.append(SlidingWindowSpec(**common, sliding_window=WINDOW))
    groups = [KVCacheGroupSpec([f"layer.{g}"], spec) for g, spec in enumerate(specs)]
    page = specs[0].page_size_bytes
    tensors = [KVCacheTensor(page * 64, [f"layer.{g}"], page * 64, page) for g in range(len(specs))]
    return KVCacheConfig(
        64,
        tensors,
        groups,
        kv_cache_layout="LBHNC",
        hash_block_size=BLOCK,
        cache_hit_alignment_tokens=BLOCK,
        prefix_cache_retention_interval=0,
    )


class Request:
    """What connectors read of an engine's request."""

    lora_request = kv_transfer_params = kv_hints = session_id = None
    skip_reading_prefix_cache = False
    shared_prefix_boundary = 0
    status = RequestStatus.RUNNING

    def __init__(self, name: str, tokens: int, names: list[bytes]) -> None:
        self.request_id, self.num_prompt_tokens = name, tokens
        self.num_tokens, self.num_computed_tokens = tokens, 0
        self.names = names
        self.block_hashes = names[: tokens // BLOCK]

    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED_STOPPED

    def grow(self) -> None:
        """One more token was computed, and the next one sampled."""
        self.num_computed_tokens = self.num_tokens
        self.num_tokens += 1
        if self.num_tokens % BLOCK == 0:
            self.block_hashes.append(self.names[self.num_tokens // BLOCK - 1])


class Engine:
    """The engine's side of the calls: requests, their tables, and steps."""

    def __init__(self, layout: str, seed: int) -> None:
        self.config = cache_config(layout)
        self._random = np.random.default_rng(seed)
        self._last_block = 0
        self.tables: dict[str, tuple[list[KVCacheBlock], ...]] = {}
        self.running: list[Request] = []

    def request(self, name: str, tokens: int) -> Request:
        """A prompt of which nothing is stored, with room to grow."""
        raw = self._random.bytes(32 * (tokens // BLOCK + 256))
        names = [raw[at : at + 32] for at in range(0, len(raw), 32)]
        return Request(name, tokens, names)

    def allocate(self, request: Request, upto: int, hit: int = 0) -> tuple[list[int], ...]:
        """Blocks for [0, upto) and what was new; of a window only what it still covers of a hit."""
        table = self.tables.setdefault(
            request.request_id, tuple([] for _ in self.config.kv_cache_groups)
        )
        added = []
        for g, blocks in enumerate(table):
            dead = 0 if g == 0 else max(0, hit - WINDOW + 1) // BLOCK
            new = []
            for at in range(len(blocks), -(-upto // BLOCK)):
                if at < dead:
                    new.append(_NULL)
                    continue
                self._last_block += 1
                new.append(KVCacheBlock(self._last_block))
            blocks.extend(new)
            added.append([b.block_id for b in new])
        return tuple(added)

    def slide(self, request: Request) -> None:
        """Take back the blocks of windows that nobody reads any more."""
        for blocks in self.tables[request.request_id][1:]:
            at = max(0, request.num_computed_tokens - WINDOW + 1) // BLOCK - 1
            while at >= 0 and blocks[at] is not _NULL:
                blocks[at] = _NULL
                at -= 1

    def blocks(self, request_id: str) -> KVCacheBlocks:
        return KVCacheBlocks(self.tables[request_id])

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.blocks(request_id).get_block_ids()

    def output(
        self,
        scheduled: dict[str, int],
        added: dict[str, tuple[list[int], ...] | None],
        new: Request | None = None,
        finished: tuple[str, ...] = (),
    ) -> Any:
        """This step's SchedulerOutput, as far as connectors read it."""
        first = [] if new is None else [new.request_id]
        cached = [name for name in scheduled if name not in first]
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=added[name]) for name in first
            ],
            scheduled_cached_reqs=CachedRequestData(
                cached, set(), [], {}, [added.get(name) for name in cached], [], []
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=set(finished),
            preempted_req_ids=None,
            kv_cache_block_copies=None,
            kv_connector_block_state=KVConnectorBlockState(set(scheduled), self.block_ids, {}),
        )


class Ours:
    """tierkv's scheduler side; its worker answers every move at the end of the step."""

    name = "tierkv"

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        sizes = tuple(g.kv_cache_spec.page_size_bytes for g in config.kv_cache_groups)
        self.side = SchedulerSide(Options(url="memory://"), config, 1)
        self.side.start({0: Handshake(0, _MANY * max(sizes), sizes, (0,) * len(sizes), [])})
        self.side.bind_tables(lambda name: engine.tables[name])
        self._report: WorkerEvents | None = None

    def new(self, request: Request) -> None:
        pass

    def match(self, request: Request) -> int:
        return self.side.matched_tokens(request, 0)[0] or 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        self.side.allocated(request, blocks, tokens)

    def step(self, output: Any) -> Any:
        meta = self.side.step_metadata(output)
        if self._report is not None:
            self.side.apply(self._report)
        self.side.stats()
        self.side.pending()
        return meta

    def answer(self, meta: Any) -> None:
        """The worker's report for the next step; not timed."""
        events = []
        for packed in (*meta.saves, *(packed for _, packed in meta.loads)):
            move = Move.unpack(packed)
            done = MoveDone(move.id, np.full(len(move), Outcome.DONE, np.uint8))
            events += [pack_event(Copied(move.id)), pack_event(done)]
        self._report = WorkerEvents({0: events}) if events else None

    def finished(self, request: Request) -> None:
        self.side.finished(request.request_id)


class _Spec(OffloadingSpec):
    """vLLM's CPU spec without the parts that want a GPU."""

    def get_manager(self) -> OffloadingManager:
        return CPUOffloadingManager(_MANY)

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


class Theirs:
    """vLLM's own scheduler side; its worker answers every job at the end of the step."""

    name = "vllm"

    def __init__(self, engine: Engine) -> None:
        groups = tuple(
            OffloadingGroupConfig(BLOCK, tuple(g.layer_names), i)
            for i, g in enumerate(engine.config.kv_cache_groups)
        )
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
        spec = _Spec(
            OffloadingConfig(
                groups=groups,
                worker_kv_bytes_per_block=1 << 16,
                enable_kv_cache_events=False,
                extra_config={},
                engine_id="bench",
                model=OffloadingModelConfig("bench", "bfloat16"),
                cache=OffloadingCacheConfig(BLOCK, 1),
                parallel=parallel,
            )
        )
        settings = SimpleNamespace(
            cache_config=SimpleNamespace(
                prefix_cache_retention_interval=0, enable_prefix_caching=True
            ),
            speculative_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
        )
        self.side = OffloadingConnectorScheduler(spec, settings, engine.config)
        self._report = KVConnectorOutput(kv_connector_worker_meta=OffloadingWorkerMetadata())

    def new(self, request: Request) -> None:
        self.side.on_new_request(request)

    def match(self, request: Request) -> int:
        return self.side.get_num_new_matched_tokens(request, 0)[0] or 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        self.side.update_state_after_alloc(request, blocks, tokens)

    def step(self, output: Any) -> Any:
        meta = self.side.build_connector_meta(output)
        self.side.update_connector_output(self._report)
        self.side.get_stats()
        list(self.side.take_events())
        self.side.has_pending_push_work()
        return meta

    def answer(self, meta: Any) -> None:
        """The worker's report for the next step; not timed."""
        report = OffloadingWorkerMetadata()
        for job in (*meta.store_jobs, *meta.load_jobs):
            report.mark_completed(job)
        self._report = KVConnectorOutput(kv_connector_worker_meta=report)

    def finished(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        self.side.request_finished(request)


Side = Ours | Theirs


@dataclass
class Driver:
    """One connector under one load."""

    engine: Engine
    side: Side
    tokens: int
    chunk: int

    def settle(self, *finished: str) -> None:
        """Two empty steps: everything that is out ends."""
        self.side.answer(self.side.step(self.engine.output({}, {}, finished=finished)))
        self.side.answer(self.side.step(self.engine.output({}, {})))

    def start(self, requests: int) -> None:
        """Have so many prompts computed, of different lengths: not all save in one step."""
        for n in range(requests):
            shorter = n * 37 % min(4096, self.tokens // 4)
            made = self.engine.request(f"run-{n}", self.tokens - shorter)
            self.side.new(made)
            self.side.match(made)
            added = self.engine.allocate(made, made.num_tokens + 1)
            self.side.allocated(made, self.engine.blocks(made.request_id), 0)
            scheduled = {made.request_id: made.num_tokens}
            output = self.engine.output(scheduled, {made.request_id: added}, made)
            self.side.answer(self.side.step(output))
            made.grow()
            self.engine.slide(made)
            self.engine.running.append(made)
        self.settle()

    def decode(self) -> tuple[dict[str, int], dict[str, tuple[list[int], ...] | None]]:
        """What a step of the running requests schedules."""
        scheduled: dict[str, int] = {}
        added: dict[str, tuple[list[int], ...] | None] = {}
        for r in self.engine.running:
            scheduled[r.request_id] = 1
            fresh = self.engine.allocate(r, r.num_computed_tokens + 1)
            added[r.request_id] = fresh if any(fresh) else None
        return scheduled, added

    def grown(self) -> None:
        for r in self.engine.running:
            r.grow()
            self.engine.slide(r)

    def timed(self, act: Callable[[], Any]) -> tuple[float, Any]:
        began = time.thread_time()
        made = act()
        return (time.thread_time() - began) * 1e3, made

    def decode_steps(self, steps: int) -> Iterator[float]:
        for _ in range(steps):
            output = self.engine.output(*self.decode())
            spent, meta = self.timed(lambda output=output: self.side.step(output))
            self.side.answer(meta)
            self.grown()
            yield spent

    def prefill(self, name: str) -> Iterator[float]:
        """The steps of one more prompt; it is left stored."""
        made = self.engine.request(name, self.tokens)
        lookup, _ = self.timed(lambda: (self.side.new(made), self.side.match(made)))
        first = made
        while made.num_computed_tokens < made.num_tokens:
            count = min(self.chunk, made.num_tokens - made.num_computed_tokens)
            scheduled, added = self.decode()
            added[name] = self.engine.allocate(made, made.num_computed_tokens + count)
            scheduled[name] = count
            blocks = self.engine.blocks(name)
            if first is not None:
                lookup += self.timed(lambda blocks=blocks: self.side.allocated(made, blocks, 0))[0]
            output = self.engine.output(scheduled, added, first)
            spent, meta = self.timed(lambda output=output: self.side.step(output))
            yield spent + lookup
            self.side.answer(meta)
            first, lookup = None, 0.0
            made.num_computed_tokens += count
            self.engine.slide(made)
            self.grown()
        self._end(made)

    def hit(self, name: str) -> float:
        """The step that orders the load of a prompt that is stored."""
        stored = self.engine.running[0]  # of the full length
        made = Request(name, self.tokens, stored.names)
        spent, found = self.timed(lambda: (self.side.new(made), self.side.match(made))[1])
        if found < self.tokens - 2 * BLOCK:
            raise RuntimeError(f"{self.side.name}: {found} of {self.tokens} tokens were found")
        self.engine.allocate(made, self.tokens, found)
        blocks = self.engine.blocks(name)
        spent += self.timed(lambda: self.side.allocated(made, blocks, found))[0]
        output = self.engine.output(*self.decode())
        more, meta = self.timed(lambda: self.side.step(output))
        self.side.answer(meta)
        self.grown()
        self.settle()
        self._end(made)
        return spent + more

    def _end(self, made: Request) -> None:
        self.side.finished(made)
        self.settle(made.request_id)
        del self.engine.tables[made.request_id]


def figures(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {
        "p50_ms": round(statistics.median(times), 4),
        "p99_ms": round(float(np.percentile(times, 99)), 4),
    }


def measure(layout: str, requests: int, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both connectors under one load, interleaved in rounds."""
    drivers = [
        Driver(engine, side(engine), tokens, args.chunk)
        for side in (Ours, Theirs)
        for engine in [Engine(layout, args.seed)]
    ]
    for driver in drivers:
        driver.start(requests)
    gc.collect()
    gc.freeze()  # as the engine does with what it has at its start
    times: dict[str, dict[str, list[float]]] = {
        d.side.name: {"decode": [], "prefill": [], "hit": []} for d in drivers
    }
    for n in range(args.rounds):
        for driver in random.Random(n).sample(drivers, len(drivers)):
            found = times[driver.side.name]
            found["decode"] += driver.decode_steps(args.steps)
            found["prefill"] += driver.prefill(f"fill-{n}")
            found["hit"].append(driver.hit(f"hit-{n}"))
    gc.unfreeze()
    cell: dict[str, Any] = {"layout": layout, "requests": requests, "tokens": tokens}
    for scenario in ("decode", "prefill", "hit"):
        ours, theirs = (figures(times[d.side.name][scenario]) for d in drivers)
        ratio = round(ours["p50_ms"] / theirs["p50_ms"], 3)
        cell[scenario] = {"tierkv": ours, "vllm": theirs, "ratio_p50": ratio}
    return cell


def missed(cells: list[dict[str, Any]]) -> list[str]:
    """Which goals do not hold."""
    longest, most = max(c["tokens"] for c in cells), max(c["requests"] for c in cells)
    out = []
    for cell in cells:
        where = f"{cell['layout']}, {cell['requests']} requests, {cell['tokens']} tokens"
        for scenario in ("decode", "prefill", "hit"):
            ratio = cell[scenario]["ratio_p50"]
            if cell["tokens"] == longest and ratio > GOAL_RATIO:
                out.append(f"{where}: {scenario} takes {ratio} of vLLM's time")
        slow = cell["decode"]["tierkv"]["p99_ms"]
        if cell["requests"] == most and slow > GOAL_P99_MS:
            out.append(f"{where}: p99 of a decode step is {slow} ms")
    return out


def table(cells: list[dict[str, Any]]) -> str:
    """The cells as text."""
    lines = ["layout  requests  tokens   step      tierkv p50   p99     vllm p50   p99     ratio"]
    for c in cells:
        for scenario in ("decode", "prefill", "hit"):
            f = c[scenario]
            ours, theirs = f["tierkv"], f["vllm"]
            lines.append(
                f"{c['layout']:<8}{c['requests']:>8}{c['tokens']:>8}   {scenario:<9}"
                f"{ours['p50_ms']:>10.3f}{ours['p99_ms']:>9.3f}"
                f"{theirs['p50_ms']:>10.3f}{theirs['p99_ms']:>9.3f}{f['ratio_p50']:>9.2f}"
            )
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default="full,hybrid")
    parser.add_argument("--requests", type=numbers, default=[1, 64, 256])
    parser.add_argument("--tokens", type=numbers, default=[1024, 16384, 131072])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cells = []
    for layout in args.layouts.split(","):
        for requests in args.requests:
            for tokens in args.tokens:
                cells.append(measure(layout, requests, tokens, args))
                if not args.json:
                    print(table(cells[-1:]), file=sys.stderr, flush=True)
    failures = missed(cells)
    found = {
        "machine": {"python": platform.python_version(), "vllm": vllm.__version__},
        "cells": cells,
        "missed": failures,
    }
    print(json.dumps(found) if args.json else "\n".join([table(cells), *failures]))
    return int(args.check and bool(failures))


if __name__ == "__main__":
    sys.exit(main())
