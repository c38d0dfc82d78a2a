"""Counters on the engine's own channels: its log and its `/metrics` (`tierkv_*`).

Counters travel as differences and are added up; gauges travel as they are.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tierkv.ledger import Ledger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: Final = {
    "hit_tokens": "prompt tokens found beyond what the engine held itself",
    "hit_blocks": "blocks promised to requests",
    "hit_bytes": "bytes promised to requests",
    "loaded_tokens": "prompt tokens whose load succeeded",
    "loaded_blocks": "blocks read from the storage tier",
    "loaded_bytes": "bytes read from the storage tier",
    "copied_in_bytes": "bytes copied into the engine's pages, counted by the workers",
    "copied_out_bytes": "bytes copied from the engine's pages, counted by the workers",
    "failed_tokens": "prompt tokens whose load failed: the engine recomputed them",
    "failed_loads": "loads of which a block failed, counted by the workers",
    "load_missing_blocks": "blocks that the tier no longer had",
    "load_corrupt_blocks": "blocks that failed verification and were forgotten",
    "load_failed_blocks": "blocks that could not be read this time",
    "load_timed_out_blocks": "blocks that were not read before the deadline",
    "saved_blocks": "blocks taken into pinned RAM",
    "saved_bytes": "bytes taken into pinned RAM",
    "stored_blocks": "blocks written to the storage tier",
    "stored_tokens": "tokens that these blocks cover, each group counted for itself",
    "stored_bytes": "bytes written to the storage tier",
    "failed_save_blocks": "blocks that the tier could not write",
    "declined_blocks": "blocks not saved because there was no room",
    "skipped_blocks": "blocks not stored because no hit can read them",
    "skipped_tokens": "tokens that these blocks cover, each group counted for itself",
    "skipped_bytes": "bytes not stored because no hit can read them",
    "evicted_pinned_blocks": "blocks evicted from pinned RAM",
    "evicted_pinned_tokens": "tokens that these blocks cover, each group counted for itself",
    "evicted_pinned_bytes": "bytes of RAM freed by eviction",
    "evicted_tier_blocks": "blocks given up by the storage tier to make room",
    "evicted_tier_tokens": "tokens that these blocks cover, each group counted for itself",
    "evicted_tier_bytes": "bytes given up by the storage tier to make room",
    "tier_down": "times the storage tier went away",
    "rotations": "times everything was made void",
}
"""Monotonic; name → what it counts. The unit is in the name."""

GAUGES: Final = {
    "never_read_blocks": "blocks in the storage tier that were written and never read",
    "never_read_bytes": "bytes in the storage tier that were written and never read",
    "pinned_bytes": "bytes of pinned RAM in use",
    "pinned_capacity_bytes": "bytes of pinned RAM",
    "tier_blocks": "blocks that the storage tier holds",
    "moves_in_flight": "moves that are not done",
    "tier_up": "1 while the storage tier of every rank serves",
}

INTERVAL_S: Final = 1.0
"""The ledger is asked no more often: its gauges cost a pass over every block it knows."""


@dataclass
class TierKVStats(KVConnectorStats):
    """`data`: counter or gauge name → number."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TierKVStats:
        """Counters add up; of gauges the newer one, `other`'s, stays."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the engine's log line shows: everything that is not zero."""
        return {f"tierkv_{name}": value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class LedgerStats:
    """The ledger's counters as differences, and a few of the connector's own."""

    def __init__(self) -> None:
        self._own: Counter[str] = Counter()
        self._reported: dict[str, int] = {}
        self._at = 0.0
        self._was_busy = False

    def add(self, name: str, value: int) -> None:
        """Count something that the ledger does not."""
        self._own[name] += value

    def collect(self, ledger: Ledger) -> TierKVStats | None:
        """Differences since the last report, every `INTERVAL_S` and when the last move ends."""
        busy = ledger.moves_in_flight > 0
        came_to_rest, self._was_busy = self._was_busy and not busy, busy
        now = time.monotonic()
        if now - self._at < INTERVAL_S and not came_to_rest:
            return None
        self._at = now
        known = ledger.stats() | self._own | {"tier_up": int(ledger.tier_is_up)}
        data = {name: known[name] for name in GAUGES}
        for name in COUNTERS:
            value = known.get(name, 0)
            data[name] = value - self._reported.get(name, 0)
            self._reported[name] = value
        return TierKVStats(data)


class TierKVMetrics(KVConnectorPromMetrics):
    """`tierkv_*` on the engine's `/metrics`, labelled like the engine's own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: _metric(cls, name, text, tuple(labelnames))
            for cls, table in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES))
            for name, text in table.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report of one engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name].labels(*labels)
            if name in GAUGES:
                metric.set(value)
            elif value:
                metric.inc(value)


_made: dict[tuple[Any, str, tuple[str, ...]], Any] = {}


def _metric(cls: Any, name: str, text: str, labelnames: tuple[str, ...]) -> Any:
    # Once per process: the client library refuses a second metric of the same name, and a process
    # may start a second engine.
    key = (cls, name, labelnames)
    if key not in _made:
        more = {"multiprocess_mode": "mostrecent"} if name in GAUGES else {}
        _made[key] = cls(
            name=f"tierkv_{name}", documentation=text, labelnames=list(labelnames), **more
        )
    return _made[key]
