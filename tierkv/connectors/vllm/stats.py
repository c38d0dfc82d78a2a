"""Counters on the engine's own channels: its log and its `/metrics` (`tierkv_*`).

Counters travel as differences and are added up; gauges travel as they are.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tierkv.leases import Watch
from tierkv.ledger import Ledger
from tierkv.worth import Line

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("tierkv")

PINNED: Final = "pinned"
"""The name of pinned RAM where tiers are told apart."""


def tier_name(url: str) -> str:
    """The storage tier's name: its scheme, or `none`."""
    return url.partition(":")[0] or "none"


COUNTERS: Final = {
    "lookups": "times the engine asked for a hit",
    "hits": "loads that were ordered",
    "pending_given_up": "requests that waited too long for another one's load",
    "promises_expired": "hits that the engine did not fetch in time",
    "too_short_tokens": "prompt tokens of hits below min_hit_tokens: not loaded",
    "too_slow_tokens": "prompt tokens whose load would have taken longer than computing them",
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
    "declined_blocks": "blocks not saved because there was no room for them, or for their copies",
    "skipped_blocks": "blocks not stored because no hit can read them",
    "skipped_tokens": "tokens that these blocks cover, each group counted for itself",
    "skipped_bytes": "bytes not stored because no hit can read them",
    "evicted_pinned_blocks": "blocks evicted from pinned RAM",
    "evicted_pinned_tokens": "tokens that these blocks cover, each group counted for itself",
    "evicted_pinned_bytes": "bytes of RAM freed by eviction",
    "evicted_tier_blocks": "blocks given up by the storage tier to make room",
    "evicted_tier_tokens": "tokens that these blocks cover, each group counted for itself",
    "evicted_tier_bytes": "bytes given up by the storage tier to make room",
    "lost_blocks": "blocks that the tier turned out not to have any more, or had wrong",
    "recovered_blocks": "blocks that the tier brought back when it opened",
    "tier_down": "times the storage tier went away",
    "keeper_deaths": "times a keeper ended unasked",
    "keeper_hangs": "times a keeper was ended because it did not answer",
    "keeper_restarts": "times a keeper was started anew",
    "timed_out_moves": "moves that overran their deadline",
    "throttled_batches": "batches that the backend put off",
    "degradations": "times the tier was left alone for a while after failures",
    "unforeseen_errors": "errors of a backend that its interface does not name",
    "rotations": "times everything was made void",
    "tier_blocks_reinserted": "blocks that the tier wrote again instead of giving them up",
    "tier_bytes_reinserted": "bytes that the tier wrote again instead of giving them up",
    "tier_bytes_written": "bytes that went to media: payload, headers, and what was written again",
}
"""Monotonic; name → what it counts. The unit is in the name."""

_OF_A_RANK: Final = {
    "pinned": "1 where the device copies pinned RAM directly, 0 where its driver goes between",
    "load_bytes_waiting": "bytes of loads that wait for their turn in the tier",
    "load_bytes_in_flight": "bytes of loads that the tier is reading",
    "save_bytes_waiting": "bytes of saves that wait for their turn in the tier",
    "save_bytes_in_flight": "bytes of saves that the tier is writing",
    "quarantined_moves": "moves that were answered while the tier may still touch their slots",
    "degraded": "1 while the tier is left alone after failures",
    "keeper_alive": "1 while the keeper runs and has its tier open",
    "tier_physical_bytes": "bytes that the tier takes, padding and headers included",
    "tier_capacity_bytes": "bytes that the tier may take; 0: no quota",
    "tier_write_amplification": "bytes written to media for each byte saved, since the tier opened",
}

GAUGES: Final = {
    "never_read_blocks": "blocks in the storage tier that were written and never read",
    "never_read_bytes": "bytes in the storage tier that were written and never read",
    "pinned_bytes": "bytes of pinned RAM in use",
    "pinned_capacity_bytes": "bytes of pinned RAM",
    "tier_blocks": "blocks that the storage tier holds",
    "moves_in_flight": "moves that are not done",
    "tier_up": "1 while the storage tier of every rank serves",
    **{name: f"{text}; of one rank" for name, text in _OF_A_RANK.items()},
}

MOVE_SECONDS: Final = "move_seconds"
"""The histogram: labels `move` (save, load) and `tier`. In `data` a list of observations."""

_MOVE_TEXT: Final = "seconds from a move's order to its end, queueing included, on one rank"

_BUCKETS: Final = tuple(round(10 ** (n / 3), 6) for n in range(-12, 5))
"""Three a decade, from 0.1 ms to 20 s."""

_MOST_OBSERVED: Final = 4096
"""Observations kept for one report, should nobody collect it."""

INTERVAL_S: Final = 1.0
"""The ledger is asked no more often: its gauges cost a pass over every block it knows."""


@dataclass
class TierKVStats(KVConnectorStats):
    """`data`: counter or gauge name → number; `MOVE_SECONDS` → [(move, tier, seconds), …]."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TierKVStats:
        """Counters add up; of gauges the newer one, `other`'s, stays."""
        for name, value in other.data.items():
            if name == MOVE_SECONDS:
                self.data[name] = [*self.data.get(name, ()), *value]
            else:
                self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the engine's log line shows: everything that is not zero."""
        found = {f"tierkv_{name}": value for name, value in self.data.items() if value}
        seconds = [taken for _, _, taken in found.pop(f"tierkv_{MOVE_SECONDS}", ())]
        if seconds:
            found["tierkv_slowest_move_seconds"] = round(max(seconds), 4)
        return found

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StepClock:
    """Times the steps that prefill, for `tierkv.worth`."""

    LEAST: Final = 64
    """Tokens beyond one for each request, below which a step is not counted as a prefill."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._begun: deque[tuple[int, float]] = deque()
        self._ended = 0.0

    def begin(self, scheduled: Mapping[str, int]) -> None:
        """A step with so many tokens for each request goes out."""
        self._begun.append((sum(scheduled.values()) - len(scheduled), time.monotonic()))

    def end(self) -> None:
        """The oldest step came back. Where several are out, it ran since the one before it."""
        if not self._begun:
            return
        tokens, began = self._begun.popleft()
        now = time.monotonic()
        if tokens >= self.LEAST:
            self._line.add(tokens, now - max(began, self._ended))
        self._ended = now


class LedgerStats:
    """The ledger's counters as differences, and a few of the connector's own.

    tier: the storage tier's name.
    """

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._own: Counter[str] = Counter()
        self._reported: dict[str, int] = {}
        self._at = self._census_at = 0.0
        self._was_busy = self._warned = self._due = False
        self._watch = Watch()

    def add(self, name: str, value: int) -> None:
        """Count something that the ledger does not."""
        self._own[name] += value

    def engine_rests(self) -> None:
        """The last request is gone: report next time, as there may be no step after that."""
        self._due = True

    def collect(self, ledger: Ledger) -> TierKVStats | None:
        """Differences since the last report.

        Every `INTERVAL_S`, and when the last move or the last request ends.
        """
        busy = ledger.moves_in_flight > 0
        came_to_rest = self._due or (self._was_busy and not busy)
        self._was_busy, self._due = busy, False
        now = time.monotonic()
        self._watch.look(ledger)
        if (now >= self._census_at or came_to_rest) and ledger.census.advance():
            self._census_at = now + INTERVAL_S
        if now - self._at < INTERVAL_S and not came_to_rest:
            return None
        self._at = now
        known = ledger.glance() | self._own | {"tier_up": int(ledger.tier_is_up)}
        warning = unread_warning(known)
        if warning and not self._warned:
            self._warned = True
            log.warning("tierkv: %s", warning)
        data = {name: known[name] for name in GAUGES if name in known}
        for name in COUNTERS:
            value = known.get(name, 0)
            data[name] = value - self._reported.get(name, 0)
            self._reported[name] = value
        return TierKVStats(data)


def unread_warning(known: Mapping[str, int]) -> str | None:
    """A line where the tier has turned over and hardly anything in it was ever read."""
    held, unread = known["tier_blocks"], known["never_read_blocks"]
    if known["evicted_tier_blocks"] < held or unread < 0.95 * held or not held:
        return None
    return (
        f"the storage tier was filled and emptied again, and {unread} of the {held} blocks in it "
        f"({known['never_read_bytes']} bytes) were never read: it wears for little; prompts repeat "
        "rarely or after too long a time (a larger capacity, or policy end, may help)"
    )


class MoveStats:
    """What one rank's worker counts: its moves' times, and what its storage half says."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self.counters: Counter[str] = Counter()
        """Everything counted since the start; names of `COUNTERS`."""
        self._reported: Counter[str] = Counter()
        self._began: dict[int, tuple[str, str, float]] = {}
        self._seconds: deque[tuple[str, str, float]] = deque(maxlen=_MOST_OBSERVED)
        self._at = 0.0

    def begin(self, move_id: int, kind: str, *, in_tier: bool = True) -> None:
        """A move begins: `save` or `load`; one that is not `in_tier` ends in pinned RAM."""
        self._began[move_id] = kind, self._tier if in_tier else PINNED, time.monotonic()

    def end(self, move_id: int) -> None:
        """It has ended, well or not."""
        begun = self._began.pop(move_id, None)
        if begun is not None:
            self._seconds.append((*begun[:2], time.monotonic() - begun[2]))

    def collect(self, storage: Mapping[str, Any]) -> TierKVStats | None:
        """What was counted since the last call, with the storage half's `stats()`.

        At most every `INTERVAL_S` where nothing but gauges could have changed.
        """
        now = time.monotonic()
        self.counters.update(
            {n: storage[n] - self.counters[n] for n in _OF_STORAGE if n in storage}
        )
        data: dict[str, Any] = dict(self.counters - self._reported)
        self._reported = self.counters.copy()
        if self._seconds:
            data[MOVE_SECONDS] = list(self._seconds)
            self._seconds.clear()
        if data or now - self._at >= INTERVAL_S:
            self._at = now
            data |= {name: storage[name] for name in _OF_A_RANK if name in storage}
        return TierKVStats(data) if data else None


_OF_STORAGE: Final = (
    "keeper_deaths",
    "keeper_hangs",
    "keeper_restarts",
    "timed_out_moves",
    "throttled_batches",
    "degradations",
    "unforeseen_errors",
    "tier_blocks_reinserted",
    "tier_bytes_reinserted",
    "tier_bytes_written",
)
"""Counters of the storage half. A new keeper counts from 0 again, which is not reported."""


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
        self._seconds = _metric(
            self._histogram_cls, MOVE_SECONDS, _MOVE_TEXT, (*labelnames, "move", "tier")
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report of one engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == MOVE_SECONDS:
                for move, tier, seconds in value:
                    self._seconds.labels(*labels, move, tier).observe(seconds)
                continue
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
        more: dict[str, Any] = {"buckets": _BUCKETS} if name == MOVE_SECONDS else {}
        if name in GAUGES:
            more = {"multiprocess_mode": "mostrecent"}
        _made[key] = cls(
            name=f"tierkv_{name}", documentation=text, labelnames=list(labelnames), **more
        )
    return _made[key]
