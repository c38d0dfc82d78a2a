"""What would be kept of one imagined prompt, and what hits that gives: `tierkv plan` in numbers.

Nothing is decided here: `tierkv.reach` answers, this counts bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from tierkv import reach
from tierkv.errors import ConfigError
from tierkv.layout import Group, Layout


def plan_prompt(
    layout: Layout,
    tokens: int,
    policy: reach.Policy | str = reach.AUTO,
    *,
    model: str | None = None,
    capacity_bytes: int | None = None,
) -> dict[str, Any]:
    """The JSON object of `tierkv plan` (DESIGN section 10) for a prompt of `tokens` tokens.

    All bytes are payload (padding and media overhead excluded). `blocks` and `all_blocks_bytes`
    count every whole block that the prompt makes, reusable or not. `hit_tokens_resend` is the hit
    of the same prompt again, `hit_tokens_longer` that of a longer one that begins with it, both
    with only the stored blocks present. `lost_tokens_at_most`: by how much a hit of a prompt that
    branches off may be shorter than under `dense`; null where nothing bounds it. `sessions`, with
    `capacity_bytes`: how many such prompts, sharing nothing, fit; null where nothing of them is
    stored. `notes`: what a reader should know.

    Raises `ConfigError` for fewer than 1 token or an unknown policy.
    """
    if tokens < 1:
        raise ConfigError(f"tokens is {tokens}; write the length of a prompt, 1 or more")
    policy = reach.Policy.parse(policy)
    ranges = reach.keep(layout, policy, tokens)
    groups = [_group(g, tokens, r) for g, r in zip(layout.groups, ranges, strict=True)]
    stored = sum(int(g["stored_bytes"]) for g in groups)
    everything = sum(int(g["all_blocks_bytes"]) for g in groups)
    present = _present(ranges)
    longer = tokens + reach.lookahead_tokens(layout) + 1
    out: dict[str, Any] = {
        "model": model,
        "tokens": tokens,
        "alignment_tokens": layout.alignment_tokens,
        "hash_block_tokens": layout.hash_block_tokens,
        "policy": str(policy),
        "groups": groups,
        "stored_bytes": stored,
        "all_blocks_bytes": everything,
        "saved_fraction": 1 - stored / everything if everything else 0.0,
        "bytes_per_token": stored / tokens,
        "hit_tokens_resend": reach.longest_hit(layout, tokens, present),
        "hit_tokens_longer": reach.longest_hit(layout, longer, present),
        "lost_tokens_at_most": reach.lost_tokens_at_most(layout, policy),
        "notes": _notes(layout),
    }
    if capacity_bytes is not None:
        out["capacity_bytes"] = capacity_bytes
        out["sessions"] = capacity_bytes // stored if stored else None
    return out


def _group(group: Group, tokens: int, ranges: reach.Ranges) -> dict[str, Any]:
    blocks = tokens // group.block_tokens
    stored = int((ranges[:, 1] - ranges[:, 0]).sum())
    return {
        "name": group.name,
        "kind": str(group.kind),
        "block_tokens": group.block_tokens,
        "window_tokens": group.window_tokens or None,
        "blocks": blocks,
        "stored_blocks": stored,
        "stored_ranges": ranges.tolist(),
        "block_bytes": group.block_bytes,
        "stored_bytes": stored * group.block_bytes,
        "all_blocks_bytes": blocks * group.block_bytes,
    }


def _present(ranges: list[reach.Ranges]) -> reach.Present:
    """Answers from the ranges alone: by bisection, so nothing is made per block."""
    firsts = [r[:, 0].tolist() for r in ranges]
    ends = [r[:, 1].tolist() for r in ranges]

    def present(group: int, block: int) -> bool:
        at = bisect_right(firsts[group], block) - 1
        return at >= 0 and block < ends[group][at]

    return present


def _notes(layout: Layout) -> list[str]:
    return [
        f"group {g.name!r}: alignment {layout.alignment_tokens} is not a multiple of ratio "
        f"{g.ratio}, so its whole window of {g.window_tokens} tokens is kept"
        for i, g in enumerate(layout.groups)
        if reach.falls_back_to_window(layout, i)
    ]
