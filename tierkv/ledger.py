"""The side that decides, whole: one door to what is resident, for any number of ranks.

The ledger plans with `tierkv.planner`, claims slots, leases what it promises, makes the moves, and
applies what the ranks report. It is synchronous, does no I/O, and runs inside an engine's
scheduler as well as behind the async API. Time comes in through `clock` only.

A block counts as pinned when every rank has copied it, and as stored when every rank has it. All
ranks use the same slots, so the ledger's arena is the smallest of theirs and its blocks the
largest.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tierkv import fit, planner, policy, reach
from tierkv.blocks import (
    Appraise,
    Copied,
    Event,
    Keys,
    Move,
    MoveDone,
    MoveKind,
    MoveReleased,
    Recovered,
    Retire,
    TierDown,
    planned_move,
)
from tierkv.books import Agree, Appraised, Books, Census, Command, Hit, Miss, Rotate, Submit
from tierkv.errors import ConfigError
from tierkv.flights import Flights
from tierkv.holdings import Holdings
from tierkv.index import News, Pinned, Tier
from tierkv.layout import Layout
from tierkv.owner import Owner, Promise
from tierkv.planner import BlockTables, HitPlan, SavePlan, SaveProgress
from tierkv.reach import AUTO, Policy, PolicyKind
from tierkv.stock import Chosen, SeenBoundaries, Stock

__all__ = ["Agree", "Appraised", "Command", "Hit", "Ledger", "Miss", "Rotate", "Submit"]

# Python 3.11 takes 2 us to find a member of an enum.
_FILLING, _WRITING = int(Pinned.FILLING), int(Tier.WRITING)


class Ledger:
    """Decides for one engine (or one cache) what is kept and where.

    layout: with this engine's block bytes (the largest of the ranks).
    arena_bytes: the smallest of the ranks'.
    ranks: how many storage halves must agree.
    has_tier: whether there is a storage tier at all, which may take later what it declined.
    boundary_policy: which boundaries are kept (`tierkv.reach.Policy`).
    reserve: share of the arena that saves leave to loads, and loads to saves.
    promise_s: a promise whose load has not begun by then is taken back.
    pending_s: how long a request is told to ask again before it gets a miss instead.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        arena_bytes: int,
        ranks: int = 1,
        has_tier: bool = True,
        boundary_policy: Policy | str = AUTO,
        reserve: float = 0.125,
        promise_s: float = 30.0,
        pending_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.policy = Policy.parse(boundary_policy)
        if self.policy.kind is PolicyKind.ENGINE:
            raise ConfigError(
                "policy 'engine' follows an engine; write another where there is none"
            )
        self._books = Books(layout, arena_bytes=arena_bytes, ranks=ranks, clock=clock)
        self._flights = Flights(self._books, has_tier=has_tier)
        self._holdings = Holdings(self._books)
        self._requests: dict[str, Owner] = {}
        self._seen = SeenBoundaries()
        self._promises: deque[tuple[Owner, float]] = deque()
        self._budget = self._books.room.share(1.0 - reserve)
        self._promise_s, self._pending_s = promise_s, pending_s
        self._failed_seen = 0

    # Requests ----------------------------------------------------------------------------

    def lookup(
        self, owner: str, hashes: Sequence[bytes], *, known_tokens: int, local_tokens: int = 0
    ) -> Hit:
        """The longest hit for `owner`, leased to it until the load ends or the request goes.

        A new lookup takes the owner's earlier promise back. Nothing waits and nothing is read.
        """
        request = self._request(owner)
        self._take_back(request)
        self._expire()
        self._books.counters["lookups"] += 1
        request.since = request.since or self._books.next_tick
        search = fit.Search(self.layout.alignment_tokens, local_tokens)
        while True:
            plan = planner.plan_hit(
                self._books.index,
                self.layout,
                hashes,
                known_tokens=known_tokens,
                local_tokens=local_tokens,
                max_boundary=search.limit,
            )
            if plan.tokens <= local_tokens:
                if search.nothing():
                    continue
                return self._miss(request, known_tokens, shrunk=search.limit is not None)
            if plan.pending:
                return self._pending(request, plan)
            made = self._promise(request, plan, local_tokens)
            if isinstance(made, HitPlan):
                request.pending_since = None
                tier_tokens = fit.tier_tokens(self.layout, made, local_tokens)
                return Hit(plan.tokens, tier_tokens=tier_tokens)
            if self._flights.load_bytes:
                return self._pending(request, plan)
            if not search.too_long(plan.tokens, made):
                return self._miss(request, known_tokens, shrunk=True)

    def begin_load(self, owner: str, block_ids: BlockTables) -> Move:
        """Turn the owner's promise into a move into these engine blocks.

        block_ids: `block_ids[group][block index]`, the engine's id of every block of the hit.
        Raises `KeyError` where the owner was promised nothing (or the promise expired).
        """
        request = self._requests.get(owner)
        if request is None or request.promise is None:
            raise KeyError(f"{owner} holds no promise to load: it ended, or is of another cache")
        promise, books = request.promise, self._books
        plan = promise.plan
        ids = planner.page_ids(plan, block_ids)
        request.promise = None
        move = planned_move(
            books.new_id(),
            MoveKind.LOAD,
            books.index.keys_of(plan.rows),
            offsets=books.index.offset[plan.rows],
            block_ids=ids,
            from_tier=plan.from_tier,
            epoch=books.epoch,
        )
        self._flights.start(move, plan.rows, copies=False)
        books.count("hit", plan.rows)
        books.counters["hits"] += 1
        books.counters["hit_tokens"] += plan.tokens - promise.local_tokens
        return move

    def begin_save(
        self,
        owner: str,
        hashes: Sequence[bytes],
        *,
        computed_tokens: int,
        known_tokens: int,
        block_ids: BlockTables,
        null_block_id: int | None = None,
    ) -> Move | None:
        """A move for what the policy keeps of [0, computed_tokens) and that is not kept yet.

        Every block is offered once; what found no place is offered again after room was made.
        The pages must hold the blocks' bytes when the device side runs the move, and until it
        reports `Copied`.
        """
        request = self._request(owner)
        books = self._books
        waiting = len(request.progress.declined)
        retry = waiting > 0 and request.declined_at != books.capacity_version
        plan = planner.plan_save(
            books.index,
            self.layout,
            self.policy,
            hashes,
            request.progress,
            computed_tokens=computed_tokens,
            known_tokens=known_tokens,
            block_ids=block_ids,
            null_block_id=null_block_id,
            retry=retry,
            seen=self._seen,
        )
        if not (request.progress.next_block or reach.tells_junctions(self.layout)):
            self._seen.add(Stock(books.index, self.layout, hashes).boundary_names())
        request.progress = plan.progress
        request.quiet_until = planner.quiet_until(self.layout, self.policy, plan.progress)
        if len(plan.kept_rows):
            request.rows = np.append(request.rows, plan.kept_rows)
        if any(plan.skipped_blocks):
            books.count_skipped(plan.skipped_blocks)
        move = self._save(request, plan) if len(plan.wanted) else None
        # One that is declined once more is not counted once more.
        books.counters["declined_blocks"] += max(len(request.progress.declined) - waiting, 0)
        if request.since:
            books.use(plan.kept_rows, request.since)  # what its own pages held of it as well
        if len(plan.kept_rows) or move is not None:
            # All of the prompt at once: were its first steps' blocks older than its last ones',
            # they would be evicted first, and nothing can be read without them.
            books.touch(request.rows)
        return move

    def save_is_due(self, owner: str, computed_tokens: int) -> bool:
        """Whether `begin_save` may have anything to do. Most decode steps need not ask more."""
        request = self._requests.get(owner)
        if request is None or computed_tokens >= request.quiet_until:
            return True
        if request.declined_at in (-1, self._books.capacity_version):
            return False
        return len(request.progress.declined) > 0

    def quiet_until(self, owner: str) -> int:
        """Computed tokens below which no save is due, until a rotation. 0: that is not known."""
        request = self._requests.get(owner)
        return 0 if request is None or len(request.progress.declined) else request.quiet_until

    def _request(self, owner: str) -> Owner:
        request = self._requests.get(owner)
        if request is None:
            request = self._requests[owner] = Owner()
        return request

    def release(self, owner: str) -> None:
        """The request is gone. Its promise ends; its moves in flight go on."""
        request = self._requests.pop(owner, None)
        if request is not None:
            self._take_back(request)
            self._write_again()

    def _write_again(self) -> None:
        """Offer the tier what it did not take, once for each request that ends meanwhile."""
        failed = self._books.counters["failed_save_blocks"]
        if failed != self._failed_seen and self.tier_is_up:
            self._failed_seen = failed
            self.rewrite()

    def rotate(self) -> int:
        """Make everything older a miss at once, in every tier, in flight included.

        Returns the new epoch; the ranks learn of it by a `Rotate` command.
        """
        books, index = self._books, self._books.index
        books.epoch += 1
        for request in self._requests.values():
            self._take_back(request)
            request.progress = SaveProgress()
            request.quiet_until = 0
            request.rows = request.rows[:0]
        self._seen.clear()
        live = index.live()
        index.tell(live[index.tier[live] == Tier.RESIDENT], in_tier=True, gone=True)
        index.tell(live[index.pinned[live] == Pinned.RESIDENT], in_tier=False, gone=True)
        index.forget_all(live)
        index.tier[live] = Tier.ABSENT
        books.freed(live)
        self._holdings.rotate()
        books.commands.append(Rotate(books.epoch))
        books.counters["rotations"] += 1
        return books.epoch

    def retract(self, owner: str) -> None:
        """Take back what the owner was promised: it does without."""
        self._take_back(self._request(owner))

    # What the ranks report, and what they are told -------------------------------------------

    def apply(self, rank: int, event: Event) -> None:
        """Take one event of one rank into account. Events of a rank come in order."""
        match event:
            case Copied(move_id):
                self._flights.copied(rank, move_id)
            case MoveDone(move_id, outcomes, released):
                self._flights.done(
                    rank, move_id, outcomes, released=released, tier_is_up=self.tier_is_up
                )
            case MoveReleased(move_id):
                self._flights.released(rank, move_id)
            case Retire(retire_id, keys):
                self._flights.spoil(self._holdings.retire(rank, retire_id, keys))
            case Appraise(question_id, keys):
                self._holdings.appraise(rank, question_id, keys)
            case Recovered(keys, epoch):
                if self._holdings.recover(rank, keys, epoch):
                    self.rewrite()
            case TierDown(reason):
                self._holdings.down(rank, reason)
        self._holdings.answer_retirements()

    def take_commands(self) -> list[Command]:
        """What the ranks must be told, in order; each is returned once."""
        self._books.commands, commands = [], self._books.commands
        return commands

    def rewrite(self) -> int:
        """Write what is pinned but not stored once more: after a tier came back, or at a flush.

        Returns how many blocks; the ranks get them by a `Submit` command. Bounded by the share of
        the arena that saves may hold.
        """
        books, index = self._books, self._books.index
        rows = policy.unstored(index)
        rows = rows[~np.isin(rows, self._flights.unreleased_saves())]
        room = self._budget - self._flights.save_bytes
        rows = rows[: int(np.searchsorted(np.cumsum(books.room.sizes(rows)), room, side="right"))]
        if rows.size:
            index.tier[rows] = Tier.WRITING
            index.leases[rows] += 1
            move = planned_move(
                books.new_id(),
                MoveKind.SAVE,
                index.keys_of(rows),
                offsets=index.offset[rows],
                epoch=books.epoch,
            )
            self._flights.start(move, rows, copies=False)
            books.commands.append(Submit(None, move))
        return len(rows)

    @property
    def counters(self) -> Mapping[str, int]:
        """The monotonic counters, live."""
        return self._books.counters

    @property
    def unstored_blocks(self) -> int:
        """Blocks that are pinned but neither in the tier nor on their way there."""
        return len(policy.unstored(self._books.index))

    def declined_blocks(self, owner: str) -> int:
        """How many blocks of the owner's saves found no room and wait for some."""
        request = self._requests.get(owner)
        return 0 if request is None else len(request.progress.declined)

    @property
    def epoch(self) -> int:
        """How often everything was rotated away."""
        return self._books.epoch

    @property
    def tier_is_up(self) -> bool:
        """Whether every rank's tier is open and serving."""
        return self._holdings.up

    @property
    def moves_in_flight(self) -> int:
        """Moves that some rank has not answered yet (quarantined slots do not count)."""
        return len(self._flights)

    def saves_in_flight(self) -> set[int]:
        """Ids of saves that are not stored yet."""
        return self._flights.saves()

    def stats(self) -> dict[str, int]:
        """Counters and gauges, flat; the gauges cost one pass over the columns."""
        books = self._books
        return books.counters | books.gauges() | {"moves_in_flight": self.moves_in_flight}

    def glance(self) -> dict[str, int]:
        """As `stats`, without a look at whole columns: see `tierkv.books.Census`."""
        return self._books.glance() | {"moves_in_flight": self.moves_in_flight}

    def take_news(self) -> list[News]:
        """What became loadable, or ceased to be, since the last call; the first call begins."""
        index = self._books.index
        news, index.news = index.news or [], []
        return news

    @property
    def census(self) -> Census:
        """Kept going by whoever calls `glance`."""
        return self._books.census

    # Promises ---------------------------------------------------------------------------

    def _promise(self, request: Owner, plan: HitPlan, local_tokens: int) -> HitPlan | int:
        """Lease the plan and claim slots for what comes from the tier.

        Returns the plan that was promised, or a boundary that might fit: then nothing is leased.
        """
        books, index, rows = self._books, self._books.index, plan.rows
        room = self._budget - self._flights.load_bytes
        fits = fit.longest(books, self.layout, plan, room)
        if fits < plan.tokens:
            return fits
        claimed = fit.claim(books, plan, room)
        if claimed is None:
            return plan.tokens - 1
        plan, offsets = claimed
        incoming = rows[plan.from_tier]
        index.offset[incoming] = offsets
        index.pinned[incoming] = Pinned.FILLING
        index.tier_leases[incoming] += 1
        self._flights.load_bytes += books.room.slot_bytes(incoming)
        index.depth[rows] = planner.ends(self.layout, plan)
        books.use(rows, request.since)
        expires = books.clock() + self._promise_s
        request.promise = Promise(plan, local_tokens, expires)
        self._promises.append((request, expires))
        return plan

    def _take_back(self, request: Owner) -> None:
        promise, request.promise = request.promise, None
        if promise is None:
            return
        books, plan = self._books, promise.plan
        incoming = plan.rows[plan.from_tier]
        books.index.leases[plan.rows] -= 1
        books.index.tier_leases[incoming] -= 1
        self._flights.load_bytes -= books.room.slot_bytes(incoming)
        books.room.empty(incoming)
        books.freed(plan.rows)
        self._holdings.answer_retirements()

    def _expire(self) -> None:
        # All promises are good for equally long, so the oldest expires first.
        now = self._books.clock()
        while self._promises:
            request, expires = self._promises[0]
            if request.promise is not None and request.promise.expires == expires:
                if expires >= now:
                    return
                self._take_back(request)
                self._books.counters["promises_expired"] += 1
            self._promises.popleft()

    def _miss(self, request: Owner, known_tokens: int, *, shrunk: bool) -> Hit:
        request.pending_since = None
        if known_tokens < planner.min_known_tokens(self.layout):
            self._books.counters["short_lookups"] += 1
            return Hit(0, miss=Miss.SHORT)
        return Hit(0, miss=Miss.NO_ROOM if shrunk else Miss.ABSENT)

    def _pending(self, request: Owner, plan: HitPlan) -> Hit:
        now = self._books.clock()
        if request.pending_since is None:
            request.pending_since = now
        if now - request.pending_since > self._pending_s:
            request.pending_since = None
            self._books.counters["pending_given_up"] += 1
            return Hit(0, miss=Miss.WAITED)
        return Hit(plan.tokens, pending=True)

    # Saves --------------------------------------------------------------------------------

    def _save(self, request: Owner, plan: SavePlan) -> Move | None:
        """Claim slots for as many of the wanted blocks as fit and make the move."""
        books, index, wanted = self._books, self._books.index, plan.wanted
        room = self._budget - self._flights.save_bytes
        # Its own beginning is not driven out for its end, unless the tier has it.
        offsets = books.room.claim_sparing(wanted.groups, room, request.rows)
        count = len(offsets)
        if count < len(wanted):
            self._decline(request, wanted.take(slice(count, None)))
        if not count:
            return None
        taken, rows = wanted.take(slice(count)), plan.rows[:count]
        names = plan.names[:count]
        new = rows < 0
        if new.all():
            rows = index.add_many(taken.groups, names)
            index.uses[rows] = books.recall(taken.groups, names)
        else:
            fresh = list(itertools.compress(names, new.tolist()))
            rows[new] = index.add_many(taken.groups[new], fresh)
            index.uses[rows[new]] = books.recall(taken.groups[new], fresh)
        index.depth[rows] = planner.ends(self.layout, taken)
        index.offset[rows] = offsets
        index.pinned[rows] = _FILLING
        index.tier[rows] = _WRITING
        index.leases[rows] += 1
        request.rows = np.append(request.rows, rows)
        move = planned_move(
            books.new_id(),
            MoveKind.SAVE,
            Keys(taken.groups, b"".join(names)),
            offsets=offsets,
            block_ids=plan.page_ids[:count],
            epoch=books.epoch,
        )
        self._flights.start(move, rows, copies=True)
        books.count("saved", rows)
        return move

    def _decline(self, request: Owner, blocks: Chosen) -> None:
        progress = request.progress
        request.progress = replace(progress, declined=progress.declined + blocks)
        request.declined_at = self._books.capacity_version
