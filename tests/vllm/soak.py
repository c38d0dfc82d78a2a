"""A real engine under random requests and random faults for as long as asked: `make soak-vllm`.

``python -m soak --seconds 1800`` (with `tests/vllm` and `tests/vllm/plugin` on ``PYTHONPATH``)
first asks an engine without a connector for the answer to every prompt. Then it sends random
crowds of these prompts (which share beginnings) to an engine with the connector, aborts some at
random steps, has the storage tier fail at random (`tierkv_test_flaky`), kills and stops the keeper
now and then, empties the pool, rotates, and starts the engine anew three times.

It prints a line every 10 s, and one JSON object at the end. Exit status 0 only if `ok`: no wrong
output, nothing leased, in flight or missing from the pool whenever the engine rests, no descriptor
and no memory that grows, and all that it means to try was tried. Status 3: something hung, and was
described before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from engines import SMALL_POOL, Engine, corrupt_loads, engine, prompt, sampling
from soak_watch import Watch

from tierkv.connectors.vllm.stats import COUNTERS

NOISE = 1e-3
NEAR_TIE = 1e-2
ANSWER_TOKENS = 24
MOST_GROWTH_BYTES = 64 << 20
ENGINE_GROWTH_BYTES = 120_000
"""With each answer: an engine alone grows so, 95 kB over its 300th to 1350th request (vLLM 0.32 on
a CPU, in this process, tinygemma3, side by side with one with the connector: 110 kB)."""
REFERENCE_BLOCKS = 1200
FEW_SAMPLES = 40
"""Crowds of an engine's life: with fewer, its memory is not compared."""
WARM_SHARE = 0.25
"""Of the last engine's life: memory is compared from then on, and over engines from half of them
on. An engine alone grows by 40 MB in its first 40 requests."""
START_S, CROWD_S, REST_S = 300.0, 180.0, 180.0
"""Limits of one phase: several times what the slowest of them takes on a busy machine."""

ATTEMPTED = ("answers", "aborted", "hits", "loaded_bytes", "failed_loads", "preemptions", "faults")
"""What a run must have seen to prove anything. A minute sees all of it."""

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


def params_of(tokens: int, *, logprobs: int = 1) -> Any:
    """Greedy."""
    params = sampling(tokens)
    params.logprobs = logprobs
    return params


def output_of(out: Any) -> Output:
    [completion] = out.outputs
    tokens = list(completion.token_ids)
    return tokens, [p[t].logprob for p, t in zip(completion.logprobs, tokens, strict=True)]


def expected_of(out: Any) -> Output:
    """An answer as far as it is certain: up to a token that another one comes near to."""
    tokens, probs = output_of(out)
    for at, place in enumerate(out.outputs[0].logprobs):
        first, second = sorted((p.logprob for p in place.values()), reverse=True)[:2]
        if first - second < NEAR_TIE:
            return tokens[:at], probs[:at]
    return tokens, probs


def is_wrong(found: Output, wanted: Output) -> bool:
    """Another token, or a logprob beyond what the order of sums explains."""
    pairs = zip(*found, *wanted, strict=False)
    return any(a != b or abs(p - q) > NOISE for a, p, b, q in pairs)


class Soak:
    """One run; `found` is what it prints."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.store, self.tally = args, folder / "store", folder / "faults"
        self.tally.touch()
        self.random = random.Random(args.seed)
        self.prompts = prompts_of(args.seed, args.prompts)
        self.found: Counter[str] = Counter()
        self.leaks: list[str] = []
        self.rest: list[dict[str, int]] = []
        self.memory: list[list[tuple[float, int]]] = []
        self.expected: dict[int, Output] = {}
        self.ours: Engine | None = None
        self.watch = Watch(self.tell, self.describe, self.hung)

    # What it does ------------------------------------------------------------------------

    def reference(self) -> None:
        """The answers of an engine without a connector."""
        self.watch.phase("reference", START_S)
        with engine(self.args.model, blocks=REFERENCE_BLOCKS) as plain:
            llm = plain.llm.llm_engine
            for n, tokens in enumerate(self.prompts):
                params = params_of(ANSWER_TOKENS, logprobs=2)
                llm.add_request(f"r:{n}", {"prompt_token_ids": tokens}, params)
            while llm.has_unfinished_requests():
                for out in llm.step():
                    if out.finished:
                        self.watch.phase("reference", CROWD_S)
                        self.expected[place(out.request_id)] = expected_of(out)
        self.found["certain_tokens"] = sum(len(tokens) for tokens, _ in self.expected.values())

    def phase(self, number: int, seconds: float) -> None:
        """One engine's life; its start is not counted."""
        args = self.args
        self.watch.phase(f"start {number}", START_S)
        options = f"capacity=64MiB&segment=4MiB&rate={args.rate}&seed={args.seed + number}"
        extra = {
            "url": f"flaky://{self.store}?{options}&tally={self.tally}",
            "pinned": "6MiB",
            "read_timeout_s": 1.0,
            "write_timeout_s": 2.0,
            "hang_timeout_s": 2.0,
            "load_timeout_s": 3.0,
            "close_timeout_s": 5.0,
        }
        self.memory.append([])
        with engine(args.model, blocks=args.blocks or SMALL_POOL[args.model], extra=extra) as ours:
            self.ours, born = ours, time.monotonic()
            self.count_preemptions(ours)
            if args.sabotage:
                corrupt_loads(ours, 0)
            while time.monotonic() < born + seconds:
                self.watch.phase(f"engine {number}", CROWD_S)
                self.crowd(ours)
                self.disturb(ours)
                self.memory[-1].append((time.monotonic() - born, memory()))
            self.check(ours, number)
            for name, value in (ours.counters | ours.worker_side.counters).items():
                if name in COUNTERS:
                    self.found[name] += value
            keeper = psutil.Process(ours.worker_side.storage.pid).memory_info().rss
            self.watch.phase(f"close {number}", REST_S)
            self.ours = None
        del ours
        gc.collect()
        me = psutil.Process()
        counts = {"fds": me.num_fds(), "processes": len(me.children()), "rss": memory()}
        self.rest.append(counts | {"keeper_rss": keeper, "answers": self.found["answers"]})
        print(f"soak: engine {number} ended: {self.rest[-1]}", file=sys.stderr, flush=True)

    def crowd(self, ours: Engine) -> None:
        """Some requests, at once or one after the other, some of them aborted on their way."""
        llm = ours.llm.llm_engine
        arrivals: dict[str, int] = {}
        doomed: dict[str, int] = {}
        spread = self.random.choice((1, 1, 20))
        for _ in range(self.random.randrange(1, 9)):
            self.found["requests"] += 1
            name = f"{self.found['requests']}:{self.random.randrange(len(self.prompts))}"
            arrivals[name] = self.random.randrange(spread)
            if self.random.random() < 0.2:
                doomed[name] = arrivals[name] + self.random.randrange(0, 30)
        step, upset = 0, self.random.randrange(200)
        while arrivals or llm.has_unfinished_requests():
            for name in [name for name, at in arrivals.items() if at <= step]:
                del arrivals[name]
                tokens = self.prompts[place(name)]
                params = params_of(self.random.randrange(1, ANSWER_TOKENS + 1))
                llm.add_request(name, {"prompt_token_ids": tokens}, params)
            due = [name for name, when in doomed.items() if when == step]
            llm.abort_request(due)
            self.found["aborted"] += len(due)
            for out in llm.step():
                if out.finished and out.outputs[0].finish_reason != "abort":
                    doomed.pop(out.request_id, None)
                    self.judge(out)
            if step == upset:
                self.upset(ours)
            step += 1

    def judge(self, out: Any) -> None:
        self.found["answers"] += 1
        self.found["cached_tokens"] += out.num_cached_tokens or 0
        found, wanted = output_of(out), self.expected[place(out.request_id)]
        if is_wrong(found, wanted):
            self.found["wrong_outputs"] += 1
            cached = out.num_cached_tokens
            print(f"wrong: {out.request_id} {cached=} {found} {wanted}", file=sys.stderr)

    def upset(self, ours: Engine) -> None:
        """In the middle of a crowd: everything running is preempted, maybe rotated away too."""
        if any(holds_pages(r) for r in requests_of(ours)):
            return  # the engine refuses, with an error
        rotate = self.random.random() < 0.2
        ours.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=rotate)
        self.found["resets_of_running"] += 1

    def disturb(self, ours: Engine) -> None:
        """Now and then: the pool forgets, the keeper dies, or the weights are said to change."""
        dice = self.random.random()
        if dice < 0.3:
            ours.llm.reset_prefix_cache()
        elif dice < 0.32:
            storage = ours.worker_side.storage
            if storage.is_alive:
                kind = self.random.choice((signal.SIGKILL, signal.SIGSTOP))
                os.kill(storage.pid, kind)
                self.found[f"keepers_{kind.name}"] += 1
        elif dice < 0.33:
            ours.llm.reset_prefix_cache(reset_connector=True)
        elif dice < 0.4:
            self.check(ours, -1)

    def check(self, ours: Engine, number: int) -> None:
        """Let the engine come to rest; what is still held is a leak."""
        self.watch.phase("rest", REST_S)
        ours.settle(60)
        until = time.monotonic() + 30
        while held(ours) and time.monotonic() < until:  # moves that hang are quarantined a while
            time.sleep(0.05)
            ours.core.step_fn()
        self.found["rests"] += 1
        self.leaks += [f"engine {number}: {what}" for what in held(ours)]

    def count_preemptions(self, ours: Engine) -> None:
        scheduler = ours.core.scheduler
        preempt = scheduler._preempt_request

        def counting(*args: Any, **more: Any) -> None:
            self.found["preemptions"] += 1
            preempt(*args, **more)

        scheduler._preempt_request = counting

    # What it tells -----------------------------------------------------------------------

    def faults(self) -> Counter[str]:
        """What the tier did wrong so far, by kind."""
        return Counter(self.tally.read_text().split("\n")[:-1])

    def tell(self) -> str:
        """One line; on the watch's thread."""
        me, ours = psutil.Process(), self.ours
        hits = self.found["hits"]
        if ours is not None:
            hits += ours.scheduler_side.ledger.counters["hits"]
        named = ("answers", "wrong_outputs", "aborted", "preemptions")
        restarts = max(len(self.memory) - 1, 0)
        return (
            "  ".join(f"{name} {self.found[name]}" for name in named)
            + f"  faults {self.faults().total()}  hits {hits}  restarts {restarts}"
            + f"  leaks {len(self.leaks)}  rss {memory() >> 20} MiB  fds {me.num_fds()}"
        )

    def describe(self) -> str:
        """What an engine that hangs is at; on the watch's thread."""
        ours = self.ours
        if ours is None:
            return "no engine is open"
        asked = [
            f"{r.request_id} {r.status.name} {r.num_computed_tokens}" for r in requests_of(ours)
        ]
        return f"requests {asked}; held {held(ours)}; {ours.counters}"

    def hung(self, phase: str) -> None:
        """The result of a run that hangs; on the watch's thread."""
        self.write({"ok": False, "hung": phase, **self.totals()})
        shutil.rmtree(self.store.parent, ignore_errors=True)

    def totals(self) -> dict[str, Any]:
        args = self.args
        counts = self.found + Counter(faults=self.faults().total())
        return {
            "model": args.model,
            "seed": args.seed,
            "seconds": round(time.monotonic() - self.watch.began, 1),
            "restarts": max(len(self.rest) - 1, 0),
            "wrong_outputs": self.found["wrong_outputs"],
            "leaks": self.leaks,
            "after_each_engine": self.rest,
            "rss_mib_in_each_engine": [
                [m >> 20 for _, m in samples[:: max(len(samples) // 6, 1)]]
                for samples in self.memory
            ],
            "faults_by_kind": dict(sorted(self.faults().items())),
            **{k: v for k, v in sorted(counts.items()) if v and k != "wrong_outputs"},
        }

    def result(self) -> dict[str, Any]:
        """Everything, judged."""
        counts = self.found + Counter(faults=self.faults().total())
        missed = [name for name in ATTEMPTED if not counts[name]]
        fds = self.rest[-1]["fds"] - self.rest[0]["fds"]
        warm = self.rest[(len(self.rest) - 1) // 2]
        growth = {
            "growth_bytes_over_engines": self.rest[-1]["rss"] - warm["rss"],
            "growth_bytes_in_the_last_engine": grown(self.memory[-1]),
        }
        left = max(rest["processes"] for rest in self.rest)
        since = self.rest[-1]["answers"] - warm["answers"]
        most = MOST_GROWTH_BYTES + ENGINE_GROWTH_BYTES * since
        bounded = max(growth.values()) < most and fds <= 0 and not left
        ok = bounded and not (missed or self.leaks or self.found["wrong_outputs"])
        more = {
            "leaked_descriptors": max(fds, 0),
            "processes_left": left,
            **growth,
            "most_growth_bytes": most,
        }
        return {"ok": ok, **self.totals(), **more, "not_reached": missed}

    def write(self, found: dict[str, Any]) -> None:
        """To standard output, and to the file that was asked for."""
        print(json.dumps(found), flush=True)
        if self.args.out:
            Path(self.args.out).write_text(json.dumps(found, indent=1) + "\n")


def grown(samples: list[tuple[float, int]]) -> int:
    """By how much memory at the end of an engine's life exceeds that after its warm-up: medians
    of the last fifth and of the fifth that follows the warm-up."""
    end = samples[-1][0]

    def median(low: float, high: float) -> int:
        found = sorted(m for at, m in samples if low * end <= at <= high * end)
        return found[len(found) // 2]

    if len(samples) < FEW_SAMPLES:
        return 0
    return median(0.8, 1.0) - median(WARM_SHARE, WARM_SHARE + 0.2)


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def place(name: str) -> int:
    """Which prompt a request is about; the engine puts something behind its id."""
    return int(name.split(":")[1].split("-")[0])


def holds_pages(request: Any) -> bool:
    """Whether it has pages without running: its load is under way, or was when it was aborted."""
    if request.status.name == "RUNNING":
        return False
    return request.status.name not in ("WAITING", "PREEMPTED") or request.num_computed_tokens > 0


def requests_of(ours: Engine) -> list[Any]:
    return list(ours.core.scheduler.requests.values())


def held(ours: Engine) -> list[str]:
    """What an engine at rest still holds, in words."""
    counters, side = ours.counters, ours.scheduler_side
    cache = ours.core.scheduler.kv_cache_manager.block_pool
    missing = ours.core.scheduler.kv_cache_config.num_blocks - 1 - cache.get_num_free_blocks()
    ledger = side.ledger
    counts = {
        "leased blocks": counters["leased_blocks"],
        "moves in flight": counters["moves_in_flight"],
        "flights that hold slots": len(ledger._flights._by_id),
        "bytes of loads": ledger._flights.load_bytes,
        "bytes of saves": ledger._flights.save_bytes,
        "blocks of the engine's pool": missing,
        "requests": len(side._requests),
        "requests of the ledger": len(ledger._requests),
        "promises": len(side._promises),
        "loads": len(side._loads),
        "orders": len(side._turns._loading | side._turns._failed),
        "requests left": len(side._left),
        "loads of the worker": len(ours.worker_side._loads),
        "copies of the worker": len(ours.worker_side._incoming) + len(ours.worker_side._outgoing),
        "saves of the worker": len(ours.worker_side._saving),
    }
    return [f"{n} {what}" for what, n in counts.items() if n]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--model", default="tinygemma3")
    parser.add_argument("--blocks", type=int, default=0, help="of the pool; 0: a small one")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.08, help="share of calls that fail")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", help="a file for the result, as JSON")
    parser.add_argument("--sabotage", action="store_true", help="zero what is loaded: must fail")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    print(f"soak: seed {args.seed}, model {args.model}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        soak = Soak(args, Path(folder))
        soak.reference()
        for number in range(args.restarts + 1):
            soak.phase(number, args.seconds / (args.restarts + 1))
        found = soak.result()
        soak.watch.close()
    soak.write(found)
    return int(not found["ok"])


if __name__ == "__main__":
    sys.exit(main())
