"""`python -m one_round JOBS_JSON`: engines one after the other, a round each, the answers as JSON.

A job is [model, extra, group]: the loaded bytes of that group are corrupted, null: of none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from engines import ROUND, corrupt_loads, engine


def run(model: str, extra: dict[str, Any], group: int | None) -> dict[str, Any]:
    """Tokens, logprobs, hit lengths and loaded bytes of one engine's round."""
    with engine(model, extra=extra) as ours:
        if group is not None:
            corrupt_loads(ours, group)
        answers = ours.ask(ROUND)
        ours.settle()
        return {
            "tokens": [list(a.tokens) for a in answers],
            "logprobs": [list(a.logprobs) for a in answers],
            "cached_tokens": [a.cached_tokens for a in answers],
            "loaded_bytes": ours.counters["loaded_bytes"],
            "copied_in_bytes": ours.worker_side.counters["copied_in_bytes"],
        }


if __name__ == "__main__":
    print(json.dumps([run(*job) for job in json.loads(sys.argv[1])]))
