"""Who holds slots of the arena, how many, since when and what for: for people who wait.

Nothing here decides: it reads what a ledger knows. A hit that was promised holds its blocks until
its load begins; a save or a load until every rank has ended it; a quarantined one until nothing
touches its slots any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from tierkv.ledger import Ledger

log = logging.getLogger("tierkv")

LONG_S: Final = 45.0
"""A lease as old as this is worth a line in the log: more than a save may take in the tier with its
turn (`write_timeout_s`, 30 s), more than a promise is good for."""

LOOK_S: Final = 1.0
"""Leases are looked through no more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One holder. owner: the request, or the move by its id. age_s: since it took them.

    kind: promise, save, load, or quarantine. blocks: how many it holds. nbytes: of the arena; 0
    for blocks that are there already and are only kept from eviction. waits_for: in words.
    """

    owner: str
    kind: str
    blocks: int
    nbytes: int
    age_s: float
    waits_for: str


def leases(ledger: Ledger) -> list[Lease]:
    """Every lease, the oldest first."""
    now, books = ledger._books.clock(), ledger._books
    found = []
    for owner, request in ledger._requests.items():
        if request.promise is not None:
            plan = request.promise.plan
            age_s = ledger._promise_s - (request.promise.expires - now)
            nbytes = books.room.slot_bytes(plan.rows[plan.from_tier])
            found.append(
                Lease(
                    owner=owner,
                    kind="promise",
                    blocks=len(plan.rows),
                    nbytes=nbytes,
                    age_s=age_s,
                    waits_for="its load to begin",
                )
            )
    for flight in ledger._flights.all():
        move = flight.move
        found.append(
            Lease(
                owner=f"move {move.id}",
                kind=move.kind.name.lower() if flight.open else "quarantine",
                blocks=len(move),
                nbytes=books.room.slot_bytes(flight.rows),
                age_s=now - flight.since,
                waits_for=flight.waits_for,
            )
        )
    return sorted(found, key=lambda lease: -lease.age_s)


def debug(ledger: Ledger) -> dict[str, Any]:
    """`leases`, JSON-able, and the arena that they are of."""
    slots = ledger._books.room.slots
    return {
        "pinned_capacity_bytes": slots.capacity_bytes,
        "pinned_free_bytes": slots.free_bytes,
        "leases": [asdict(lease) for lease in leases(ledger)],
    }


class Watch:
    """Writes one log line for each lease that is held for `LONG_S`, and one when it ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = clock() + LOOK_S
        self._told: set[str] = set()

    def look(self, ledger: Ledger) -> None:
        """Cheap, so call it whenever something happens."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        held = {lease.owner: lease for lease in leases(ledger) if lease.age_s >= LONG_S}
        for owner, lease in held.items():
            if owner not in self._told:
                log.warning(
                    "tierkv: pinned: %s holds %d blocks (%s, %d bytes of RAM) for %.0f s; it waits "
                    "for %s",
                    owner,
                    lease.blocks,
                    lease.kind,
                    lease.nbytes,
                    lease.age_s,
                    lease.waits_for,
                )
        for owner in self._told - held.keys():
            log.warning("tierkv: pinned: %s has let go of its blocks", owner)
        self._told = set(held)
