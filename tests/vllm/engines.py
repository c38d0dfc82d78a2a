"""Tiny engines in the test's own process: scheduler and worker are objects we can look into."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One thread and no compiler: models this small gain nothing, and threads that wait for each
    # other on a busy machine made rounds twenty times slower.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    # Llama 4: without it, chunked layers are full ones to the cache.
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1",
}
os.environ.update(ENVIRONMENT)  # before the engine is imported: it reads some of them then

gc.disable()  # an import makes no garbage, and looking for it takes a fifth of this one's 20 s
import quick_starts  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

gc.enable()
quick_starts.prepare()

MODELS = ("tinyllama", "tinygemma3")
BLOCK_TOKENS = 32
MAX_TOKENS = 1024
SMALL_POOL = {"tinyllama": 40, "tinygemma3": 104}
"""Blocks of a pool that holds one request of MAX_TOKENS, and not the prompts of a round."""
LARGE_POOL = 400

NOISE = 1e-4
"""What an engine alone differs by from itself, depending on the CPU: nothing on an Intel Xeon, up
to 5e-6 on an AMD EPYC where part of a prompt comes from its own cache. Wrong bytes show more."""


def computes_deepseek_v4() -> bool:
    """Whether vLLM has the kernels for it on this CPU: those are built for AVX-512 only."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0]
    return "avx512f" in flags.split()


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int

    def same_output(self, other: Answer) -> bool:
        """Whether tokens are equal and logprobs are, but for `NOISE`."""
        return self.tokens == other.tokens and self.same_logprobs(other)

    def same_logprobs(self, other: Answer) -> bool:
        """Whether logprobs are equal but for `NOISE`."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return all(abs(a - b) <= NOISE for a, b in pairs)


def prompt(seed: int, tokens: int = 500) -> list[int]:
    """Random token ids, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(tokens)]


ROUND = [prompt(seed) for seed in range(6)]
"""Prompts that do not fit in the small pools together: 6 x 16 blocks a group."""


def sampling(tokens: int) -> SamplingParams:
    """Greedy, with logprobs."""
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1
    )


class Engine:
    """An engine with or without a connector."""

    def __init__(
        self, model: str, *, blocks: int, extra: dict[str, Any] | None = None, **more: Any
    ) -> None:
        transfer = None
        if extra is not None:
            transfer = {
                "kv_connector": "TierKVConnector",
                "kv_connector_module_path": "tierkv.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "identity": "test",
                    "pinned": "64MiB",
                    "load": "always",  # models this small are computed as quickly
                    **extra,
                },
            }
        settings = {
            "dtype": "float32",
            "max_model_len": MAX_TOKENS,
            "block_size": BLOCK_TOKENS,
            **more,
        }
        self.llm = LLM(
            model=str(HERE / "models" / model),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            num_gpu_blocks_override=blocks,
            disable_hybrid_kv_cache_manager=False,
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
            **settings,
        )
        _open.append(self)

    @property
    def core(self) -> Any:
        """The engine core: what steps."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler_side(self) -> Any:
        """The connector's scheduler side."""
        return self.core.scheduler.connector.scheduler

    @property
    def worker_side(self) -> Any:
        """The connector's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    @property
    def counters(self) -> dict[str, int]:
        """The ledger's counters."""
        return self.scheduler_side.ledger.stats()

    def ask(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """One prompt after the other, so that every prompt is computed in the same shapes."""
        return [self._ask_one(p) for p in prompts]

    def _ask_one(self, tokens: list[int]) -> Answer:
        [out] = self.llm.generate({"prompt_token_ids": tokens}, sampling(8), use_tqdm=False)
        completion = out.outputs[0]
        return Answer(
            tuple(completion.token_ids),
            tuple(
                p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)
            ),
            out.num_cached_tokens,
        )

    def settle(self, limit_s: float = 30.0) -> None:
        """Step the idle engine until no move is out, as its own loop would."""
        until = time.monotonic() + limit_s
        while self.core.scheduler.has_requests():
            self.core.step_fn()
            if time.monotonic() > until:
                raise TimeoutError("the engine does not come to rest")

    def close(self) -> None:
        """Shut down in the engine's own order: worker, then scheduler."""
        if self in _open:
            _open.remove(self)
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()
            quick_starts.freeze()  # with the modules that only a start imports


_open: list[Engine] = []


def close_all() -> None:
    """End every engine that is still open."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    for engine in list(_open):
        engine.close()
    ensure_kv_transfer_shutdown()  # an engine whose start failed leaves its connector behind


@contextlib.contextmanager
def engine(
    model: str,
    *,
    blocks: int | None = None,
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> Iterator[Engine]:
    """An engine for a while; `blocks` defaults to the small pool."""
    made = Engine(model, blocks=blocks or SMALL_POOL[model], extra=extra, **more)
    try:
        yield made
    finally:
        made.close()


def corrupt_loads(ours: Engine, group: int) -> None:
    """Zero the slots of one group's blocks right before they are copied into the pages."""
    worker = ours.worker_side
    scatter = worker._pages.scatter

    def zero_first(groups: Any, block_ids: Any, arena: Any, offsets: Any) -> None:
        nbytes = worker._layout.groups[group].block_bytes
        for offset in offsets[groups == group].tolist():
            arena[offset : offset + nbytes] = 0
        scatter(groups, block_ids, arena, offsets)

    worker._pages.scatter = zero_first


class References:
    """Answers of an engine without a connector."""

    def __init__(self) -> None:
        self._rounds: dict[str, tuple[list[Answer], list[Answer]]] = {}

    def __getitem__(self, model: str) -> tuple[list[Answer], list[Answer]]:
        """Round 1 (nothing cached) and round 2 (the engine's own prefix cache, large pool)."""
        if model not in self._rounds:
            with engine(model, blocks=LARGE_POOL) as plain:
                self._rounds[model] = (plain.ask(ROUND), plain.ask(ROUND))
        return self._rounds[model]
