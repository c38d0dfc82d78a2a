"""`python -m one_round MODEL EXTRA_JSON`: one engine, one round, the answers as JSON."""

from __future__ import annotations

import json
import sys

from engines import ROUND, engine


def main(model: str, extra: str) -> None:
    """Print tokens, logprobs, hit lengths and loaded bytes as the last line."""
    with engine(model, extra=json.loads(extra)) as ours:
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
