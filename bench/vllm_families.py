"""The table of model families in README: hits, bytes, and whether the output is the engine's own.

``python -m bench.vllm_families`` (in the environment with vLLM) runs two engines for each tiny
model of ``tests/vllm/families.py``: one without a connector and with a pool that holds everything,
and one with tierkv whose own cache is emptied between the rounds.

hit tokens: of each prompt in round 2; in brackets the engine's own, where they differ.
stored / offered: bytes written to the tier in round 1, and all whole blocks of its prompts.
equal output: tokens and logprobs of both rounds against the engine alone, within 1e-4.
corruption seen: each group's loaded bytes were zeroed in a round of its own, and each showed.

A family whose kernels vLLM does not have for this processor (DeepSeek V4 on some) is left out, and
a line below the table says so.

``--json`` prints one object. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parent.parent / "tests" / "vllm"
_NEEDS = {"tinydsv4": "convert_weight_packed"}
"""Model → a kernel that not every processor's build of the engine has."""
_COLUMNS = (
    *("family", "groups", "prompt", "hit tokens", "stored / offered"),
    *("equal output", "corruption seen"),
)


def _runs_here(family: Any) -> bool:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    kernel = _NEEDS.get(family.model)
    return kernel is None or hasattr(torch.ops._C, kernel)


def _row(family: Any) -> dict[str, Any]:
    from families import measure

    found = measure(family)
    return {
        "family": family.name,
        "groups": family.kind,
        "prompt_tokens": family.tokens,
        "hit_tokens": found.hit_tokens,
        "engine_hit_tokens": [a.cached_tokens for a in found.alone[1]],
        "stored_bytes": found.stored_bytes,
        "offered_bytes": found.offered_bytes,
        "wrong_blocks": found.wrong_blocks,
        "equal_output": found.equal_output,
        "corruption_seen": found.sees_corruption,
    }


def _good(row: dict[str, Any]) -> bool:
    return (
        row["hit_tokens"] == row["engine_hit_tokens"]
        and not row["wrong_blocks"]
        and row["equal_output"]
        and row["corruption_seen"]
    )


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS)]
    for row in rows:
        mine, theirs = (sorted(set(row[k])) for k in ("hit_tokens", "engine_hit_tokens"))
        hits = ", ".join(map(str, mine))
        if mine != theirs:
            hits += f" ({', '.join(map(str, theirs))})"
        stored, offered = (row[k] / (1 << 20) for k in ("stored_bytes", "offered_bytes"))
        yes = ["yes" if row[k] else "NO" for k in ("equal_output", "corruption_seen")]
        size = f"{stored:.1f} / {offered:.1f} MiB ({stored / offered:.0%})"
        lines.append((row["family"], row["groups"], str(row["prompt_tokens"]), hits, size, *yes))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Print the table; 1 where a hit, a byte or an answer is not the engine's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", help="one family, by the name of its model, like tinyllama")
    options = parser.parse_args()
    # The plugin of the tests gives the models weights under which output depends on the cache.
    sys.path[:0] = [str(_TESTS), str(_TESTS / "plugin")]
    from families import FAMILIES

    chosen = [f for f in FAMILIES if options.only in (None, f.model)]
    if not chosen:
        parser.error(f"--only {options.only}: write one of {', '.join(f.model for f in FAMILIES)}")
    left_out = [f.name for f in chosen if not _runs_here(f)]
    rows = [_row(family) for family in chosen if family.name not in left_out]
    if options.json:
        print(json.dumps({"families": rows, "left_out": left_out}))
    else:
        print(_markdown(rows))
        if left_out:
            print(f"\nLeft out, no kernels for this processor: {', '.join(left_out)}.")
    return 0 if all(map(_good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
