"""The connector for vLLM: `"kv_connector": "TierKVConnector"`, module `tierkv.connectors.vllm`.

The scheduler side (`scheduler`) looks up and plans from RAM with `tierkv.ledger`; the worker side
(`worker`, one per rank) copies between pages and arena and owns the rank's keeper. They meet in
`wire`. `layout` and `namespace` translate what the engine says of its KV cache.
"""

from __future__ import annotations

from tierkv.connectors.vllm.connector import TierKVConnector

__all__ = ["TierKVConnector"]
