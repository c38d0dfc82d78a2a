"""The worker's side of the keeper: a `StoragePort` that survives the keeper's death."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from tierkv import errors
from tierkv.blocks import (
    Event,
    Move,
    MoveDone,
    MoveKind,
    MoveReleased,
    Outcome,
    Recovered,
    TierDown,
    unpack_event,
)
from tierkv.errors import DeadlineError, KeeperError, TierKVError
from tierkv.keeper.process import KeeperProcess
from tierkv.mover import CLOSE_GRACE_S
from tierkv.pinned import Arena
from tierkv.running import End, refusal
from tierkv.storage import StorageConfig

_log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
"""A keeper that has not said hello by then hangs. It takes 0.3 s here; a cold disk takes longer."""

EXIT_GRACE_S: Final = 0.2
"""One that hung up is given so long to exit by itself, so that its exit status tells why."""

REAP_GRACE_S: Final = 1.0
"""A killed process is reaped within milliseconds, unless the kernel holds it in a dead disk. After
so long its moves end all the same, and their slots are released when it is gone."""

RESTART_WAIT_S: Final = 0.5
"""The wait before the second restart in a row; it doubles. The first comes at once."""

MAX_RESTARTS: Final = 8
"""Keepers in a row that died without having done anything; then the tier stays down."""

RECOVERED_S: Final = 60.0
"""A keeper that was open for so long counts as one that worked, even if nobody asked anything."""

MAX_UNSENT_BYTES: Final = 64 << 20
"""Commands are small (47 bytes a block): more than this waits only for a keeper that hangs."""

_TICK_S: Final = 0.25
_REAP_TICK_S: Final = 0.01
_RETIRE_IDS_PER_LIFE: Final = 1 << 32


class _State(enum.Enum):
    STARTING = "starting"
    OPEN = "open"
    DYING = "dying"
    WAITING = "waiting"
    DOWN = "down"
    CLOSED = "closed"


class KeeperClient:
    """Starts a keeper and speaks for it; all methods belong to one thread and none waits.

    (Except `wait_open` and `close`, which say how long.) `poll` must be called now and then, or
    `on_event` be set: that is also when a keeper that died or hangs is noticed and a new one is
    started. The first keeper's failure to open is raised by `wait_open`; later ones are tried
    again, ever more slowly, up to `MAX_RESTARTS` in a row.

    epoch: the rotation that the store serves now.
    """

    def __init__(self, config: StorageConfig, arena: Arena, *, epoch: int = 0) -> None:
        """Start the keeper without waiting for it; `KeeperError` where that is refused."""
        self._config = config
        self._arena = arena
        self._epoch = epoch
        self._served_epoch = epoch
        self._events: list[Event] = []
        self._moves: dict[int, tuple[Move, float]] = {}
        self._unreleased: set[int] = set()
        self._stats: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lives = 0
        self._failures = 0
        self._deaths = 0
        self._hangs = 0
        self._was_open = False
        self._error: TierKVError | None = None
        self._clean = False
        self._state = _State.STARTING
        self._start()

    # StoragePort. -----------------------------------------------------------------------------

    def submit(self, move: Move) -> None:
        """See `StoragePort.submit`. Without an open keeper it ends at once: DECLINED or FAILED."""
        if self._state is not _State.OPEN or self._process.unsent_bytes > MAX_UNSENT_BYTES:
            self._give_up(move, released=True, end=End.DEGRADED)
            self._wake_soon()
            return
        self._moves[move.id] = (move, time.monotonic())
        self._process.send(("move", *move.pack()))
        self._arm()

    def agree(self, retire_id: int) -> None:
        """See `StoragePort.agree`. Answers to an earlier keeper's `Retire` change nothing."""
        if self._state is _State.OPEN:
            self._process.send(("agree", retire_id))

    def appraised(self, question_id: int, worth: NDArray[np.bool_]) -> None:
        """See `StoragePort.appraised`. As with `agree`."""
        if self._state is _State.OPEN:
            self._process.send(("appraised", question_id, worth.tobytes()))

    def rotate(self, epoch: int) -> None:
        """See `StoragePort.rotate`. A keeper that dies before it is done leaves it to the next."""
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        self._rotated_at = time.monotonic()
        if self._state in (_State.OPEN, _State.STARTING):
            self._process.send(("rotate", epoch))
            self._arm()

    def poll(self) -> list[Event]:
        """See `StoragePort.poll`."""
        self._pump()
        self._arm()
        events, self._events = self._events, []
        return events

    def on_event(self, wake: Callable[[], None] | None) -> None:
        """See `StoragePort.on_event`. Call it on the loop; None takes it off again."""
        self._unwatch()
        self._wake = wake
        self._loop = asyncio.get_running_loop() if wake is not None else None
        self._watch()
        self._wake_soon()

    def stats(self) -> dict[str, Any]:
        """The keeper's counters as of its last message (0.2 s after activity), and `keeper_*`."""
        return {
            **self._stats,
            "keeper_alive": int(self.is_alive),
            "keeper_pid": self.pid,
            "keeper_deaths": self._deaths,
            "keeper_hangs": self._hangs,
            "keeper_restarts": self._lives - 1,
            "keeper_moves_in_flight": len(self._moves),
        }

    # Life. ------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the keeper now, or of the last one."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the tier can be used right now: a keeper runs and has opened it."""
        return self._state is _State.OPEN

    def wait_open(self, timeout_s: float) -> Recovered:
        """Wait for the first `Recovered`; it is returned here and not by `poll`.

        Raises what the keeper's open raised, as the same class (`ConfigError`, `StoreError`),
        `KeeperError` if it died, `DeadlineError` after `timeout_s`. After an error it is closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._pump()
            for event in self._events:
                if isinstance(event, Recovered):
                    self._events.remove(event)
                    return event
            if self._error is not None or self._state in (_State.DOWN, _State.CLOSED):
                error = self._error or KeeperError("keeper: closed before its tier was open")
                self.close(deadline_s=0)
                raise error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.close(deadline_s=0)
                raise DeadlineError(
                    f"keeper: tier {self._config.url!r} was not open after {timeout_s:g} s"
                )
            self._idle(min(left_s, _TICK_S))

    def wait(self, timeout_s: float) -> None:
        """Return when `poll` may have something to give, or after `timeout_s`.

        For callers without a loop that have nothing else to do.
        """
        if not self._events:
            self._idle(timeout_s)

    def _idle(self, timeout_s: float) -> None:
        if self._state is _State.DYING:
            self._process.wait_reaped(min(timeout_s, _REAP_TICK_S))
        elif self._state in (_State.STARTING, _State.OPEN):
            self._process.wait_readable(timeout_s)
        elif self._state is _State.WAITING:
            time.sleep(max(0.0, min(timeout_s, self._restart_at - time.monotonic())))

    def close(self, *, deadline_s: float = 10.0) -> bool:
        """Let moves in flight end within `deadline_s`, have the tier closed, end the process.

        Waits for `deadline_s` and a few seconds at most; a keeper that is not gone by then is
        killed. Returns whether it closed by itself. Last events remain for `poll`.
        """
        if self._state is _State.CLOSED:
            return self._clean
        self._unwatch()
        self._wake = None
        if self._state is _State.OPEN:
            self._process.send(("close", deadline_s))
            last = time.monotonic() + deadline_s + 3 * CLOSE_GRACE_S
            while not self._process.ended and time.monotonic() < last:
                self._receive()
                self._process.wait_readable(_TICK_S)
        was_open, self._state = self._state is _State.OPEN, _State.CLOSED
        self._process.close()
        if not self._process.wait_reaped(CLOSE_GRACE_S if self._process.ended else 0):
            self._process.kill()
            self._process.wait_reaped(REAP_GRACE_S)
        self._clean = self._clean and was_open
        self._end_moves(released=self._process.reaped())
        if was_open and not self._clean:
            _log.warning("keeper %d: did not close by itself; ended", self.pid)
        return self._clean

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # The pump: everything that happens without being asked happens here. ----------------------

    def _start(self) -> None:
        self._process = KeeperProcess(self._arena.fd)
        self._state = _State.STARTING
        self._said_hello = False
        self._spoke_at = time.monotonic()
        self._ping_sent_at: float | None = None
        self._process.send(
            (
                "open",
                msgspec.to_builtins(self._config, builtin_types=(bytes,)),
                self._epoch,
                self._rotating,
                1 + self._lives * _RETIRE_IDS_PER_LIFE,
                logging.getLogger("tierkv").getEffectiveLevel(),
            )
        )
        self._lives += 1

    def _pump(self) -> None:
        if self._state in (_State.STARTING, _State.OPEN):
            self._receive()
            if self._process.ended:
                self._die("ended", kill=False)
            else:
                self._check_pulse()
        if self._state is _State.DYING:
            self._bury()
        if self._state is _State.WAITING and time.monotonic() >= self._restart_at:
            self._restart()

    def _receive(self) -> None:
        messages = self._process.receive()
        if messages:
            self._spoke_at = time.monotonic()
        for message in messages:
            self._take(message)

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["event", packed]:
                self._take_event(unpack_event(packed))
            case ["pong", _]:
                self._ping_sent_at = None
            case ["stats", stats]:
                self._stats = stats
            case ["log", name, level, text]:
                logging.getLogger(name).log(level, "keeper %d: %s", self.pid, text)
            case ["hello"]:
                self._said_hello = True
            case ["error", name, text]:
                kind = getattr(errors, name, KeeperError)
                self._error = kind(text) if issubclass(kind, TierKVError) else KeeperError(text)
            case ["closed", clean]:
                self._clean = clean

    def _take_event(self, event: Event) -> None:
        match event:
            case MoveDone(move_id, outcomes, released):
                self._moves.pop(move_id, None)
                if not released:
                    self._unreleased.add(move_id)
                if (outcomes == Outcome.DONE).any():
                    self._failures = 0
            case MoveReleased(move_id):
                self._unreleased.discard(move_id)
            case Recovered(_, epoch):
                if self._state is _State.STARTING:
                    self._state = _State.OPEN
                    self._opened_at = time.monotonic()
                self._was_open = True
                self._served_epoch = epoch
        self._events.append(event)

    @property
    def _rotating(self) -> bool:
        """Whether the store may still hold what a rotation made void."""
        return self._served_epoch != self._epoch

    @property
    def _owing(self) -> bool:
        """Whether the keeper owes an answer."""
        return (
            bool(self._moves)
            or self._state is _State.STARTING
            or self._rotating
            or self._ping_sent_at is not None
        )

    def _check_pulse(self) -> None:
        """Ping a keeper that owes something and is silent; end it when it does not answer."""
        if not self._owing:
            return
        now = time.monotonic()
        limit_s = self._config.hang_timeout_s
        if not self._said_hello:
            if now - self._spoke_at > START_TIMEOUT_S:
                self._hang(f"did not start within {START_TIMEOUT_S:g} s")
        elif self._ping_sent_at is not None:
            if now - self._ping_sent_at > limit_s:
                self._hang(f"did not answer for {limit_s:g} s")
        elif now - self._spoke_at > limit_s / 5:
            self._ping_sent_at = now
            self._process.send(("ping", 0))
            if any(now > at + self._bound_s(move.kind) for move, at in self._moves.values()):
                self._hang("overran every deadline of a move")
            elif self._rotating and now > self._rotated_at + self._bound_s(MoveKind.SAVE):
                # A hung call keeps it from forgetting; the next keeper forgets first of all.
                self._hang("did not finish a rotation")

    def _bound_s(self, kind: MoveKind) -> float:
        """When a mover that works has answered: its turn and its deadline, and some air."""
        config = self._config
        loading = kind is MoveKind.LOAD
        timeout_s = config.read_timeout_s if loading else config.write_timeout_s
        return 2 * timeout_s + config.hang_timeout_s

    def _hang(self, reason: str) -> None:
        self._hangs += 1
        self._die(reason, kill=True)

    def _die(self, reason: str, *, kill: bool) -> None:
        self._deaths += 1
        if self._state is _State.OPEN and time.monotonic() - self._opened_at > RECOVERED_S:
            self._failures = 0
        self._failures += 1
        self._unwatch()  # at the end of its stream a socket is readable for ever
        self._reason = reason
        self._mourned = False
        self._state = _State.DYING
        self._died_at = time.monotonic()
        if kill:
            self._process.kill()

    def _bury(self) -> None:
        """End what was in flight, release it once the process is reaped, and start anew."""
        reaped = self._process.reaped()
        dead_s = time.monotonic() - self._died_at
        if not reaped and dead_s > EXIT_GRACE_S:
            self._process.kill()
        if not self._mourned and (reaped or dead_s > REAP_GRACE_S):
            self._mourned = True
            how = f"keeper {self.pid} {self._reason}"
            if self._process.returncode is not None:
                how += f" (exit status {self._process.returncode})"
            if self._error is not None:
                how += f": {self._error}"
            _log.warning("%s; %d moves in flight fail", how, len(self._moves))
            self._end_moves(released=reaped)
            self._events.append(TierDown(how))
            if not self._was_open and self._error is None:
                self._error = KeeperError(how)
        if reaped:
            self._release()
            self._process.close()
            self._plan_restart()

    def _end_moves(self, *, released: bool) -> None:
        for move, _ in self._moves.values():
            self._give_up(move, released=released, end=End.NORMAL)
        if not released:
            self._unreleased.update(self._moves)
        self._moves.clear()
        if released:
            self._release()

    def _release(self) -> None:
        self._events += [MoveReleased(move_id) for move_id in sorted(self._unreleased)]
        self._unreleased.clear()

    def _give_up(self, move: Move, *, released: bool, end: End) -> None:
        outcomes = np.full(len(move), refusal(move.kind, end), np.uint8)
        if move.kind is MoveKind.LOAD:
            outcomes[~move.from_tier] = Outcome.DONE
        self._events.append(MoveDone(move.id, outcomes, released))

    def _plan_restart(self) -> None:
        if not self._was_open or self._failures > MAX_RESTARTS:
            self._state = _State.DOWN
            if self._was_open:
                _log.error("keeper: died %d times in a row; the tier stays down", self._failures)
            return
        wait_s = 0.0 if self._failures == 1 else RESTART_WAIT_S * 2 ** (self._failures - 2)
        self._restart_at = time.monotonic() + wait_s
        self._state = _State.WAITING

    def _restart(self) -> None:
        self._error = None
        try:
            self._start()
        except KeeperError as exc:
            self._failures += 1
            _log.warning("%s", exc)
            self._plan_restart()
            return
        self._watch()

    # On an event loop. ------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._loop is not None and self._state in (_State.STARTING, _State.OPEN):
            self._loop.add_reader(self._process.socket, self._tick)
            self._arm()

    def _unwatch(self) -> None:
        if self._loop is None:
            return
        if self._process.socket.fileno() >= 0:
            self._loop.remove_reader(self._process.socket)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """Look again soon, even if the keeper stays silent, while there is reason to."""
        if self._loop is None or self._timer is not None:
            return
        if self._state is _State.DYING:
            self._timer = self._loop.call_later(_REAP_TICK_S, self._on_timer)
        elif self._state is _State.WAITING or (
            self._state in (_State.STARTING, _State.OPEN) and self._owing
        ):
            self._timer = self._loop.call_later(_TICK_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._tick()

    def _tick(self) -> None:
        self._pump()
        self._arm()
        if self._events and self._wake is not None:
            self._wake()

    def _wake_soon(self) -> None:
        if self._loop is not None and self._wake is not None and self._events:
            self._loop.call_soon(self._wake)
