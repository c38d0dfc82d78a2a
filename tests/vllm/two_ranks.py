"""`python -m two_ranks MODEL EXTRA_JSON SETTINGS_JSON [STORE]`: two ranks, the findings as JSON.

Scheduler and both workers are processes of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path
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


def slow_down_rank_1(_worker: object, seconds: float, patience: float) -> None:
    """From now on one rank hears of its tier's moves so late, and waits so long for a load."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group().worker
    if side._rank != 1:
        return
    side._options = dataclasses.replace(side._options, load_timeout_s=patience)
    poll: Any = getattr(side.storage.poll, "prompt", side.storage.poll)
    held: deque[tuple[float, Any]] = getattr(side.storage.poll, "held", deque())

    def late() -> list[Any]:
        held.extend((time.monotonic() + seconds, event) for event in poll())
        heard = []
        while held and held[0][0] <= time.monotonic():
            heard.append(held.popleft()[1])
        return heard

    late.prompt = poll  # type: ignore[attr-defined]
    late.held = held  # type: ignore[attr-defined]
    side.storage.poll = late


def answers(found: list[Answer]) -> dict[str, Any]:
    """Answers as JSON."""
    return {
        "output": [[list(a.tokens), list(a.logprobs)] for a in found],
        "cached_tokens": [a.cached_tokens for a in found],
    }


class Ranks:
    """An engine of two ranks."""

    def __init__(self, model: str, extra: str, settings: str) -> None:
        options = {"blocks": 400, "tensor_parallel_size": 2, **json.loads(settings)}
        self.engine = Engine(model, extra=json.loads(extra), **options)
        self.call = self.engine.llm.collective_rpc

    def ask(self) -> dict[str, Any]:
        """A round of prompts, none of which the engine's own cache knows."""
        assert self.engine.llm.reset_prefix_cache()
        return answers(self.engine.ask(PROMPTS))

    def ask_until(self, cached_tokens: list[int]) -> dict[str, Any]:
        """A round that hits so much, after as many as it takes."""
        until = time.monotonic() + RETURN_S
        while (found := self.ask())["cached_tokens"] != cached_tokens:
            assert time.monotonic() < until, f"{found['cached_tokens']} and not {cached_tokens}"
        return found

    def end(self) -> None:
        """Waits for what is on its way into the tier."""
        self.engine.llm.llm_engine.engine_core.shutdown()


def of_the_tier(one: Ranks, hits: list[int]) -> dict[str, Any]:
    """One rank's tier lost, back, slow, slower than loads may be, and quick again."""
    found = {}
    one.call(kill_keeper_of_rank_1)
    found["lost"] = one.ask()
    found["back"] = one.ask_until(hits)
    one.call(slow_down_rank_1, args=(0.7, 20.0))
    found["slow"] = one.ask()
    one.call(slow_down_rank_1, args=(1.5, 0.5))
    found["too slow"] = one.ask()
    one.call(slow_down_rank_1, args=(0.0, 20.0))
    found["quick again"] = one.ask_until(hits)
    return found


def lose_rank_1(store: Path) -> None:
    """Delete what one rank stored."""
    metas = {p: json.loads(p.read_text()) for p in store.glob("*/meta.json")}
    [lost] = [p.parent for p, meta in metas.items() if meta["rank"] == 1]
    shutil.rmtree(lost)


def main(model: str, extra: str, settings: str, store: str = "") -> None:
    """Computed; loaded; and, with a store, what `of_the_tier` and a restart without rank 1's."""
    one = Ranks(model, extra, settings)
    rounds = {"computed": one.ask()}
    ranks = [one.call(rank_of_worker)]
    rounds["loaded"] = one.ask()
    ranks.append(one.call(rank_of_worker))
    if store:
        hits = rounds["loaded"]["cached_tokens"]
        rounds |= of_the_tier(one, hits)
        one.end()
        lose_rank_1(Path(store))
        one = Ranks(model, extra, settings)
        rounds["half a restart"] = one.ask()
        rounds["filled again"] = one.ask_until(hits)
    one.end()
    print(json.dumps({"rounds": rounds, "ranks": ranks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
