"""What the ledger remembers of one request (or of one caller of the async API)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tierkv.index import Rows
from tierkv.planner import HitPlan, SaveProgress


@dataclass(slots=True)
class Promise:
    """A hit that is leased to an owner until `expires`, on the ledger's clock."""

    plan: HitPlan
    local_tokens: int
    expires: float


@dataclass(slots=True)
class Owner:
    """One request: what it was promised, and how far its saves have come."""

    promise: Promise | None = None
    pending_since: float | None = None
    since: int = 0
    """The tick of the ledger's clock when it first looked up; 0: it has not."""
    progress: SaveProgress = field(default_factory=SaveProgress)
    declined_at: int = -1
    quiet_until: int = 0
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """Of the blocks that its saves have made or met. A row may have passed to another block since:
    that one then counts as used, no more."""
