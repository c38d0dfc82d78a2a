"""How many examples the law is tried on: few in every run, many at night."""

from __future__ import annotations

import os

_SCALE = int(os.environ.get("TIERKV_LAW_SCALE", "1"))


def examples(count: int) -> int:
    """`count`, or as many times more as the environment asks for (`make nightly`)."""
    return count * _SCALE
