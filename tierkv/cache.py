"""The async API: one cache over pinned RAM and a storage tier, on the caller's own event loop.

What an acknowledgement means:

========== ==================================================================================
`save`     the blocks are in pinned RAM and serve hits; on their way to the storage tier
`flush`    what was saved before it is readable after SIGKILL, or is counted as not stored
`load`     every block of the hit is in your pages and was proven, or it says what is not
`rotate`   everything older is a miss, in every tier, in flight and after a restart too
========== ==================================================================================

Everything belongs to the loop on which the cache was opened. Nothing here blocks it: copies
between pages and arena run in a thread of the cache's own, or, for pages on a GPU, on streams of
its own, behind what your current stream holds when you call; I/O runs in the storage half.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from tierkv import jobs, leases, planner
from tierkv.answers import Flushed, Loaded, PrefixHit, Saved, loaded
from tierkv.blocks import Copied, Move, MoveDone, MoveReleased, Outcome, Recovered
from tierkv.copier import Copy
from tierkv.errors import CacheClosedError, DeadlineError
from tierkv.hashing import NO_EXTRAS, Extras, HashChain, TokenIds, chain
from tierkv.jobs import BlockIds, Job, Jobs, PageTensors, Prompt
from tierkv.keeper import KeeperClient
from tierkv.layout import Layout
from tierkv.ledger import Agree, Appraised, Ledger, Rotate, Submit
from tierkv.local import LocalStorage
from tierkv.pinned import Arena
from tierkv.reach import Policy
from tierkv.storage import StorageConfig

_names = itertools.count(1)
"""For owners of leases; one count for all caches, so that a hit fits only the cache it is from."""

_ASK_AGAIN_S = 0.5
"""A lookup that shares another's load looks again after so long, even if nothing is reported: a
hit that was dropped without a load reports nothing, and its promise ends by time alone."""

_OPEN_S = 60.0
"""A keeper whose tier is not open by then is given up: a million blocks take five seconds."""


class Cache:
    """See the module. Make one with `tierkv.open`."""

    def __init__(
        self,
        layout: Layout,
        config: StorageConfig,
        policy: Policy,
        *,
        isolation: Literal["thread", "process"],
        device_checksums: bool = False,
    ) -> None:
        self.layout = layout
        self._config = config
        self._isolation = isolation
        self._device_checksums = device_checksums
        self._ledger = Ledger(
            layout,
            arena_bytes=config.arena_bytes,
            has_tier=bool(config.url),
            boundary_policy=policy,
        )
        self._arena: Arena | None = None
        self._port: LocalStorage | KeeperClient | None = None
        self._closing = False
        self._closed: asyncio.Task[None] | None = None
        self._loads: dict[int, asyncio.Future[MoveDone]] = {}
        self._released_early: set[int] = set()
        self._confirmed_epoch = 0
        self._changed = asyncio.Event()
        self._watch = leases.Watch()
        self._jobs: Jobs

    # Opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.aopen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aopen(self) -> None:
        """Open the tiers and take in what they hold; `async with` calls it.

        Raises `ConfigError` or `StoreError`, one line; nothing is left open then, nor if cancelled.
        """
        if self._port is not None or self._closing:
            raise CacheClosedError("this cache was opened before; make a new one")
        arena = await jobs.create_arena(self._config.arena_bytes)
        try:
            if self._isolation == "process":
                self._port = await self._start_keeper(arena)
            else:
                self._port = await LocalStorage.open(self._config, arena)
        except BaseException:
            arena.close()
            raise
        self._arena = arena
        self._jobs = Jobs(arena, self._config.block_bytes, device_checksums=self._device_checksums)
        self._port.on_event(self._on_event)
        self._pump()

    async def _start_keeper(self, arena: Arena) -> KeeperClient:
        loop = asyncio.get_running_loop()
        keeper = KeeperClient(self._config, arena)
        try:
            self._ledger.apply(0, await loop.run_in_executor(None, keeper.wait_open, _OPEN_S))
        except BaseException:
            await loop.run_in_executor(None, keeper.close)
            raise
        return keeper

    async def aclose(self, *, deadline_s: float = 30.0) -> None:
        """Let saves end within `deadline_s`, then close the tiers. Safe to call twice.

        If cancelled: it goes on by itself; call it again to wait for the end.
        """
        if self._closed is None:
            self._closing = True
            self._closed = asyncio.create_task(self._close(deadline_s))
        await asyncio.shield(self._closed)

    async def _close(self, deadline_s: float) -> None:
        self._changed.set()
        port = self._port
        if port is not None:
            port.on_event(None)
            if isinstance(port, KeeperClient):
                await asyncio.to_thread(port.close, deadline_s=deadline_s)
            else:
                await port.aclose(deadline_s=deadline_s)
            self._pump()  # every move has ended: whoever waits for one learns it now
            if not await self._jobs.close(deadline_s=deadline_s):
                return  # the device may touch the arena still
            del self._jobs
        if self._arena is not None:
            await asyncio.to_thread(self._arena.close)  # giving gigabytes back takes a while

    # The API --------------------------------------------------------------------------------

    def chain(self, tokens: TokenIds, *, extras: Extras = NO_EXTRAS) -> HashChain:
        """The block hashes of a prompt: make it once, and `extend` it as the prompt grows.

        extras: adapter, tenant salt and images, which keep equal tokens apart.

        >>> prompt = cache.chain([1, 2, 3, 4], extras=Extras(salt="tenant 7"))
        >>> prompt.extend([5, 6, 7, 8, 9])

        Raises `ValueError` for token ids outside 0..2**32-1.
        """
        return chain(tokens, self.layout.hash_block_tokens, extras=extras)

    async def lookup(
        self, prompt: Prompt, *, extras: Extras = NO_EXTRAS, local_tokens: int = 0
    ) -> PrefixHit:
        """The longest prefix of `prompt` that can be loaded.

        local_tokens: you hold the KV of [0, local_tokens) yourself, a multiple of the alignment;
            only a longer hit is a hit, and only what is missing is loaded.
        The last token is never part of a hit: its logits are what you want. Answers from RAM; it
        waits only where another load is bringing the same blocks, and then shares it.

        >>> hit = await cache.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9])
        >>> hit.tokens, hit.blocks
        (8, {'attention': range(0, 2)})
        >>> hit.release()  # not loading it after all

        If cancelled: nothing is leased.
        """
        hashes = jobs.prompt_chain(self.layout, prompt, extras)
        if local_tokens < 0 or local_tokens % self.layout.alignment_tokens:
            raise ValueError(
                f"local_tokens is {local_tokens}; write a multiple of the alignment, "
                f"{self.layout.alignment_tokens}"
            )
        owner = f"lookup-{next(_names)}"
        try:
            while True:
                self._open_port()
                hit = self._ledger.lookup(
                    owner, hashes.hashes, known_tokens=hashes.tokens, local_tokens=local_tokens
                )
                if not hit.pending:
                    break
                await self._change(within_s=_ASK_AGAIN_S)
        except BaseException:
            self._let_go(owner)
            raise
        if hit.tokens <= local_tokens:
            self._let_go(owner)
            return PrefixHit(0, 0, {}, miss=hit.miss)
        ranges = planner.load_ranges(self.layout, hit.tokens, local_tokens)
        blocks = {self.layout.groups[g].name: range(first, end) for g, first, end in ranges}
        return PrefixHit(hit.tokens, hit.tier_tokens, blocks, local_tokens, owner, self._let_go)

    async def load(self, hit: PrefixHit, pages: PageTensors, blocks: BlockIds) -> Loaded:
        """Copy a hit's blocks into your pages and end its lease.

        blocks: your block ids by block index; every index in `hit.blocks` needs one.

        >>> hit = await cache.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9])
        >>> loaded = await cache.load(hit, pages, {"attention": [5, 3]})
        >>> loaded.tokens, loaded.failed
        (8, {})

        Raises `ValueError` for a table that is too short or a miss, and `KeyError` for a hit whose
        lease is over; nothing was touched then. If cancelled: nothing touches your pages once this
        raises; those of the hit may hold the loaded bytes, the old ones, or a mix.
        """
        if not hit:
            raise ValueError("this lookup was a miss: there is nothing to load")
        self._open_port()
        ours = jobs.compiled(self.layout, pages)
        job = self._jobs.job(ours)
        move = self._ledger.begin_load(
            hit.owner, jobs.block_tables(self.layout, blocks, hit.blocks)
        )
        hit.release()  # the move has leases of its own
        return await self._jobs.run(job, self._load(job, hit, move))

    async def save(
        self,
        prompt: Prompt,
        pages: PageTensors,
        blocks: BlockIds,
        *,
        computed_tokens: int | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> Saved:
        """Keep what a later prompt with the same beginning can read.

        computed_tokens: how many leading tokens have their KV in the pages; all by default.
        blocks: your block ids by block index. None for a block without a page: windows that have
            moved on, states that were not taken.

        >>> saved = await cache.save([1, 2, 3, 4, 5, 6, 7, 8], pages, {"attention": [0, 1]})
        >>> saved.blocks
        2

        Returns when the blocks are in pinned RAM. A prompt larger than that is passed through in
        parts, as fast as the tier takes them. Blocks that are kept already are not copied again.
        If cancelled: your pages are no longer read once this raises; parts may have been saved.
        """
        self._open_port()
        hashes = jobs.prompt_chain(self.layout, prompt, extras)
        ours = jobs.compiled(self.layout, pages)
        tables = jobs.block_tables(self.layout, blocks, {})
        computed = hashes.tokens if computed_tokens is None else computed_tokens
        if not 0 <= computed <= hashes.tokens:
            raise ValueError(f"computed_tokens is {computed}; the prompt has {hashes.tokens}")
        job = self._jobs.job(ours)
        return await self._jobs.run(job, self._save(job, hashes, tables, computed))

    async def flush(self, *, deadline_s: float = 30.0) -> Flushed:
        """Wait until what was saved before is readable after SIGKILL.

        Blocks that the tier declined or failed are offered to it again, for as long as that stores
        some of them.

        >>> await cache.flush(deadline_s=10)
        Flushed(unstored_blocks=0)

        Raises `DeadlineError` where that takes longer than `deadline_s`; saves go on then.
        """
        self._open_port()
        try:
            async with asyncio.timeout(deadline_s):
                while not await self._flush_once():
                    pass
        except TimeoutError:
            left = len(self._ledger.saves_in_flight())
            raise DeadlineError(
                f"flush: {left} moves are not stored after {deadline_s} s; they go on"
            ) from None
        return Flushed(self._ledger.unstored_blocks)

    async def rotate(self, *, deadline_s: float = 60.0) -> None:
        """Make everything older a miss: at once here, and for good in the tier when it returns.

        For new weights under the same namespace. Loads in flight end as misses, saves in flight
        are dropped.

        >>> await cache.rotate()

        Raises `DeadlineError` where the tier has not confirmed within `deadline_s`: all is a miss
        here, and will be there unless the process is killed before.
        """
        self._open_port()
        epoch = self._ledger.rotate()
        self._obey()
        try:
            async with asyncio.timeout(deadline_s):
                while self._confirmed_epoch < epoch:
                    await self._change()
        except TimeoutError:
            raise DeadlineError(
                f"rotate: the tier has not confirmed after {deadline_s} s"
            ) from None

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, flat and JSON-able; those of the storage half begin with `storage_`.

        >>> cache.stats()["hit_tokens"]
        8
        """
        storage = self._open_port().stats()
        ours = self._ledger.stats() | self._jobs.stats()
        return {**ours, **{f"storage_{k}": v for k, v in storage.items()}}

    def debug(self) -> dict[str, Any]:
        """Who holds RAM, how much of it, for how long and what for (`tierkv.leases`), JSON-able.

        >>> cache.debug()["leases"]
        []
        """
        return leases.debug(self._ledger)

    # Saves and loads, in tasks of their own -----------------------------------------------

    async def _load(self, job: Job, hit: PrefixHit, move: Move) -> Loaded:
        outcomes = np.zeros(len(move), np.uint8)
        released = True
        if move.from_tier.any():
            waiting = asyncio.get_running_loop().create_future()
            self._loads[move.id] = waiting
            self._submit(move)
            done = await waiting
            outcomes, released = done.outcomes.copy(), done.released
        if move.epoch != self._ledger.epoch:
            outcomes[:] = Outcome.MISSING
        try:
            await self._jobs.copy(job, move, np.flatnonzero(outcomes == Outcome.DONE))
        finally:
            # Not before: until the copy is over the slots stay leased.
            self._loads.pop(move.id, None)
            released = released or move.id in self._released_early
            self._released_early.discard(move.id)
            self._ledger.apply(0, MoveDone(move.id, outcomes, released))
            self._obey()
            self._wake()
        return loaded(self.layout, hit, outcomes)

    async def _save(
        self,
        job: Job,
        hashes: HashChain,
        tables: list[list[int | None]],
        computed: int,
    ) -> Saved:
        owner = f"save-{next(_names)}"
        count = self._ledger.counters
        blocks = nbytes = skipped = declined = 0
        try:
            while not job.abandoned:
                self._open_port()
                skipped_before = count["skipped_blocks"]
                move = self._ledger.begin_save(
                    owner,
                    hashes.hashes,
                    computed_tokens=computed,
                    known_tokens=hashes.tokens,
                    block_ids=tables,
                )
                skipped += count["skipped_blocks"] - skipped_before
                if move is not None:
                    self._submit(await self._gather(job, move))
                    blocks += len(move)
                    nbytes += int(np.array(self.layout.block_bytes)[move.keys.groups].sum())
                declined = self._ledger.declined_blocks(owner)
                if not declined or not self._ledger.moves_in_flight:
                    break
                await self._change()
        finally:
            self._let_go(owner)
        return Saved(blocks, nbytes, declined, skipped)

    async def _gather(self, job: Job, move: Move) -> Move:
        """Copy its pages into its slots; the move with what checksums were made on the way."""
        copied: Copy | None = None
        try:
            copied = await self._jobs.copy(job, move, np.arange(len(move)))
        finally:
            if copied is not None:
                self._ledger.apply(0, Copied(move.id))
            else:
                failed = np.full(len(move), Outcome.FAILED, np.uint8)
                self._ledger.apply(0, MoveDone(move.id, failed))
                self._wake()
        if copied is None:
            raise CacheClosedError("the save was abandoned before its copy")
        return copied.with_sums(move)

    async def _flush_once(self) -> bool:
        """Offer what is not stored and wait for all saves; whether trying again is of no use."""
        ledger, offered = self._ledger, 0
        before = ledger.unstored_blocks
        if self._config.url and ledger.tier_is_up:
            offered = ledger.rewrite()
            self._obey()
        due = ledger.saves_in_flight()
        while due & ledger.saves_in_flight():
            await self._change()
        after = ledger.unstored_blocks
        return after == 0 or (after >= before > 0 and (offered > 0 or not due))

    # News from the storage half -----------------------------------------------------------

    def _pump(self) -> None:
        """Apply what the storage half reports, pass on what the ledger answers, wake waiters."""
        if self._port is None:
            return
        for event in self._port.poll():
            match event:
                case MoveDone(move_id) if move_id in self._loads:
                    self._loads[move_id].set_result(event)
                    continue
                case MoveReleased(move_id) if move_id in self._loads:
                    self._released_early.add(move_id)
                    continue
                case Recovered(_, epoch):
                    self._confirmed_epoch = epoch
            self._ledger.apply(0, event)
        self._obey()
        self._wake()

    def _on_event(self) -> None:
        if not self._closing:  # from then on the port belongs to `_close`, perhaps in a thread
            self._pump()

    def _submit(self, move: Move) -> None:
        if not self._closing:
            self._open_port().submit(move)
            return
        failed = MoveDone(move.id, np.full(len(move), Outcome.FAILED, np.uint8))
        if move.id in self._loads:
            self._loads[move.id].set_result(failed)
        else:
            self._ledger.apply(0, failed)

    def _obey(self) -> None:
        port = self._port
        assert port is not None
        for command in self._ledger.take_commands():
            match command:
                case Agree(_, retire_id) if not self._closing:
                    port.agree(retire_id)
                case Appraised(_, question_id, worth) if not self._closing:
                    port.appraised(question_id, worth)
                case Rotate(epoch) if not self._closing:
                    port.rotate(epoch)
                case Submit(_, move):
                    self._submit(move)

    def _wake(self) -> None:
        self._watch.look(self._ledger)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, *, within_s: float | None = None) -> None:
        """Wait until something happened, or `within_s`. `CacheClosedError` once it is closed."""
        self._open_port()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        self._open_port()

    # Small helpers -------------------------------------------------------------------------

    def _open_port(self) -> LocalStorage | KeeperClient:
        if self._port is None or self._closing:
            raise CacheClosedError("the cache is closed; use it inside its `async with`")
        return self._port

    def _let_go(self, owner: str) -> None:
        self._ledger.release(owner)
        if self._port is not None:
            self._obey()
            self._wake()
