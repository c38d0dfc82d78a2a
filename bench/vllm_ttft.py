"""Time to first token with a real engine: computed, from pinned RAM, and from NVMe.

``python -m bench.vllm_ttft --dir D`` (in the environment with vLLM, `tests/vllm` and
`tests/vllm/plugin` on ``PYTHONPATH``) starts engines in its own process, one after the other, over
one store in D: the first computes every prompt (and stores it), then loads each from pinned RAM;
the second loads each from NVMe, with the engine's own prefix cache emptied before every request.
Recomputation is measured in both (`tierkv_load` is `never`), interleaved with the loads, so that a
busy machine disturbs all alike. Medians, in milliseconds, of the time from the request to its
first token. The keeper's files are read with O_DIRECT where the disk has it; pass a directory on
the disk in question. ``--check`` exits with 1 unless both kinds of hits are faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import Engine, prompt, sampling


def first_token_ms(ours: Engine, tokens: list[int], when: str) -> tuple[float, int]:
    """Time to the first token, and how many tokens were cached."""
    params = sampling(1)
    params.extra_args = {"kv_transfer_params": {"tierkv_load": when}}
    ours.settle()
    if not ours.llm.reset_prefix_cache():
        raise RuntimeError("the engine's own cache is in use")
    began = time.perf_counter()
    [out] = ours.llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    return (time.perf_counter() - began) * 1e3, int(out.num_cached_tokens)


def start(args: argparse.Namespace, store: Path, pinned: str) -> Engine:
    length = -(-(args.tokens + 64) // 32) * 32
    return Engine(
        args.model,
        blocks=length // 32 * 2 + 8,
        extra={"url": f"nvme://{store}?capacity=2GiB", "pinned": pinned},
        max_model_len=length,
        max_num_batched_tokens=max(length, 2048),
    )


def rounds(ours: Engine, prompts: list[list[int]], source: str, found: dict[str, Any]) -> None:
    """One hit and one recomputation of each prompt, in turn."""
    for tokens in prompts:
        for when, name in (("always", source), ("never", "recompute")):
            spent, cached = first_token_ms(ours, tokens, when)
            if (cached > 0) != (when == "always"):
                raise RuntimeError(f"{name}: {cached} cached tokens of {len(tokens)}")
            found[name].append(spent)
            if when == "always":
                found["cached_tokens"] = cached


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts = [prompt(9000 + n, args.tokens) for n in range(args.prompts)]
    found: dict[str, Any] = {"recompute": [], "pinned": [], "nvme": []}
    first = start(args, folder / "store", "1GiB")
    for tokens in prompts:
        first_token_ms(first, tokens, "always")
    rounds(first, prompts, "pinned", found)
    first.settle()
    first.close()
    second = start(args, folder / "store", "1GiB")
    first_token_ms(second, prompt(1, args.tokens), "always")  # whatever is slow the first time
    rounds(second, prompts, "nvme", found)
    layout = second.scheduler_side.ledger.layout
    second.close()
    medians = {n: round(statistics.median(found[n]), 2) for n in ("recompute", "pinned", "nvme")}
    return {
        "model": args.model,
        "tokens": args.tokens,
        "cached_tokens": found["cached_tokens"],
        "bytes_per_block": sum(layout.block_bytes),
        "median_ms": medians,
        "of_recompute": {
            n: round(medians[n] / medians["recompute"], 3) for n in ("pinned", "nvme")
        },
        "ok": max(medians["pinned"], medians["nvme"]) < medians["recompute"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--model", default="tinyllama")
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measure(args, Path(folder))
    print(json.dumps(found))
    return int(args.check and not found["ok"])


if __name__ == "__main__":
    sys.exit(main())
