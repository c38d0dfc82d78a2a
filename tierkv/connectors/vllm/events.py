"""KV cache events for routers: which blocks this engine could load, and from where.

They carry block hashes as the engine's own events do, and nothing else of the prompt: a router that
follows the engine's events knows what tokens a hash stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tierkv.index import News

MOST_HASHES: Final = 4096
"""Of one event: after a restart a store may announce a million blocks."""


def kv_events(news: Iterable[News]) -> Iterator[KVCacheEvent]:
    """The engine's events for what became loadable or ceased to be, in order."""
    for item in news:
        medium = MEDIUM_STORAGE if item.in_tier else MEDIUM_CPU
        groups = item.keys.groups
        for group in np.unique(groups).tolist():
            mine = [maybe_convert_block_hash(h) for _, h in item.keys.take(groups == group)]
            for at in range(0, len(mine), MOST_HASHES):
                part = mine[at : at + MOST_HASHES]
                if item.gone:
                    yield BlockRemoved(block_hashes=part, medium=medium, group_idx=group)
                    continue
                yield BlockStored(
                    block_hashes=part,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    group_idx=group,
                )
