"""Whether a tier may be used: healthy, or degraded and probed with one move at a time.

Pure: time comes in through `clock`, so tests need no sleeping.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

TOLERANCE: Final = 3
"""Moves in a row that timed out or had nothing but FAILED blocks, and so degrade a tier."""

FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0


class Entry(enum.Enum):
    """What a move that wants to use the tier is told."""

    OPEN = "open"
    PROBE = "probe"
    CLOSED = "closed"


class TierHealth:
    """Counts failures in a row; after `tolerance` of them only a probe passes, after a back-off.

    The back-off doubles with every failed probe up to `MAX_BACKOFF_S`.
    """

    def __init__(self, clock: Callable[[], float], *, tolerance: int = TOLERANCE) -> None:
        self._clock = clock
        self._tolerance = tolerance
        self._in_a_row = 0
        self._backoff_s = 0.0
        self._retry_at = 0.0
        self._probing = False
        self.degradations = 0

    @property
    def degraded(self) -> bool:
        """Whether moves are turned away."""
        return self._backoff_s > 0.0

    def enter(self) -> Entry:
        """Ask to use the tier. A `PROBE` must end with `succeeded`, `failed` or `unknown`."""
        if not self.degraded:
            return Entry.OPEN
        if self._probing or self._clock() < self._retry_at:
            return Entry.CLOSED
        self._probing = True
        return Entry.PROBE

    def succeeded(self) -> bool:
        """The tier answered. True if that ended a degradation."""
        was = self.degraded
        self._in_a_row = 0
        self._backoff_s = 0.0
        self._probing = False
        return was

    def failed(self, *, probe: bool) -> bool:
        """The tier did not answer, or not sensibly. True if that began a degradation.

        probe: whether it was the probe. Moves that began before the degradation fail late; only
            the probe's own failure makes the wait longer.
        """
        self._in_a_row += 1
        if self.degraded:
            if probe:
                self._probing = False
                self._back_off(min(self._backoff_s * 2, MAX_BACKOFF_S))
            return False
        if self._in_a_row < self._tolerance:
            return False
        self.degradations += 1
        self._back_off(FIRST_BACKOFF_S)
        return True

    def unknown(self) -> None:
        """The probe ended without telling anything (cancelled before it began): probe again."""
        self._probing = False

    def _back_off(self, wait_s: float) -> None:
        self._backoff_s = wait_s
        self._retry_at = self._clock() + wait_s
