"""`python -m one_round MODEL EXTRA_JSON [GROUP]`: one engine, one round, the answers as JSON.

With GROUP the loaded bytes of that group are corrupted.
"""

from __future__ import annotations

import json
import sys

from engines import ROUND, corrupt_loads, engine


def main(model: str, extra: str, group: str = "") -> None:
    """Print tokens, logprobs, hit lengths and loaded bytes as the last line."""
    with engine(model, extra=json.loads(extra)) as ours:
        if group:
            corrupt_loads(ours, int(group))
        answers = ours.ask(ROUND)
        ours.settle()
        found = {
            "tokens": [list(a.tokens) for a in answers],
            "logprobs": [list(a.logprobs) for a in answers],
            "cached_tokens": [a.cached_tokens for a in answers],
            "loaded_bytes": ours.counters["loaded_bytes"],
            "copied_in_bytes": ours.worker_side.counters["copied_in_bytes"],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
