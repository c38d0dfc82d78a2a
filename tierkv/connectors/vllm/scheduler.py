"""The scheduler side: what the engine asks of a cache, answered from RAM by the ledger.

It never does I/O and never waits. Orders for the workers leave with each step's metadata; what
the workers report comes back with each step's output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, overload

from tierkv.blocks import Event, MoveDone, Outcome, unpack_event
from tierkv.connectors.vllm.layout import (
    agreed_state_ratios,
    engine_layout,
    offered_states,
    states_by_offer,
)
from tierkv.connectors.vllm.options import LOAD_PARAM, LoadWhen, Options
from tierkv.connectors.vllm.stats import PINNED, LedgerStats, StepClock, TierKVStats, tier_name
from tierkv.connectors.vllm.wire import (
    Handshake,
    StepMetadata,
    WorkerEvents,
    pack_command,
)
from tierkv.index import News
from tierkv.ledger import Hit, Ledger
from tierkv.reach import NEVER
from tierkv.worth import Judge, Worth

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("tierkv")

NULL_BLOCK_ID: Final = 0
"""The engine's placeholder in block tables: no page."""


BlockLists = Callable[[str], Sequence[Sequence["KVCacheBlock"]]]
"""Request id → the engine's own list of blocks of each group."""


def _no_tables(request_id: str) -> Sequence[Sequence[KVCacheBlock]]:
    raise RuntimeError("the engine has not said where its block tables are")


class BlockIds(Sequence[int]):
    """The ids of an engine's blocks, read where they are asked for.

    A prompt of 128k tokens has thousands, and a step saves a few: copying the table costs 0.3 ms
    a request (bench/vllm_scheduler.py).
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [block.block_id for block in self._blocks[at]]
        block_id: int = self._blocks[at].block_id
        return block_id


@dataclass(slots=True)
class _Promise:
    """What a request was told: a hit of `tokens`.

    local_tokens: what of it the engine holds. tier_tokens: what of it comes from the storage tier.
    """

    tokens: int
    local_tokens: int
    tier_tokens: int


@dataclass(slots=True)
class _Load:
    """A load on its way: its tokens count as loaded where no rank failed.

    tier_tokens: what of them comes from the storage tier. began: `time.monotonic()`.
    """

    tokens: int
    tier_tokens: int
    ranks_due: int
    began: float
    good: bool = True


class _Turns:
    """Whose turn it is where loads failed, so that no request waits for ever.

    The engine asks about a request again after its load was ordered, and before it runs, only when
    that load failed. It still reserves the request's whole length. Another load would have to fit
    beside that: with more than half of the pool it never does. So the request is to be computed,
    and nobody's load may be ordered in front of it.

    Computing may take more room than the load did (windows), while loads that ended keep their
    pages until the engine comes to them; it comes to nobody behind a request that waits for room.
    So a request that is asked about once more lets those pass.
    """

    def __init__(self) -> None:
        self._loading: set[str] = set()
        self._failed: set[str] = set()

    @property
    def taken(self) -> bool:
        """Whether a request whose load failed waits to be computed: no load is ordered now."""
        return bool(self._failed)

    def ordered(self, request_id: str) -> None:
        """Its load goes out."""
        self._loading.add(request_id)

    def left(self, request_ids: Iterable[str]) -> None:
        """They run, or are gone."""
        if self._loading or self._failed:
            self._loading.difference_update(request_ids)
            self._failed.difference_update(request_ids)

    def has_failed(self, request_id: str) -> bool:
        """Whether its load failed, as it is asked about now."""
        return request_id in self._loading or request_id in self._failed

    def must_wait(self, request_id: str) -> bool:
        """Whether one whose load failed is to be asked about again, after others had their turn."""
        if request_id in self._failed:
            return bool(self._loading)
        self._loading.discard(request_id)
        self._failed.add(request_id)
        return False


class SchedulerSide:
    """Lookups, plans and orders of one engine.

    events: whether the engine publishes KV cache events.
    """

    def __init__(
        self,
        options: Options,
        kv_cache_config: KVCacheConfig,
        world_size: int,
        *,
        events: bool = False,
    ) -> None:
        self._options = options
        self._config = kv_cache_config
        self._world_size = world_size
        self._by_offer = states_by_offer(kv_cache_config)
        self._ledger: Ledger | None = None
        self._requests: dict[str, Request] = {}
        self._promises: dict[str, _Promise] = {}
        self._tier_tokens: dict[str, int] = {}
        # Request id → computed tokens below which nothing of it can be due.
        self._quiet_until: dict[str, int] = {}
        self._turns = _Turns()
        self._loads: dict[int, _Load] = {}
        self._block_lists: BlockLists = _no_tables
        self._next = StepMetadata()
        self._stats = LedgerStats(tier_name(options.url))
        self._judge = Judge(options.min_hit_tokens)
        self._steps = StepClock(self._judge.prefill)
        self._events = events
        self._left: set[str] = set()
        self._quiet_since = 0.0
        # Building the layout now refuses what is not supported before any worker starts its tier.
        engine_layout(kv_cache_config, [1] * len(kv_cache_config.kv_cache_groups))

    @property
    def ledger(self) -> Ledger:
        """The deciding half; it exists once the workers have introduced themselves."""
        if self._ledger is None:
            raise RuntimeError("the workers' handshake has not come yet")
        return self._ledger

    def bind_tables(self, block_lists: BlockLists) -> None:
        """Where the engine's block tables are; asked only for requests that save something."""
        self._block_lists = block_lists

    def start(self, handshakes: Mapping[int, Handshake]) -> None:
        """Take the workers' sizes and what their tiers recovered, one handshake a rank."""
        if sorted(handshakes) != list(range(self._world_size)):
            raise RuntimeError(f"{self._world_size} ranks but handshakes of {sorted(handshakes)}")
        shakes = list(handshakes.values())
        largest = [max(sizes) for sizes in zip(*(h.block_bytes for h in shakes), strict=True)]
        self._ledger = Ledger(
            engine_layout(
                self._config, largest, agreed_state_ratios([h.state_ratios for h in shakes])
            ),
            arena_bytes=min(h.arena_bytes for h in shakes),
            ranks=self._world_size,
            has_tier=bool(self._options.url),
            boundary_policy=self._options.policy.resolve(
                self._config.prefix_cache_retention_interval
            ),
        )
        if self._events:
            self._ledger.take_news()  # the first call begins
        for shake in shakes:
            for event in shake.events:
                self._apply(shake.rank, unpack_event(event))
        recovered = self._ledger.stats()["tier_blocks"]
        log.info("tierkv: %d blocks recovered, arena of %d bytes", recovered, shakes[0].arena_bytes)

    # One request -------------------------------------------------------------------------

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `local_tokens` that can be loaded; None: ask again."""
        when = load_when(request.kv_transfer_params, self._options.load)
        if self._ledger is None or not _cacheable(request) or when is LoadWhen.NEVER:
            return 0, False
        if request.skip_reading_prefix_cache:  # it wants logits of its prompt, or no reuse
            return 0, False
        request_id = request.request_id
        if self._turns.has_failed(request_id):
            return (None if self._turns.must_wait(request_id) else 0), False
        hit = self._ledger.lookup(
            request_id,
            request.block_hashes,
            known_tokens=request.num_tokens,
            local_tokens=local_tokens,
        )
        self._collect_commands()
        self._promises.pop(request_id, None)
        if hit.pending:
            return None, False
        if hit.tokens <= local_tokens or not self._is_worth(request_id, hit, local_tokens, when):
            return 0, False
        if self._turns.taken:
            self._ledger.retract(request_id)
            self._collect_commands()
            return None, False
        self._promises[request_id] = _Promise(hit.tokens, local_tokens, hit.tier_tokens)
        return hit.tokens - local_tokens, True

    def _is_worth(self, request_id: str, hit: Hit, local_tokens: int, when: LoadWhen) -> bool:
        """Whether to load this hit; if not, the promise ends and the tokens are counted once."""
        gained = hit.tokens - local_tokens
        from_tier = min(hit.tier_tokens, gained)
        parts = {PINNED: gained - from_tier, self._stats.tier: from_tier}
        worth = self._judge.decide(gained, parts, always=when is LoadWhen.ALWAYS)
        if worth is Worth.LOAD:
            return True
        self.ledger.retract(request_id)
        self._collect_commands()
        if request_id not in self._left:
            self._left.add(request_id)
            name = "too_short_tokens" if worth is Worth.TOO_SHORT else "too_slow_tokens"
            self._stats.add(name, gained)
        return False

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has room for the hit: order the load."""
        request_id = request.request_id
        self._requests[request_id] = request
        promise = self._promises.pop(request_id, None)
        if not external_tokens:
            return
        self._turns.ordered(request_id)
        if promise is None or promise.tokens - promise.local_tokens != external_tokens:
            # No supported engine does so; one that did would lose a hit by it, not its life.
            log.warning(
                "tierkv: request %s: the engine wants %d tokens but was promised %s; recomputing",
                request_id,
                external_tokens,
                promise,
            )
            self._next.refused.append(request_id)
            return
        self._tier_tokens[request_id] = promise.tier_tokens
        move = self.ledger.begin_load(request_id, blocks.get_block_ids())
        self._loads[move.id] = _Load(
            external_tokens,
            min(promise.tier_tokens, external_tokens),
            self._world_size,
            time.monotonic(),
        )
        self._next.loads.append((request_id, move.pack()))

    def hit_sources(self, request: Request, external_tokens: int) -> tuple[int, int]:
        """Of the load just ordered: tokens from pinned RAM, tokens from the storage tier."""
        from_tier = min(self._tier_tokens.pop(request.request_id, 0), external_tokens)
        return external_tokens - from_tier, from_tier

    def finished(self, request_id: str) -> None:
        """The request is gone; loads on their way for it end by themselves."""
        self._requests.pop(request_id, None)
        self._promises.pop(request_id, None)
        self._tier_tokens.pop(request_id, None)
        self._turns.left((request_id,))
        self._quiet_until.pop(request_id, None)
        self._left.discard(request_id)
        if self._ledger is not None:
            self._ledger.release(request_id)
            self._collect_commands()
        if not self._requests:
            self._stats.engine_rests()

    # One step ----------------------------------------------------------------------------

    def step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Everything that the workers are to do with this step."""
        if self._ledger is not None:
            ledger, requests, quiet = self._ledger, self._requests, self._quiet_until
            for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
                request = requests.get(request_id)
                if request is None:
                    continue
                # Most steps of most requests end here: nothing asks the ledger about them.
                if request.num_computed_tokens + scheduled_tokens < quiet.get(request_id, 0):
                    continue
                # The workers copy after the step's forward, so its tokens count as computed.
                # Drafted ones are not among the request's own, so they never count.
                computed = min(request.num_computed_tokens + scheduled_tokens, request.num_tokens)
                if not _cacheable(request):
                    quiet[request_id] = NEVER
                elif ledger.save_is_due(request_id, computed):
                    self._save(request, computed, output)
                    quiet[request_id] = ledger.quiet_until(request_id)
            self._collect_commands()
            self._turns.left(output.num_scheduled_tokens)
            self._steps.begin(output.num_scheduled_tokens)
        step, self._next = self._next, StepMetadata()
        return step

    def _save(self, request: Request, computed_tokens: int, output: SchedulerOutput) -> None:
        tables: list[Sequence[int]] = [
            BlockIds(blocks) for blocks in self._block_lists(request.request_id)
        ]
        if self._by_offer:
            state = output.kv_connector_block_state
            offers = state.boundary_state_offloads.get(request.request_id, ()) if state else ()
            for g in self._by_offer:
                tables[g] = offered_states(self.ledger.layout, g, offers, NULL_BLOCK_ID)
        move = self.ledger.begin_save(
            request.request_id,
            request.block_hashes,
            computed_tokens=computed_tokens,
            known_tokens=request.num_tokens,
            block_ids=tables,
            null_block_id=NULL_BLOCK_ID,
        )
        if move is not None:
            self._next.saves.append(move.pack())

    def apply(self, report: WorkerEvents) -> None:
        """Take in what the workers report."""
        self._quiet_since = 0.0
        for rank, event in report.events():
            self._apply(rank, event)

    def _apply(self, rank: int, event: Event) -> None:
        if isinstance(event, MoveDone):
            self._count_load(event)
        self.ledger.apply(rank, event)
        self._collect_commands()

    def _count_load(self, done: MoveDone) -> None:
        load = self._loads.get(done.move_id)
        if load is None:
            return
        load.good = load.good and bool((done.outcomes == Outcome.DONE).all())
        load.ranks_due -= 1
        if not load.ranks_due:
            del self._loads[done.move_id]
            self._stats.add("loaded_tokens" if load.good else "failed_tokens", load.tokens)
            if load.good:
                tier = self._stats.tier if load.tier_tokens else PINNED
                tokens = load.tier_tokens or load.tokens
                self._judge.loaded(tier, tokens, time.monotonic() - load.began)

    def _collect_commands(self) -> None:
        self._next.commands += [pack_command(c) for c in self.ledger.take_commands()]

    # The engine as a whole ---------------------------------------------------------------

    def pending(self) -> bool:
        """Whether the engine must go on stepping, though it has nothing to compute.

        True while orders wait for a step or moves are out; for no longer than a move can last.
        """
        busy = self._next != StepMetadata() or (
            self._ledger is not None and self._ledger.moves_in_flight > 0
        )
        now = time.monotonic()
        if not busy:
            self._quiet_since = 0.0
            return False
        if not self._quiet_since:
            self._quiet_since = now
        longest = self._options.write_timeout_s + self._options.read_timeout_s
        return now - self._quiet_since < longest

    def rotate(self) -> None:
        """Everything older is a miss from now on, in every tier."""
        if self._ledger is not None:
            self._ledger.rotate()
            self._promises.clear()
            self._quiet_until.clear()
            self._collect_commands()

    def stats(self) -> TierKVStats | None:
        """What changed since the last call; called after every step.

        Once a second while the engine is busy, and at once when it comes to rest.
        """
        self._steps.end()
        return None if self._ledger is None else self._stats.collect(self._ledger)

    def news(self) -> list[News]:
        """Blocks that can be loaded since the last call, or not any more; for an engine's events.

        Nothing unless the engine publishes them.
        """
        return self._ledger.take_news() if self._events and self._ledger is not None else []


def load_when(params: Mapping[str, Any] | None, default: LoadWhen) -> LoadWhen:
    """What a request's `kv_transfer_params` say, or the default."""
    asked = (params or {}).get(LOAD_PARAM)
    if asked is None:
        return default
    if asked not in list(LoadWhen):
        # A client's mistake is no reason to fail the client: its hits are loaded as everyone's.
        log.warning("%s is %r; write one of %s", LOAD_PARAM, asked, ", ".join(LoadWhen))
        return default
    return LoadWhen(asked)


def _cacheable(request: Request) -> bool:
    # The engine's hashes cover an adapter's name and path, not its weights: after a restart the
    # same name may mean other bytes. So requests with adapters are neither saved nor loaded.
    return request.lora_request is None
