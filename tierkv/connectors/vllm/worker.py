"""The worker side of one rank: copies between the engine's pages and the arena, and the keeper.

Copies are launched here and never waited for (`tierkv.copier` says what is ordered after what). On
a CPU they have ended when they are launched. On a GPU:

- A save's pages are gathered behind the step that filled them, and the engine's stream goes on
  behind that: the engine may preempt the request or give its blocks to another one at once. Until
  the bytes are in the arena nobody is told of them. Saves that queue up too long are declined.
- A load's pages are written behind what the step that ordered it launched, zeroing included. Its
  request is reported, and its slots are given back, when the bytes are there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tierkv.blocks import (
    Copied,
    Event,
    Move,
    MoveDone,
    MoveReleased,
    Outcome,
    Recovered,
    Retire,
)
from tierkv.connectors.vllm.options import Options
from tierkv.connectors.vllm.stats import MoveStats, TierKVStats, tier_name
from tierkv.connectors.vllm.wire import (
    Handshake,
    Packed,
    StepMetadata,
    WorkerEvents,
    carry_out,
    pack_events,
)
from tierkv.copier import Copier, Copy
from tierkv.device import Pages
from tierkv.host import HostArena
from tierkv.keeper import KeeperClient
from tierkv.layout import GroupKind, Layout
from tierkv.pinned import Arena
from tierkv.record import seeds
from tierkv.storage import StorageConfig, StoragePort
from tierkv.streams import Device, Mark, device_for

log = logging.getLogger("tierkv")

_POLL_S = 0.002
"""Pause between two looks at the keeper while a shutdown waits for saves."""

_HUNG: list[WorkerSide] = []
"""Their device may touch their arena until the process ends."""


class Storage(StoragePort, Protocol):
    """A storage half that this worker owns (`tierkv.keeper.KeeperClient`)."""

    def wait_open(self, timeout_s: float) -> Recovered:
        """What was recovered; raises what opening raised, `DeadlineError` after `timeout_s`."""
        ...

    def close(self, *, deadline_s: float) -> bool:
        """Let moves end, then close. False where the deadline came first."""
        ...


@dataclass(slots=True)
class _Load:
    """A load whose tier part is on its way."""

    request_id: str
    move: Move
    give_up_at: float
    after: Mark


@dataclass(slots=True)
class _Incoming:
    """A load whose pages are being written; the scheduler side hears of `events` when they are."""

    load: _Load
    copy: Copy
    outcomes: NDArray[np.uint8]
    events: list[Event]


@dataclass(slots=True)
class _Report:
    """What the engine is told at the end of a step."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)


class WorkerSide:
    """One rank's pages, arena and storage half.

    start_storage: starts the storage half over an arena, without waiting for it to open.
    device: the queues to copy in; those of the pages' device by default.

    Raises `CapacityError` where the arena does not fit in RAM, `KeeperError` where the keeper
    cannot be started.
    """

    def __init__(
        self,
        options: Options,
        layout: Layout,
        pages: Pages,
        config: StorageConfig,
        start_storage: Callable[[StorageConfig, Arena], Storage] = KeeperClient,
        device: Device | None = None,
    ) -> None:
        self._options = options
        self._layout = layout
        self._pages = pages
        self._rank = config.rank
        self._block_bytes = np.array(layout.block_bytes, np.int64)
        self._arena = Arena.create(config.arena_bytes, prefault=True)
        self._host = HostArena(self._arena, layout.block_bytes)
        self._storage = start_storage(config, self._arena)
        self._copier = Copier(
            self._host.memory,
            device_for(pages.device) if device is None else device,
            cuts=self._host.register_sync(pages.device),
        )
        self._open = True
        self._loads: dict[int, _Load] = {}
        self._incoming: deque[_Incoming] = deque()
        self._outgoing: deque[tuple[Move, Copy]] = deque()
        self._saving: set[int] = set()
        self._retiring: set[int] = set()
        self._epoch = 0
        self._report = _Report()
        self._stats = MoveStats(tier_name(config.url))
        self.counters = self._stats.counters

    @property
    def storage(self) -> Storage:
        """The storage half."""
        return self._storage

    @property
    def pinned(self) -> dict[str, Any]:
        """`HostArena.stats`: whether the device copies the arena directly, and why not."""
        return self._host.stats()

    def handshake(self, state_ratios: tuple[int | None, ...]) -> Handshake:
        """Wait until the tier is open, `open_timeout_s` at most, and say what this rank has.

        state_ratios: what its groups hold (`layout.worker_state_ratios`).

        Raises what opening raised (`StoreError`, `ConfigError`, `DeadlineError`), one line each:
        the engine's start fails with it.
        """
        recovered = self._storage.wait_open(self._options.open_timeout_s)
        return Handshake(
            rank=self._rank,
            arena_bytes=len(self._arena),
            block_bytes=self._layout.block_bytes,
            state_ratios=state_ratios,
            events=pack_events([recovered]),
        )

    # One step ----------------------------------------------------------------------------

    def load(self, step: StepMetadata) -> None:
        """Carry out the step's commands and start its loads; those from the arena end here."""
        for command in step.commands:
            self._note(command)
            carry_out(command, self._rank, self._storage)
        self._report.failed.update(step.refused)
        if not step.loads:
            return
        # The engine has launched this step's zeroing of the blocks that it gave to these loads.
        after, give_up_at = self._copier.mark(), time.monotonic() + self._options.load_timeout_s
        for request_id, packed in step.loads:
            move = Move.unpack(packed)
            load = _Load(request_id, move, give_up_at, after)
            in_tier = bool(move.from_tier.any())
            self._stats.begin(move.id, "load", in_tier=in_tier)
            if in_tier:
                self._loads[move.id] = load
                self._storage.submit(move)
            else:
                done = MoveDone(move.id, np.full(len(move), Outcome.DONE, np.uint8))
                self._fill_pages(load, done)

    def save(self, step: StepMetadata) -> None:
        """Launch the copies of the step's saves into the arena."""
        after = self._copier.mark() if step.saves else None
        for packed in step.saves:
            move = Move.unpack(packed)
            if after is None or not self._copier.has_room(self._bytes_of(move)):
                declined = np.full(len(move), Outcome.DECLINED, np.uint8)
                self._report.events.append(MoveDone(move.id, declined))
                continue
            copy = self._copier.save(
                self._pages,
                move.keys.groups,
                move.block_ids,
                move.offsets,
                after=after,
                seeds=seeds(move.keys) if self._options.device_checksums else None,
            )
            self._copier.protect(copy)
            self._stats.begin(move.id, "save")
            self._outgoing.append((move, copy))
        self._send_on()

    def results(self) -> KVConnectorTransferResults:
        """What ended since the last call. A failed load is in both sets, as the engine wants it."""
        self._send_on()
        self._poll()
        self._give_up()
        loaded, failed = self._report.loaded, self._report.failed
        self._report.loaded, self._report.failed = set(), set()
        return KVConnectorTransferResults(finished_recving=loaded | failed, failed_recving=failed)

    def failed_block_ids(self) -> set[int]:
        """Blocks to recompute, where the engine takes block ids (`_takes_block_ids`)."""
        failed, self._report.failed_blocks = self._report.failed_blocks, set()
        return failed

    def events(self) -> WorkerEvents | None:
        """Everything for the scheduler side since the last call."""
        events, self._report.events = self._report.events, []
        return WorkerEvents({self._rank: pack_events(events)}) if events else None

    def stats(self) -> TierKVStats | None:
        """What was counted since the last call."""
        pinned = {"pinned": int(self._host.stats()["pinned"])}
        return self._stats.collect(self._storage.stats() | pinned)

    # Ends of moves -----------------------------------------------------------------------

    def _send_on(self) -> None:
        """Pass saves whose bytes are in the arena on to the tier, and say that they are there."""
        while self._outgoing and self._outgoing[0][1].done():
            move, copy = self._outgoing.popleft()
            self.counters["copied_out_bytes"] += copy.nbytes
            self._report.events.append(Copied(move.id))
            self._saving.add(move.id)
            self._storage.submit(copy.with_sums(move))

    def _poll(self) -> None:
        for event in self._storage.poll():
            if isinstance(event, MoveDone):
                self._saving.discard(event.move_id)
                load = self._loads.pop(event.move_id, None)
                if load is not None:
                    self._fill_pages(load, event)
                    continue
                self._stats.end(event.move_id)
            elif isinstance(event, MoveReleased):
                incoming = [i for i in self._incoming if i.load.move.id == event.move_id]
                if incoming:  # after the MoveDone, which waits for the copy
                    incoming[0].events.append(event)
                    continue
            elif isinstance(event, Retire):
                self._retiring.add(event.retire_id)
            self._report.events.append(event)
        self._finish_loads()

    def _fill_pages(self, load: _Load, done: MoveDone) -> None:
        """Launch the copies of what arrived."""
        move, outcomes = load.move, done.outcomes
        if move.epoch < self._epoch:  # rotated away while it was on its way
            outcomes = np.full(len(move), Outcome.MISSING, np.uint8)
        good = outcomes == Outcome.DONE
        copy = self._copier.load(
            self._pages,
            move.keys.groups[good],
            move.block_ids[good],
            move.offsets[good],
            after=load.after,
        )
        self._incoming.append(_Incoming(load, copy, outcomes, [done]))
        self._finish_loads()

    def _finish_loads(self) -> None:
        """Name the requests whose pages are written to the engine, and give their slots back."""
        while self._incoming and self._incoming[0].copy.done():
            ended = self._incoming.popleft()
            self.counters["copied_in_bytes"] += ended.copy.nbytes
            self._stats.end(ended.load.move.id)
            bad = ended.outcomes != Outcome.DONE
            if bad.any():
                names = sorted({Outcome(o).name for o in ended.outcomes[bad].tolist()})
                self._fail_load(ended.load, ended.load.move.block_ids[bad], ", ".join(names))
            else:
                self._report.loaded.add(ended.load.request_id)
            # With this the scheduler side takes the slots back.
            self._report.events += ended.events

    def _fail_load(self, load: _Load, block_ids: NDArray[np.int32], why: str) -> None:
        log.warning(
            "tierkv: %d of %d blocks for request %s could not be loaded (%s); recomputing",
            len(block_ids),
            len(load.move),
            load.request_id,
            why,
        )
        self.counters["failed_loads"] += 1
        if _takes_block_ids(self._layout):
            self._report.failed_blocks.update(block_ids.tolist())
            self._report.loaded.add(load.request_id)
        else:
            self._report.failed.add(load.request_id)

    def _give_up(self) -> None:
        """Let requests go whose load takes too long.

        Their pages may be given to others at once: a late answer finds no load and copies nothing.
        Its slots stay leased until then, which is the scheduler side's affair. A load whose pages
        are being written already is not given up: that ends soon, and not before it does.
        """
        now = time.monotonic()
        for move_id in [i for i, load in self._loads.items() if load.give_up_at < now]:
            load = self._loads.pop(move_id)
            self._fail_load(load, load.move.block_ids, Outcome.TIMED_OUT.name)

    def _bytes_of(self, move: Move) -> int:
        return int(self._block_bytes[move.keys.groups].sum())

    # The end -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for saves on their way, within `close_timeout_s`, and close the storage half.

        Safe to call twice. Nothing is promised to anyone any more, so whatever space the tier
        wants back is agreed to here.
        """
        if not self._open:
            return
        self._open = False
        until = time.monotonic() + self._options.close_timeout_s
        self._agree_to_all()
        ended = self._copier.close(deadline_s=self._options.close_timeout_s)
        self._send_on()
        while self._saving and time.monotonic() < until:
            time.sleep(_POLL_S)
            self._poll()
            self._agree_to_all()
        if self._saving:
            log.warning("tierkv: %d saves did not end before the shutdown", len(self._saving))
        self._storage.close(deadline_s=max(until - time.monotonic(), 1.0))
        if not ended:
            log.error("tierkv: the device has not ended its copies; their memory stays taken")
            _HUNG.append(self)
            return
        self._host.unregister_sync()
        del self._copier, self._host
        self._arena.close()

    def _note(self, command: Packed) -> None:
        if command[0] == "agree" and command[1] == self._rank:
            self._retiring.discard(command[2])
        elif command[0] == "rotate":
            self._epoch = command[1]

    def _agree_to_all(self) -> None:
        for retire_id in self._retiring:
            self._storage.agree(retire_id)
        self._retiring.clear()


def _takes_block_ids(layout: Layout) -> bool:
    """Whether a failed load is reported by block ids, which keeps the prefix before them.

    The engine takes ids with one group only. It resumes at the first bad block, so every block
    before that must be there: not so in a window group, whose hit loads the last window alone.
    """
    return len(layout.groups) == 1 and layout.groups[0].kind is GroupKind.FULL
