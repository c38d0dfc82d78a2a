"""A real engine under random requests and random faults for as long as asked: `make soak-vllm`.

``python -m soak --seconds 1800`` (with `tests/vllm` and `tests/vllm/plugin` on ``PYTHONPATH``)
first asks an engine without a connector for the answer to every prompt. Then it sends random
crowds of these prompts (which share beginnings) to an engine with the connector, aborts some at
random steps, has the storage tier fail at random (`tierkv_test_flaky`), kills the keeper now and
then, rotates once in a while, and starts the engine anew three times. It prints one JSON object;
exit status 0 only if `ok`: no wrong output, nothing leased, in flight or missing from the pool
whenever the engine rests, no descriptor and no memory that grows from one engine to the next.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from engines import Engine, engine, prompt, sampling

from tierkv.connectors.vllm.stats import COUNTERS

NOISE = 1e-3
ANSWER_TOKENS = 12
MOST_GROWTH_BYTES = 200 << 20
Output = tuple[list[int], list[float]]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Prompts over three common trunks, of many lengths."""
    source = random.Random(seed)
    trunks = [prompt(500 + n, 700) for n in range(3)]
    return [
        source.choice(trunks)[: source.randrange(0, 700)]
        + prompt(seed * 1000 + n, source.randrange(5, 120))
        for n in range(count)
    ]


def output_of(out: Any) -> Output:
    [completion] = out.outputs
    tokens = list(completion.token_ids)
    return tokens, [p[t].logprob for p, t in zip(completion.logprobs, tokens, strict=True)]


def is_wrong(found: Output, wanted: Output) -> bool:
    """Another token, or a logprob beyond what the order of sums explains."""
    if found[0] != wanted[0]:
        return True
    return any(abs(a - b) > NOISE for a, b in zip(found[1], wanted[1], strict=True))


class Soak:
    """One run; `found` is what it prints."""

    def __init__(self, args: argparse.Namespace, store: Path) -> None:
        self.args, self.store = args, store
        self.random = random.Random(args.seed)
        self.prompts = prompts_of(args.seed, args.prompts)
        self.found: Counter[str] = Counter()
        self.leaks: list[str] = []
        self.rest: list[dict[str, int]] = []
        self.expected: list[Output] = []

    def reference(self) -> None:
        """The answers of an engine without a connector."""
        with engine(self.args.model) as plain:
            for n, tokens in enumerate(self.prompts):
                plain.llm.llm_engine.add_request(
                    f"r{n}", {"prompt_token_ids": tokens}, sampling(ANSWER_TOKENS)
                )
            done = {out.request_id: out for out in drain(plain)}
        self.expected = [output_of(done[key]) for key in sorted(done, key=place)]

    def phase(self, number: int, seconds: float) -> None:
        """One engine's life; its start is not counted."""
        args = self.args
        url = (
            f"flaky://{self.store}?capacity=64MiB&segment=4MiB"
            f"&rate={args.rate}&seed={args.seed + number}"
        )
        extra = {
            "url": url,
            "pinned": "6MiB",
            "read_timeout_s": 1.0,
            "write_timeout_s": 2.0,
            "hang_timeout_s": 2.0,
            "load_timeout_s": 3.0,
            "close_timeout_s": 5.0,
        }
        with engine(args.model, extra=extra) as ours:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self.crowd(ours)
                self.disturb(ours)
            self.check(ours, number)
            for name, value in (ours.counters | ours.worker_side.counters).items():
                if name in COUNTERS:
                    self.found[name] += value
            self.found["keeper_deaths"] += ours.worker_side.storage.stats()["keeper_deaths"]
        gc.collect()
        me = psutil.Process()
        self.rest.append({"fds": me.num_fds(), "rss_bytes": me.memory_info().rss})

    def crowd(self, ours: Engine) -> None:
        """Some requests at once, some of them aborted on their way."""
        llm = ours.llm.llm_engine
        chosen = [
            self.random.randrange(len(self.prompts)) for _ in range(self.random.randrange(1, 9))
        ]
        doomed = {}
        for at, n in enumerate(chosen):
            name = f"{self.found['requests']}-{at}:{n}"
            llm.add_request(name, {"prompt_token_ids": self.prompts[n]}, sampling(ANSWER_TOKENS))
            if self.random.random() < 0.2:
                doomed[name] = self.random.randrange(0, 12)
        self.found["requests"] += len(chosen)
        step = 0
        while llm.has_unfinished_requests():
            due = [name for name, when in doomed.items() if when == step]
            if due:
                llm.abort_request(due)
                self.found["aborted"] += len(due)
            step += 1
            for out in llm.step():
                if out.finished and out.request_id not in due:
                    self.judge(out)

    def judge(self, out: Any) -> None:
        if out.outputs[0].finish_reason == "abort":
            return
        self.found["answers"] += 1
        self.found["cached_tokens"] += out.num_cached_tokens or 0
        found, wanted = output_of(out), self.expected[place(out.request_id)]
        if is_wrong(found, wanted):
            self.found["wrong_outputs"] += 1
            print(f"wrong: {out.request_id} {found} {wanted}", file=sys.stderr)

    def disturb(self, ours: Engine) -> None:
        """Now and then: the pool forgets, the keeper dies, or the weights are said to change."""
        dice = self.random.random()
        if dice < 0.3:
            ours.llm.reset_prefix_cache()
        elif dice < 0.31:
            storage = ours.worker_side.storage
            if storage.is_alive:
                os.kill(storage.pid, signal.SIGKILL)
                self.found["keepers_killed"] += 1
        elif dice < 0.32:
            ours.settle(60)
            ours.llm.reset_prefix_cache(reset_connector=True)
        elif dice < 0.4:
            self.check(ours, -1)

    def check(self, ours: Engine, number: int) -> None:
        """Let the engine come to rest; what is still held is a leak."""
        ours.settle(60)
        until = time.monotonic() + 30
        while held(ours) and time.monotonic() < until:  # moves that hang are quarantined a while
            time.sleep(0.05)
            ours.core.step_fn()
        self.found["rests"] += 1
        self.leaks += [f"engine {number}: {what}" for what in held(ours)]

    def result(self, seconds: float) -> dict[str, Any]:
        first, last = self.rest[0], self.rest[-1]
        growth = last["rss_bytes"] - first["rss_bytes"]
        wrong, fds = self.found["wrong_outputs"], last["fds"] - first["fds"]
        reached = self.found["answers"] > 0 and self.found["hits"] > 0
        ok = reached and not wrong and not self.leaks and fds <= 0 and growth < MOST_GROWTH_BYTES
        return {
            "ok": ok,
            "seconds": round(seconds, 1),
            "restarts": len(self.rest) - 1,
            "wrong_outputs": wrong,
            "leaks": self.leaks,
            "leaked_descriptors": max(fds, 0),
            "rss_growth_bytes": growth,
            **{k: v for k, v in sorted(self.found.items()) if k != "wrong_outputs" and v},
        }


def place(request_id: str) -> int:
    """Which prompt a request is about; the engine may have put something behind its id."""
    return int(request_id.split("-")[0][1:] if request_id[0] == "r" else request_id.split(":")[1])


def drain(ours: Engine) -> list[Any]:
    found = []
    while ours.llm.llm_engine.has_unfinished_requests():
        found += [out for out in ours.llm.llm_engine.step() if out.finished]
    return found


def held(ours: Engine) -> list[str]:
    """What an engine at rest still holds, in words."""
    counters, side = ours.counters, ours.scheduler_side
    cache = ours.core.scheduler.kv_cache_manager.block_pool
    missing = ours.core.scheduler.kv_cache_config.num_blocks - 1 - cache.get_num_free_blocks()
    counts = {
        "leased blocks": counters["leased_blocks"],
        "moves in flight": counters["moves_in_flight"],
        "blocks of the engine's pool": missing,
        "requests": len(side._requests),
        "promises": len(side._promises),
        "loads": len(side._loads),
        "requests left": len(side._left),
        "loads of the worker": len(ours.worker_side._loads),
    }
    return [f"{n} {what}" for what, n in counts.items() if n]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--model", default="tinygemma3")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.05, help="share of calls that fail")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        soak = Soak(args, Path(folder) / "store")
        soak.reference()
        for number in range(args.restarts + 1):
            soak.phase(number, args.seconds / (args.restarts + 1))
        found = soak.result(time.monotonic() - began) | {"seed": args.seed, "model": args.model}
    print(json.dumps(found))
    return int(not found["ok"])


if __name__ == "__main__":
    sys.exit(main())
