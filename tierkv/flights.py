"""Moves in flight: who still has to answer, and what the answers make of residency.

A flight ends in two steps. When every rank has answered, residency follows the worst of the
answers. When nothing touches the slots any more, leases end and slots with undefined contents
come back. Between the two such slots belong to nobody: that is the quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import Move, MoveKind, Outcome
from tierkv.books import Books
from tierkv.index import NO_SLOT, Pinned, Rows, Tier

# Python 3.11 takes 2 us to find a member of an enum.
_ABSENT, _FILLING, _PINNED = int(Pinned.ABSENT), int(Pinned.FILLING), int(Pinned.RESIDENT)
_WRITING, _STORED = int(Tier.WRITING), int(Tier.RESIDENT)
_SAVE, _LOAD = MoveKind.SAVE, MoveKind.LOAD
_DONE, _MISSING, _CORRUPT = int(Outcome.DONE), int(Outcome.MISSING), int(Outcome.CORRUPT)

_COUNTED = (Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED, Outcome.TIMED_OUT)


@dataclass(slots=True, eq=False)
class _Flight:
    move: Move
    rows: Rows
    slot_bytes: int
    copies_due: set[int]
    answers_due: set[int]
    bad: NDArray[np.bool_]
    gone: NDArray[np.bool_]
    unreleased: set[int] = field(default_factory=set)
    quarantined: list[tuple[int, int]] = field(default_factory=list)
    since: float = 0.0

    @property
    def open(self) -> bool:
        return bool(self.copies_due or self.answers_due)

    @property
    def waits_for(self) -> str:
        """In words, with the ranks."""
        if self.copies_due:
            return f"the device's copies on ranks {sorted(self.copies_due)}"
        if self.answers_due:
            return f"the tier on ranks {sorted(self.answers_due)}"
        return f"a call that overran its deadline on ranks {sorted(self.unreleased)}"


class Flights:
    """Every save and load that some rank has not finished with.

    save_bytes, load_bytes: bytes of the arena that saves hold, and that promised or running loads
    are filling. has_tier: without one no save ends in it, which is not a failure.
    """

    def __init__(self, books: Books, *, has_tier: bool = True) -> None:
        self._books = books
        self._has_tier = has_tier
        self._by_id: dict[int, _Flight] = {}
        self.save_bytes = 0
        self.load_bytes = 0

    def __len__(self) -> int:
        """Moves that some rank has not answered yet; quarantined slots do not count."""
        return sum(f.open for f in self._by_id.values())

    def all(self) -> list[_Flight]:
        """Each that holds slots still, quarantined ones too."""
        return list(self._by_id.values())

    def saves(self) -> set[int]:
        """Ids of saves that are not stored yet."""
        return {i for i, f in self._by_id.items() if f.open and f.move.kind is MoveKind.SAVE}

    def unreleased_saves(self) -> Rows:
        """Rows of saves that were answered though the tier may still be reading their slots."""
        hung = [f for f in self._by_id.values() if f.move.kind is MoveKind.SAVE and not f.open]
        return np.concatenate([np.empty(0, np.int64), *(f.rows for f in hung)])

    def start(self, move: Move, rows: Rows, *, copies: bool) -> None:
        """Every rank owes an answer, and with `copies` word of the device copy first.

        The rows' leases are the caller's gift: this flight ends them.
        """
        everyone = set(range(self._books.ranks))
        blank = np.zeros(len(rows), np.bool_)
        nbytes = self._books.room.slot_bytes(rows)
        if move.kind is _SAVE:
            self.save_bytes += nbytes
        self._by_id[move.id] = _Flight(
            move, rows, nbytes, set(everyone) if copies else set(), everyone, blank, blank.copy()
        )
        self._by_id[move.id].since = self._books.clock()

    def copied(self, rank: int, move_id: int) -> None:
        """A rank's device copy is in place; with the last one the blocks are pinned."""
        flight = self._by_id.get(move_id)
        if flight is None or rank not in flight.copies_due:
            return
        flight.copies_due.discard(rank)
        index = self._books.index
        if not flight.copies_due:
            there = flight.rows[index.pinned[flight.rows] == _FILLING]
            index.pinned[there] = _PINNED
            if index.news is not None:
                index.tell(there[index.known(there)], in_tier=False)

    def done(
        self,
        rank: int,
        move_id: int,
        outcomes: NDArray[np.uint8],
        *,
        released: bool,
        tier_is_up: bool,
    ) -> None:
        """A rank's answer; the last one settles residency."""
        flight = self._by_id.get(move_id)
        if flight is None or rank not in flight.answers_due:
            return
        flight.answers_due.discard(rank)
        if not released:
            flight.unreleased.add(rank)
        bad = outcomes != _DONE
        if bad.any():
            flight.bad |= bad
            flight.gone |= (outcomes == _MISSING) | (outcomes == _CORRUPT)
            if flight.move.kind is _LOAD:
                for outcome in _COUNTED:
                    name = f"load_{outcome.name.lower()}_blocks"
                    self._books.counters[name] += int((outcomes == outcome).sum())
        if not flight.answers_due:
            if flight.move.kind is _SAVE:
                self._settle_save(flight, tier_is_up=tier_is_up)
            else:
                self._settle_load(flight)
            self._land(flight)

    def released(self, rank: int, move_id: int) -> None:
        """A rank no longer touches the slots of a move that it had answered too early for that."""
        flight = self._by_id.get(move_id)
        if flight is not None:
            flight.unreleased.discard(rank)
            self._land(flight)

    def spoil(self, rows: Rows) -> None:
        """A rank gives these blocks up again while other ranks are still writing them."""
        for flight in self._by_id.values():
            if flight.move.kind is MoveKind.SAVE and flight.answers_due:
                flight.bad |= np.isin(flight.rows, rows)

    def _settle_save(self, flight: _Flight, *, tier_is_up: bool) -> None:
        books, index, rows = self._books, self._books.index, flight.rows
        if flight.copies_due:
            # A rank ended the move without a copy: nothing in these slots may be promised. No tier
            # was asked to write them, so that is no failure of one.
            flight.copies_due.clear()
            empty = index.pinned[rows] == _FILLING
            refused = rows[empty & flight.bad]
            books.counters["declined_blocks"] += len(refused)
            index.tier[refused[index.tier[refused] == _WRITING]] = Tier.ABSENT
            self._quarantine(flight, rows[empty])
        stored = index.tier[rows] == _WRITING
        if flight.bad.any():
            failed = rows[stored & flight.bad]
            stored &= ~flight.bad
            index.tier[failed] = Tier.ABSENT
            if self._has_tier:
                books.counters["failed_save_blocks"] += len(failed)
        if not stored.all():
            rows = rows[stored]
        if not len(rows):
            return
        index.tier[rows] = _STORED if tier_is_up else Tier.SUSPENDED
        if tier_is_up:
            index.tell(rows, in_tier=True)
        books.count("stored", rows, tokens=True)

    def _settle_load(self, flight: _Flight) -> None:
        books, index, rows = self._books, self._books.index, flight.rows
        incoming = flight.move.from_tier
        here = rows[incoming & ~flight.bad]
        index.pinned[here] = _PINNED
        index.tell(here[index.known(here)], in_tier=False)
        index.read[rows[~flight.bad]] = 1
        index.tier_leases[rows[incoming]] -= 1
        self.load_bytes -= books.room.slot_bytes(rows[incoming])
        self._lose(rows[incoming & flight.gone])
        self._quarantine(flight, rows[incoming & flight.bad])
        books.count("loaded", rows[incoming & ~flight.bad])

    def _lose(self, rows: Rows) -> None:
        """Some rank has lost these blocks: nobody may be promised them from the tier.

        Rows that were rotated away are left alone: their keys may name newer blocks by now.
        """
        books = self._books
        rows = rows[books.index.known(rows)]
        books.index.tier[rows] = Tier.ABSENT
        books.index.tell(rows, in_tier=True, gone=True)
        books.counters["lost_blocks"] += len(rows)
        if books.ranks > 1:
            books.order_delete(books.index.keys_of(rows))

    def _quarantine(self, flight: _Flight, rows: Rows) -> None:
        """Take slots with undefined contents away from their rows until nobody writes them."""
        index = self._books.index
        for row in rows.tolist():
            nbytes = self._books.layout.groups[int(index.group[row])].block_bytes
            flight.quarantined.append((int(index.offset[row]), nbytes))
            index.offset[row] = NO_SLOT
            index.pinned[row] = _ABSENT

    def _land(self, flight: _Flight) -> None:
        """Nothing touches the slots any more: leases end and quarantined slots come back."""
        if flight.open or flight.unreleased:
            return
        books = self._books
        del self._by_id[flight.move.id]
        for offset, nbytes in flight.quarantined:
            books.room.slots.free(offset, nbytes)
        books.index.leases[flight.rows] -= 1
        if flight.move.kind is MoveKind.SAVE:
            self.save_bytes -= flight.slot_bytes
        books.freed(flight.rows)
