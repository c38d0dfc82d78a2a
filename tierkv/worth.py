"""Whether a hit is worth loading, or computing it again is the quicker way. Pure.

Both ways are measured while they are used: seconds of a step over the tokens that it prefills, and
seconds of a load over the tokens that it brings. Each is a straight line (a fixed cost and a cost
a token) by weighted least squares, in which a sample of n observations ago counts `DECAY` ** n.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

DECAY: Final = 0.95
"""A change of the machine is believed after some twenty observations."""

ENOUGH: Final = 8
"""Observations of each way below which every hit is taken: how else would loads be measured?"""

PROBE_EVERY: Final = 16
"""Of hits that look too slow, one in so many is taken all the same, so that a tier that has become
fast again is found out."""


class Worth(enum.StrEnum):
    """What to do with a hit, and why."""

    LOAD = "load"
    TOO_SHORT = "too short"
    TOO_SLOW = "too slow"


@dataclass(slots=True)
class Line:
    """Seconds over an amount of work, as far as it was seen."""

    count: int = 0
    _w: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One observation."""
        self.count += 1
        self._w = self._w * DECAY + 1
        self._x = self._x * DECAY + amount
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + amount * amount
        self._xy = self._xy * DECAY + amount * seconds

    def at(self, amount: float) -> float:
        """Seconds that so much would take. 0 where nothing was seen.

        Neither part of the line is negative: where the best one would be, the best one through
        the origin stands in, or the mean.
        """
        if not self.count:
            return 0.0
        spread = self._w * self._xx - self._x * self._x
        # All of about one size: they tell no slope (and the difference is noise of floats).
        if spread <= 1e-6 * self._w * self._xx:
            return self._y / self._x * amount if self._x else self._y / self._w
        slope = (self._w * self._xy - self._x * self._y) / spread
        fixed = (self._y - slope * self._x) / self._w
        if slope < 0:
            return self._y / self._w
        if fixed < 0:
            return self._xy / self._xx * amount
        return fixed + slope * amount


@dataclass(slots=True)
class Judge:
    """Decides for one engine or cache.

    min_hit_tokens: shorter hits are never taken.
    """

    min_hit_tokens: int = 0
    prefill: Line = field(default_factory=Line)
    """Seconds over tokens computed."""
    loads: dict[str, Line] = field(default_factory=dict)
    """Tier → seconds over tokens loaded, from the order to the end, queueing included."""
    _refused: int = 0

    def loaded(self, tier: str, tokens: int, seconds: float) -> None:
        """A load from this tier has ended well."""
        self.loads.setdefault(tier, Line()).add(tokens, seconds)

    def decide(self, tokens: int, parts: dict[str, int], *, always: bool = False) -> Worth:
        """Whether to load a hit.

        tokens: what need not be computed. parts: tier → tokens of it that come from there; their
            loads go on side by side, so the slowest counts. always: measurements do not matter.
        """
        if tokens < self.min_hit_tokens:
            return Worth.TOO_SHORT
        lines = [(self.loads.get(tier), n) for tier, n in parts.items() if n]
        known = [(line, n) for line, n in lines if line is not None and line.count >= ENOUGH]
        if always or self.prefill.count < ENOUGH or len(known) < len(lines):
            return Worth.LOAD
        if max((line.at(n) for line, n in known), default=0.0) <= self.prefill.at(tokens):
            return Worth.LOAD
        self._refused += 1
        return Worth.LOAD if self._refused % PROBE_EVERY == 0 else Worth.TOO_SLOW
