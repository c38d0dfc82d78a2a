"""Moves that a rotation or the keeper's death cuts short: released slots are left alone."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from tests.backends.nvme.torture.homes import SLOT, Slots
from tests.backends.nvme.torture.journal import BLOCK_BYTES, Journal, key_of
from tests.backends.nvme.torture.life import SEGMENT, url_of
from tierkv.blocks import MoveDone, MoveKind, MoveReleased, Outcome, Recovered, Retire, TierDown
from tierkv.keeper import KeeperClient
from tierkv.storage import StorageConfig
from tierkv.testing import make_move

CUTS = 200
KILL_EVERY = 15
"""Rounds. A keeper that dies is started anew in a third of a second."""


class Caller:
    """Moves of a thread without a loop, as an engine's worker has them."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.rng = rng
        self.slots = Slots()
        self.cut = 0
        self.epoch = 0
        self.journal = Journal(64 << 20)
        config = StorageConfig(
            url=url_of(root, 8 * SEGMENT),
            namespace=b"\x01" * 32,
            namespace_text="test",
            arena_bytes=len(self.slots.arena),
            block_bytes=BLOCK_BYTES,
        )
        self.client = KeeperClient(config, self.slots.arena)
        self.client.wait_open(60)
        self._ids = itertools.count(1)
        self.running: dict[int, tuple[MoveKind, list[int], list[int]]] = {}
        self._late: dict[int, list[int]] = {}
        self._served = 0
        self._downs = 0

    def submit(self, kind: MoveKind, first: int) -> None:
        chosen = list(range(first, first + self.rng.choice((1, 6, 18))))
        slots = self.slots.take(len(chosen))
        if kind is MoveKind.SAVE:
            self.journal.offer(chosen, 0)
            self.slots.fill(slots, chosen, 0)
        move_id = next(self._ids)
        self.running[move_id] = kind, chosen, slots
        offsets = [slot * SLOT for slot in slots]
        keys = [key_of(n) for n in chosen]
        self.client.submit(
            make_move(kind, keys, move_id=move_id, offsets=offsets, epoch=self.epoch)
        )

    def take_events(self) -> None:
        for event in self.client.poll():
            match event:
                case MoveDone(move_id, outcomes, released):
                    kind, chosen, slots = self.running.pop(move_id)
                    if kind is MoveKind.LOAD:
                        self._look_at(chosen, slots, outcomes.tolist())
                    self.cut += bool((outcomes != Outcome.DONE).any())
                    if released:
                        self.slots.give_back(slots)
                    else:
                        self._late[move_id] = slots
                case MoveReleased(move_id):
                    self.slots.give_back(self._late.pop(move_id))
                case Retire(retire_id, _):
                    self.client.agree(retire_id)
                case Recovered(_, epoch):
                    self._served = epoch
                case TierDown():
                    self._downs += 1
                case _:
                    pass

    def _look_at(self, chosen: list[int], slots: list[int], outcomes: list[int]) -> None:
        history = self.journal.read()
        for number, slot, outcome in zip(chosen, slots, outcomes, strict=True):
            if outcome == Outcome.DONE:
                assert history.wrong(number, self.slots.payload(slot, number)) == ""

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.take_events()
            self.client.wait(0.05)

    def round(self, *, kill: bool) -> None:
        """Moves of all kinds on their way, and then they are cut short."""
        for i in range(5):
            self.submit(MoveKind.SAVE, 60 * i)
        if self.rng.random() < 0.7:
            self.until(lambda: not self.running)
        for i in range(5):
            self.submit(self.rng.choice((MoveKind.LOAD, MoveKind.SAVE)), 60 * (i + 1))
        for _ in range(self.rng.randrange(4)):
            self.client.wait(0.001)
            self.take_events()
        if kill:
            downs = self._downs
            os.kill(self.client.pid, signal.SIGKILL)
            self.until(lambda: self._downs > downs and self.client.is_alive)
        self.epoch += 1
        self.client.rotate(self.epoch)
        self.until(lambda: self._served == self.epoch and not self.running and not self._late)


def test_moves_that_are_cut_short_leave_nothing_behind(tmp_path: Path) -> None:
    caller = Caller(tmp_path, random.Random(3))
    for number in itertools.count(1):
        caller.round(kill=number % KILL_EVERY == 0)
        if caller.cut >= CUTS:
            break
    caller.submit(MoveKind.SAVE, 9000)
    caller.until(lambda: not caller.running)
    cut = caller.cut
    caller.submit(MoveKind.LOAD, 9000)
    caller.until(lambda: not caller.running)
    assert caller.cut in (cut, cut + 1)  # the load may ask for more blocks than were saved
    assert caller.client.close(deadline_s=30)
    assert caller.client.stats()["moves_in_flight"] == 0
    assert caller.slots.close() == []
