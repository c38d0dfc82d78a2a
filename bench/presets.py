"""Bytes per token of every known model, under several policies, as a table in Markdown.

``python -m bench.presets --tokens 131072`` counts real bytes of all groups for one prompt of that
length: everything that exists, what each policy keeps, and how many such prompts fit.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tierkv.plan import plan_prompt
from tierkv.presets import load_preset, preset_names
from tierkv.urls import parse_size

POLICIES = ("dense", "auto", "end")


def rows(tokens: int, capacity_bytes: int) -> list[dict[str, Any]]:
    """One entry a model; bytes per token by policy, `sessions` under `auto`."""
    out = []
    for name in preset_names():
        layout = load_preset(name)
        plans = {p: plan_prompt(layout, tokens, p, capacity_bytes=capacity_bytes) for p in POLICIES}
        out.append(
            {
                "model": name,
                "alignment_tokens": layout.alignment_tokens,
                "all_blocks": plans["dense"]["all_blocks_bytes"] / tokens,
                **{p: plan["bytes_per_token"] for p, plan in plans.items()},
                "lost_tokens_at_most": plans["auto"]["lost_tokens_at_most"],
                "sessions": plans["auto"]["sessions"],
            }
        )
    return out


def table(found: list[dict[str, Any]], tokens: int, capacity: str) -> str:
    """The rows as Markdown."""
    head = ("model", "hits end every", "all blocks", *(f"`{p}`" for p in POLICIES))
    lines = [
        "| " + " | ".join((*head, f"prompts in {capacity} (`auto`)")) + " |",
        "|---" + "|---:" * (len(head)) + "|",
    ]
    for row in found:
        sizes = " | ".join(f"{row[k] / 1024:.2f}" for k in ("all_blocks", *POLICIES))
        lines.append(
            f"| {row['model']} | {row['alignment_tokens']:,} | {sizes} | {row['sessions']:,} |"
        )
    lines.append(f"\nKiB per token of a prompt of {tokens:,} tokens.")
    return "\n".join(lines)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="bench.presets", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--capacity", default="500GiB")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = rows(args.tokens, parse_size(args.capacity, "--capacity"))
    answer = {"tokens": args.tokens, "capacity": args.capacity, "models": found}
    print(json.dumps(answer) if args.json else table(found, args.tokens, args.capacity))


if __name__ == "__main__":
    main()
