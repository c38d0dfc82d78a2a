"""Runs moves between the arena and one storage tier: deadlines, proof of every byte, retirement.

The mover decides nothing. Every move it is given ends with exactly one `MoveDone`, within a bound,
whatever the backend does; slots that a hung backend call may still touch are released later, by
`MoveReleased`. Blocks are sealed (`tierkv.record`) when they are saved and verified when they are
loaded, here and nowhere else.

Moves run side by side. Moves on the same key are put in order by whoever decides (it waits for
`MoveDone`), with one exception: a save never overtakes a delete that was submitted before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv import record
from tierkv.backend import Backend, BlockBatch, Outcomes
from tierkv.blocks import (
    ARENA_ALIGN,
    NO_KEYS,
    Appraise,
    Event,
    Keys,
    Move,
    MoveDone,
    MoveKind,
    MoveReleased,
    Outcome,
    Recovered,
    Retire,
)
from tierkv.health import Entry, TierHealth
from tierkv.iosched import Admission, IOScheduler, Lane
from tierkv.pinned import Arena
from tierkv.questions import Questions
from tierkv.running import UNSET, End, Run, refusal
from tierkv.storage import StorageConfig
from tierkv.tier import Tier

_log = logging.getLogger(__name__)

BATCH_BYTES: Final = 16 << 20
"""A move goes to the backend in batches of about this many bytes: eight 2 MiB extents, so that
I/O stays large while one batch is checksummed and the next is on its way."""

MAX_QUARANTINED: Final = 8
"""Moves whose backend call overran and has not ended. At this many the tier gets nothing more
until one ends: each holds slots, and likely a thread."""

CLOSE_GRACE_S: Final = 1.0
"""What `close` grants, past its deadline, to cancelled calls, and again to the backend's close."""

CLEAR_RETRY_S: Final = 1.0
"""The first wait before a failed rotation is tried again; it doubles up to a minute."""

_COUNTERS: Final = (
    *(f"{word}_save_blocks" for word in ("done", "declined", "failed", "timed_out")),
    *(f"{word}_load_blocks" for word in ("done", "missing", "corrupt", "failed", "timed_out")),
    "save_bytes",
    "load_bytes",
    "deleted_blocks",
    "retired_blocks",
    "rotations",
    "refused_moves",
    "throttled_batches",
    "timed_out_moves",
    "unforeseen_errors",
)


class Mover:
    """One storage tier at work on the running event loop.

    backend: not yet open; None for no tier at all (then saves are DECLINED, loads MISSING).
    arena: the memory that moves refer to; must outlive the mover.
    emit: takes every `Event`, on the loop, and must not raise.
    """

    def __init__(
        self,
        backend: Backend | None,
        arena: Arena,
        config: StorageConfig,
        emit: Callable[[Event], None],
    ) -> None:
        self._tier = None if backend is None else Tier(backend, config)
        self.tier = "none" if backend is None else backend.scheme
        self._arena = arena
        self._config = config
        self._emit = emit
        self._block_bytes = np.array(config.block_bytes, np.int64)
        self._sched = IOScheduler(
            read_bytes_in_flight=config.read_bytes_in_flight,
            write_bytes_in_flight=config.write_bytes_in_flight,
            write_queue_bytes=config.write_queue_bytes,
        )
        self._loop = asyncio.get_running_loop()
        self._health = TierHealth(self._loop.time)
        self._runs: set[Run] = set()
        self._idle = asyncio.Event()  # set again whenever no run is left
        self._retires: dict[int, asyncio.Future[None]] = {}
        self._questions = Questions()
        self._next_retire_id = 1
        self._rotating: asyncio.Task[None] | None = None
        self._epoch = 0
        self._ready = False
        self._old_blocks = False  # the backend may hold what was rotated away
        self._closing = False
        self._count: Counter[str] = Counter()

    # Opening and closing. ---------------------------------------------------------------------

    async def open(
        self, *, epoch: int = 0, clear: bool = False, first_retire_id: int = 1
    ) -> Recovered:
        """Open the backend and tell what it holds. Nothing is emitted.

        clear: forget everything first (a rotation that an earlier keeper did not finish).
        first_retire_id: where retire ids, and those of questions, start; a keeper started anew
            must not reuse old ones.
        Raises `ConfigError` or `StoreError`; then everything is closed again.
        """
        self._epoch = epoch
        self._next_retire_id = first_retire_id
        keys = NO_KEYS
        if self._tier is not None:
            keys = await self._tier.open(self._retire, self._worth, clear=clear)
            try:
                await self._tier.refresh_usage()
            except asyncio.CancelledError:
                await self._tier.close()
                raise
        self._ready = True
        return Recovered(keys, epoch)

    async def close(self, *, deadline_s: float = 10.0) -> bool:
        """Let moves in flight end within `deadline_s`, cancel the rest, close the backend.

        Returns whether all of it ended. False means that a backend call hangs: it is left behind
        with its buffers, never waited for longer than twice `CLOSE_GRACE_S` past the deadline.
        """
        self._closing = True
        last = self._loop.time() + deadline_s
        self._release_retires()
        await self._ended(deadline_s)
        for run in list(self._runs):
            run.end(End.CLOSING)
        if self._rotating is not None:
            self._rotating.cancel()
        clean = await self._ended(CLOSE_GRACE_S)
        if self._tier is not None:
            closing = self._loop.create_task(self._close_tier(clean), name="tierkv-close")
            left_s = max(last - self._loop.time(), CLOSE_GRACE_S)
            await asyncio.wait({closing}, timeout=left_s)
            clean = clean and closing.done() and closing.result()
        if not clean:
            _log.warning("tier %s: closed without waiting for a call that hangs", self.tier)
        return clean

    async def _close_tier(self, idle: bool) -> bool:
        """Close the backend; first forget what a rotation that was cut short left in it.

        Not while a hung write could still follow: then it is as if the process had been killed.
        """
        assert self._tier is not None
        old, self._old_blocks = self._old_blocks, False
        cleared = not old or (idle and await self._tier.clear())
        return await self._tier.close() and cleared

    async def _ended(self, timeout_s: float) -> bool:
        """Wait for runs and rotation; whether all ended in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained()
                if self._rotating is not None:
                    await asyncio.wait({self._rotating})
        except TimeoutError:
            return False
        return True

    async def _drained(self) -> None:
        """Wait until no run is left."""
        while self._runs:
            self._idle.clear()
            await self._idle.wait()

    # What the port asks. ----------------------------------------------------------------------

    def submit(self, move: Move) -> None:
        """Start a move; a `MoveDone` follows, perhaps before this returns."""
        outcomes = np.full(len(move), UNSET, np.uint8)
        if move.kind is MoveKind.LOAD:
            outcomes[~move.from_tier] = Outcome.DONE
        run = Run(move, outcomes, self._loop.create_future())
        refused = self._refused(run) if len(run.mine) else None
        if refused is not None:
            self._count["refused_moves"] += 1
            outcomes[run.mine] = refused
        if refused is not None or not len(run.mine):
            self._emit(MoveDone(move.id, outcomes))
            return
        self._start(run)

    def agree(self, retire_id: int) -> None:
        """The blocks of this `Retire` are promised to nobody; unknown ids change nothing."""
        waiting = self._retires.get(retire_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def appraised(self, question_id: int, worth: NDArray[np.bool_]) -> None:
        """The answer to an `Appraise`; unknown ids change nothing."""
        self._questions.take(question_id, worth)

    def rotate(self, epoch: int) -> None:
        """Forget all that is older than `epoch`: at once for callers, then durably.

        `Recovered` with no keys follows when the backend has forgotten; until then moves are
        refused. An epoch that is not newer changes nothing, and neither does one after `close`.
        """
        if epoch <= self._epoch or self._closing:
            return
        self._epoch = epoch
        self._ready = False
        self._old_blocks = True
        for run in list(self._runs):
            run.end(End.ROTATED)
        self._release_retires()
        previous = self._rotating
        self._rotating = self._loop.create_task(self._rotate(epoch, previous), name="tierkv-rotate")

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, flat and JSON-able; `tier_*` are as fresh as `refresh_usage`."""
        return {
            **dict.fromkeys(_COUNTERS, 0),
            **(self._count if self._tier is None else self._count + self._tier.count),
            **self._sched.stats(),
            **({} if self._tier is None else self._tier.usage),
            "tier": self.tier,
            "moves_in_flight": len(self._runs),
            "quarantined_moves": self._quarantined(),
            "degraded": int(self._health.degraded),
            "degradations": self._health.degradations,
            "retires_waiting": len(self._retires),
            "questions_waiting": len(self._questions),
        }

    async def refresh_usage(self) -> None:
        """Ask the backend what it holds, for `stats`; not any more while it closes."""
        if self._tier is not None and not self._closing:
            await self._tier.refresh_usage()

    # One move. --------------------------------------------------------------------------------

    def _refused(self, run: Run) -> Outcome | None:
        """The outcome that the move gets without the tier being asked, if that is how it is."""
        move = run.move
        if self._closing:
            return refusal(move.kind, End.CLOSING)
        if self._tier is None or not self._ready or move.epoch != self._epoch:
            return refusal(move.kind, End.ROTATED)  # nothing is there, nothing is kept
        if move.kind is not MoveKind.DELETE and not self._within_arena(move):
            _log.error("tier %s: move %d leaves the arena; it was not run", self.tier, move.id)
            self._count["unforeseen_errors"] += 1
            return Outcome.FAILED
        entry = self._health.enter() if self._quarantined() < MAX_QUARANTINED else Entry.CLOSED
        run.probe = entry is Entry.PROBE
        return refusal(move.kind, End.DEGRADED) if entry is Entry.CLOSED else None

    def _quarantined(self) -> int:
        return sum(run.answered for run in self._runs)

    def _within_arena(self, move: Move) -> bool:
        if len(move.offsets) != len(move) or int(move.keys.groups.max()) >= len(self._block_bytes):
            return False
        ends = move.offsets + self._block_bytes[move.keys.groups]
        return bool(
            (move.offsets >= 0).all()
            and (move.offsets % ARENA_ALIGN == 0).all()
            and (ends <= len(self._arena)).all()
        )

    def _start(self, run: Run) -> None:
        deletes = {t for r in self._runs if r.move.kind is MoveKind.DELETE for t in r.tasks}
        run.timeout_s = (
            self._config.read_timeout_s
            if run.move.kind is MoveKind.LOAD
            else self._config.write_timeout_s
        )
        run.restart_timer(End.QUEUE)
        run.nbytes = self._block_bytes[run.move.keys.groups[run.mine]]
        self._runs.add(run)
        work = (
            [self._delete(run)]
            if run.move.kind is MoveKind.DELETE
            else [self._batch(run, rows, deletes) for rows in self._split(run)]
        )
        run.tasks = {self._loop.create_task(batch) for batch in work}
        run.left = len(run.tasks)
        for task in run.tasks:
            task.add_done_callback(partial(self._task_ended, run))
        run.ended.add_done_callback(partial(self._cut_short, run))

    def _split(self, run: Run) -> list[NDArray[np.intp]]:
        ends = np.cumsum(run.nbytes)
        if ends[-1] <= BATCH_BYTES:
            return [run.mine]
        cuts = np.flatnonzero(np.diff((ends - 1) // BATCH_BYTES)) + 1
        return np.split(run.mine, cuts)

    # Every run ends with one `MoveDone`, and with `MoveReleased` where that comes later.

    def _task_ended(self, run: Run, task: asyncio.Task[None]) -> None:
        """Blocks of a task that failed outside the backend have no outcome and end FAILED."""
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._count["unforeseen_errors"] += 1
            _log.error("tier %s: move %d: %r", self.tier, run.move.id, exc, exc_info=exc)
        run.left -= 1
        if run.left:
            return
        run.stop_timer()
        if not run.told:
            self._answer(run, End.NORMAL)
        elif run.answered:
            self._emit(MoveReleased(run.move.id))
        self._runs.discard(run)
        if not self._runs:
            self._idle.set()

    def _cut_short(self, run: Run, ended: asyncio.Future[End]) -> None:
        if run.left:
            run.cancel()
            self._answer(run, ended.result())

    def _answer(self, run: Run, end: End) -> None:
        move = run.move
        if move.epoch != self._epoch:
            end = End.ROTATED
            run.outcomes[:] = UNSET
        if end is End.DEADLINE:
            self._count["timed_out_moves"] += 1
            _log.warning(
                "tier %s: move %d (%s of %d blocks) overran its %.1f s",
                self.tier,
                move.id,
                move.kind.name.lower(),
                len(move),
                run.timeout_s,
            )
        outcomes = run.outcomes.copy()
        outcomes[outcomes == UNSET] = refusal(move.kind, end)
        self._judge(run, outcomes, end)
        self._tally(run, outcomes)
        run.told = True
        run.answered = run.busy > 0
        self._emit(MoveDone(move.id, outcomes, released=not run.answered))

    def _judge(self, run: Run, outcomes: Outcomes, end: End) -> None:
        """Tell the tier's health what this move says about it, if anything."""
        if end is End.DEADLINE or (end is End.NORMAL and _all_bad(outcomes[run.mine])):
            if self._health.failed(probe=run.probe):
                _log.warning("tier %s: degraded; probed until it answers again", self.tier)
        elif end is End.NORMAL and run.started:
            if self._health.succeeded():
                _log.warning("tier %s: answers again", self.tier)
        elif run.probe:
            self._health.unknown()

    def _tally(self, run: Run, outcomes: Outcomes) -> None:
        move = run.move
        if move.kind is MoveKind.DELETE:
            self._count["deleted_blocks"] += len(move)
            return
        word = move.kind.name.lower()
        mine = outcomes[run.mine]
        if not mine.any():  # all are DONE
            self._count[f"done_{word}_blocks"] += len(mine)
            self._count[f"{word}_bytes"] += int(run.nbytes.sum())
            return
        for value, n in enumerate(np.bincount(mine).tolist()):
            if n:
                self._count[f"{Outcome(value).name.lower()}_{word}_blocks"] += n
        self._count[f"{word}_bytes"] += int(run.nbytes[mine == Outcome.DONE].sum())

    async def _batch(
        self, run: Run, rows: NDArray[np.intp], deletes: set[asyncio.Task[None]]
    ) -> None:
        assert self._tier is not None
        saving = run.move.kind is MoveKind.SAVE
        if saving and deletes:
            await asyncio.wait(deletes)
        move = run.move
        whole = len(rows) == len(move)
        keys = move.keys if whole else move.keys.take(rows)
        nbytes = run.nbytes if rows is run.mine else self._block_bytes[keys.groups]
        sums = rows if len(move.algorithms) else slice(0)
        grant = self._sched.grant(Lane.SAVE if saving else Lane.LOAD, int(nbytes.sum()))
        async with grant as admission:
            if admission is Admission.THROTTLED:
                self._count["throttled_batches"] += 1
                run.outcomes[rows] = Outcome.DECLINED
                return
            with run.touching(grant):
                batch = BlockBatch(
                    keys,
                    record.promised(move.algorithms[sums], move.checksums[sums], len(keys)),
                    self._arena.view,
                    move.offsets if whole else move.offsets[rows],
                    nbytes,
                )
                call = self._tier.save(batch) if saving else self._tier.load(batch)
                run.outcomes[rows] = await call

    async def _delete(self, run: Run) -> None:
        assert self._tier is not None
        run.begin()
        done = await self._tier.delete(run.move.keys)
        run.outcomes[:] = Outcome.DONE if done else Outcome.FAILED

    # Retirement, rotation, the unforeseen. ----------------------------------------------------

    async def _retire(self, keys: Keys) -> None:
        """`BackendContext.retire`: announce, and wait until the side that decides agrees."""
        if not self._ready or self._closing or not len(keys):
            return  # nothing is promised to anybody
        retire_id = self._new_id()
        agreed = self._loop.create_future()
        self._retires[retire_id] = agreed
        self._emit(Retire(retire_id, keys))
        try:
            await agreed
        finally:
            del self._retires[retire_id]
            self._count["retired_blocks"] += len(keys)

    async def _worth(self, keys: Keys) -> NDArray[np.bool_]:
        """`BackendContext.worth`: ask; none where nobody would answer."""
        if not self._ready or self._closing or not len(keys) or self._questions.deaf:
            return np.zeros(len(keys), np.bool_)
        question_id = self._new_id()
        question = Appraise(question_id, keys)
        return await self._questions.ask(question_id, len(keys), partial(self._emit, question))

    def _new_id(self) -> int:
        """For a `Retire` or an `Appraise`; none is used twice."""
        self._next_retire_id += 1
        return self._next_retire_id - 1

    def _release_retires(self) -> None:
        self._questions.end_all()
        for agreed in self._retires.values():
            if not agreed.done():
                agreed.set_result(None)

    async def _rotate(self, epoch: int, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait({previous})
        # A late write of old bytes must never follow the clear, so even hung calls are waited for.
        await self._drained()
        wait_s = CLEAR_RETRY_S
        while epoch == self._epoch and self._tier is not None and not await self._tier.clear():
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, 60.0)
        if epoch == self._epoch:
            self._ready = True
            self._old_blocks = False
            self._count["rotations"] += 1
            self._emit(Recovered(NO_KEYS, epoch))


def _all_bad(outcomes: Outcomes) -> bool:
    """Whether the tier did nothing that it was asked for."""
    bad = (outcomes == Outcome.FAILED) | (outcomes == Outcome.TIMED_OUT)
    return bool(outcomes.any() and bad.all())
