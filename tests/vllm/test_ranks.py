"""Tensor parallel 2 on the real engine: two workers in processes of their own, one decision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import ENVIRONMENT, HERE
from stores import nvme

HITS = [480, 480, 480]


def two_ranks(
    model: str, extra: dict[str, Any], store: Path | None = None, **settings: Any
) -> dict[str, Any]:
    environment = os.environ | ENVIRONMENT
    environment |= {
        "PYTHONPATH": f"{HERE}:{HERE / 'plugin'}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions go to the workers
    }
    command = [sys.executable, "-m", "two_ranks", model, json.dumps(extra), json.dumps(settings)]
    command += [str(store)] if store else []
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [text for text in done.stdout.splitlines() if text.startswith('{"rounds"')]
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.timeout(920)
def test_ranks_keep_their_own_bytes_and_agree_on_hits_though_one_loses_its_tier_or_waits_for_it(
    store: Path,
) -> None:
    # 15 blocks of 64 KiB a prompt: the arena holds two of the three, the others are in the tier.
    found = two_ranks("tinyllama", nvme(store) | {"pinned": "2MiB"}, store)
    rounds = found["rounds"]
    hits = {name: one["cached_tokens"] for name, one in rounds.items()}
    assert {
        name: one["output"] == rounds["computed"]["output"] for name, one in rounds.items()
    } == {name: True for name in rounds}
    assert hits["computed"] == [0, 0, 0]
    for name in ("loaded", "back", "slow", "quick again", "filled again"):
        assert hits[name] == HITS, name
    assert 0 in hits["too slow"]
    assert hits["half a restart"] == [0, 0, 0]  # rank 0 has all of it, rank 1 nothing
    before, after = found["ranks"]
    assert [r["rank"] for r in after] == [0, 1]
    half = 4 * 2 * 2 * 32 * 32 * 4  # layers, keys and values, heads, head size, tokens, bytes
    assert [r["block_bytes"] for r in after] == [[half], [half]]
    assert [r["copied_out_bytes"] for r in before] == [45 * half] * 2
    assert [r["copied_in_bytes"] for r in after] == [45 * half] * 2
    assert before[0]["arena"] != before[1]["arena"]
    stores = [json.loads(p.read_text()) for p in store.glob("*/meta.json")]
    assert sorted(s["rank"] for s in stores) == [0, 1]
    assert len({s["namespace"] for s in stores}) == 2


@pytest.mark.timeout(920)
def test_mla_ranks_hold_the_same_bytes_and_each_stores_them(store: Path) -> None:
    found = two_ranks("tinydsv3", {"url": ""}, block_size=16)
    first, second = found["rounds"].values()
    assert first["cached_tokens"] == [0, 0, 0]
    assert second["cached_tokens"] == [496, 496, 496]
    before, _ = found["ranks"]
    assert before[0]["block_bytes"] == before[1]["block_bytes"]
    assert before[0]["copied_out_bytes"] == before[1]["copied_out_bytes"] > 0
    assert before[0]["arena"] == before[1]["arena"]
