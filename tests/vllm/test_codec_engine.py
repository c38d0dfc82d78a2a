"""A real engine whose tier compresses: less is stored, and the answers are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import LARGE_POOL, engine


def nvme(store: Path) -> dict[str, str]:
    """The connector's options for a store there."""
    return {"url": f"nvme://{store}?capacity=256MiB&segment=8MiB"}


PROMPTS = [[token] * 300 for token in (5, 17, 230)]
"""Of one token each: every position has the same values, so half of each block repeats."""


@pytest.mark.parametrize("tiny", ["tinyllama"])
def test_an_engine_with_codec_lz4_stores_less_and_the_next_one_answers_the_same(
    tiny: str, store: Path
) -> None:
    with engine(tiny, blocks=LARGE_POOL, extra=nvme(store) | {"codec": "lz4"}) as ours:
        first = ours.ask(PROMPTS)
        ours.settle()
        worker, stored = ours.worker_side, ours.counters["stored_blocks"]
    stats = worker.storage.stats()  # the last ones, of when it was closed
    assert stats["tier_mode_codec"] == "lz4"
    assert stats["codec_encoded_blocks"] > 0
    assert stats["codec_encoded_blocks"] + stats.get("codec_raw_blocks", 0) == stored
    assert stats["codec_bytes_after"] < 0.9 * stats["codec_bytes_before"]
    with engine(tiny, blocks=LARGE_POOL, extra=nvme(store)) as ours:  # without the codec
        second = ours.ask(PROMPTS)
        ours.settle()
        assert ours.counters["loaded_blocks"] > 0
        assert ours.counters["load_corrupt_blocks"] == 0
    assert all(a.same_output(b) for a, b in zip(first, second, strict=True))
    assert all(a.cached_tokens == 0 for a in first)
    assert all(b.cached_tokens > 0 for b in second)
