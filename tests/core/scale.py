"""How many examples the law is tried on: few in every run, many at night."""

from __future__ import annotations

import os

_SCALE = float(os.environ.get("TIERKV_LAW_SCALE", "0.4"))


def examples(count: int) -> int:
    """Two fifths of `count`, or as many times `count` as the environment says (`make nightly`).

    Few are enough to see red: `test_reach_mutations.py` sees it for every mutation on fixed
    layouts, and no two runs draw the same examples.
    """
    return max(1, round(count * _SCALE))
