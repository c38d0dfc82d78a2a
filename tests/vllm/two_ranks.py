"""`python -m two_ranks MODEL EXTRA_JSON SETTINGS_JSON`: tensor parallel 2, the findings as JSON.

Scheduler and both workers are processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

from engines import ROUND, Answer, Engine

PROMPTS = ROUND[:3]
RETURN_S = 60.0


def rank_of_worker(_worker: object) -> dict[str, Any]:
    """What one rank copied, and a digest of the slots in its arena. Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group().worker
    return {
        "rank": side._rank,
        "block_bytes": list(side._layout.block_bytes),
        "copied_out_bytes": side.counters["copied_out_bytes"],
        "copied_in_bytes": side.counters["copied_in_bytes"],
        "arena": hashlib.sha256(side._arena.view).hexdigest(),
    }


def kill_keeper_of_rank_1(_worker: object) -> int:
    """End the storage half of one rank. Runs in the workers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group().worker
    if side._rank == 1:
        os.kill(side.storage.pid, signal.SIGKILL)
    return int(side._rank)


def answers(found: list[Answer]) -> dict[str, Any]:
    """Answers as JSON."""
    return {
        "output": [[list(a.tokens), list(a.logprobs)] for a in found],
        "cached_tokens": [a.cached_tokens for a in found],
    }


def main(model: str, extra: str, settings: str) -> None:
    """Computed; loaded; just after rank 1 lost its tier; when it is back."""
    ours = Engine(
        model, blocks=400, extra=json.loads(extra), tensor_parallel_size=2, **json.loads(settings)
    )

    def ask() -> dict[str, Any]:
        assert ours.llm.reset_prefix_cache()
        return answers(ours.ask(PROMPTS))

    rounds = [ask()]
    ranks = [ours.llm.collective_rpc(rank_of_worker)]
    rounds.append(ask())
    ranks.append(ours.llm.collective_rpc(rank_of_worker))
    if "nvme" in extra:
        ours.llm.collective_rpc(kill_keeper_of_rank_1)
        rounds.append(ask())
        until = time.monotonic() + RETURN_S
        rounds.append(ask())
        while rounds[-1]["cached_tokens"] != rounds[1]["cached_tokens"]:
            assert time.monotonic() < until, "the tier of rank 1 does not come back"
            rounds[-1] = ask()
    ours.llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"rounds": rounds, "ranks": ranks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
