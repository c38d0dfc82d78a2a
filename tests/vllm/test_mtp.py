"""Multi-token prediction: DeepSeek V3 drafts with a layer of its own, in the same group."""

from __future__ import annotations

from typing import Any

from engines import LARGE_POOL, engine, prompt
from families import compared_pages, forget

from tierkv.plan import plan_prompt

LENGTHS = (100, 111, 112, 113)
MTP: dict[str, Any] = {
    "blocks": LARGE_POOL,
    "block_size": 16,
    "hf_overrides": {"num_nextn_predict_layers": 1},
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
}


def test_with_mtp_hits_are_the_laws_and_the_volatile_tail_is_not_kept() -> None:
    prompts = [prompt(n, n) for n in LENGTHS]
    with engine("tinydsv3", extra={"url": "memory://"}, **MTP) as ours:
        layout = ours.scheduler_side.ledger.layout
        [layers] = [g.layer_names for g in ours.core.scheduler.kv_cache_config.kv_cache_groups]
        with compared_pages(ours) as equal:
            ours.ask(prompts)
            forget(ours)
            stored = ours.counters["stored_bytes"]
            again = ours.ask(prompts)
            ours.settle()
    assert len(layers) == 4  # the draft's layer is one of them
    assert layout.lookahead_blocks == (1,)
    plans = [plan_prompt(layout, n) for n in LENGTHS]
    assert [a.cached_tokens for a in again] == [p["hit_tokens_resend"] for p in plans]
    assert stored == sum(n // 16 for n in LENGTHS) * layout.groups[0].block_bytes
    assert equal
    assert all(equal)
