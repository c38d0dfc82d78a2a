"""What the ranks' storage tiers hold, taken together: recovery, retirement, loss of a tier.

A block is promised from the tier only while every rank holds it. A rank's holdings are learned
when its tier opens (`Recovered`), shrink when it asks to give blocks up (`Retire`), and are
suspended while it is down (`TierDown`).
"""

from __future__ import annotations

import logging

import numpy as np

from tierkv import policy
from tierkv.blocks import NO_KEYS, Keys
from tierkv.books import Agree, Appraised, Books
from tierkv.index import Rows, Tier, distinct

log = logging.getLogger("tierkv")


class Holdings:
    """The tier half of the ledger's state."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._up: set[int] = set()
        self._recovered: dict[int, Keys] = {}
        self._retiring: dict[tuple[int, int], Rows] = {}

    @property
    def up(self) -> bool:
        """Whether every rank's tier is open and serving."""
        return len(self._up) == self._books.ranks

    def retire(self, rank: int, retire_id: int, keys: Keys) -> Rows:
        """A rank wants to give blocks up: stop promising them now, agree when no load reads one.

        Returns the rows that some rank is still writing: they must not become resident.
        """
        books, index = self._books, self._books.index
        rows = index.find_all(keys)
        rows = rows[rows >= 0]
        # Suspended ones as well: this rank would be thought to hold them still.
        resident = rows[np.isin(index.tier[rows], (Tier.RESIDENT, Tier.SUSPENDED))]
        index.tier[resident] = Tier.ABSENT
        books.remember(resident)
        index.tell(resident, in_tier=True, gone=True)
        books.count("evicted_tier", resident, tokens=True)
        for other in range(books.ranks):
            if other != rank:
                books.order_delete(index.keys_of(resident), other)
        self._retiring[rank, retire_id] = rows
        writing: Rows = rows[index.tier[rows] == Tier.WRITING]
        self.answer_retirements()
        books.freed(resident)
        return writing

    def appraise(self, rank: int, question_id: int, keys: Keys) -> None:
        """A rank asks what is worth writing again; blocks that not every rank holds are not."""
        index = self._books.index
        rows = index.find_all(keys)
        worth = np.zeros(len(keys), np.bool_)
        held = np.flatnonzero((rows >= 0) & (index.tier[rows] == Tier.RESIDENT))
        worth[held] = policy.worth_keeping(index, rows[held])
        self._books.commands.append(Appraised(rank, question_id, worth))

    def answer_retirements(self) -> None:
        """Agree to every retirement whose blocks no load is reading any more."""
        for (rank, retire_id), rows in list(self._retiring.items()):
            if not (self._books.index.tier_leases[rows] > 0).any():
                del self._retiring[rank, retire_id]
                self._books.commands.append(Agree(rank, retire_id))

    def down(self, rank: int, reason: str) -> None:
        """A rank's tier is gone for now."""
        # Not a warning: whoever lost the tier has logged one already, and knows more.
        log.info("tier of rank %d is down (%s): hits from it are off", rank, reason)
        books, index = self._books, self._books.index
        self._up.discard(rank)
        self._recovered.pop(rank, None)
        # Rows stay, so that most of what comes back is known: this is an engine's scheduler.
        resident = np.flatnonzero(index.tier == Tier.RESIDENT)
        index.tier[resident] = Tier.SUSPENDED
        index.tell(resident, in_tier=True, gone=True)
        self._retiring = {k: v for k, v in self._retiring.items() if k[0] != rank}
        books.capacity_version += 1
        books.counters["tier_down"] += 1

    def recover(self, rank: int, keys: Keys, epoch: int) -> bool:
        """A rank's tier is open and holds `keys`. True once every rank's is."""
        books, index = self._books, self._books.index
        self._up.add(rank)
        self._recovered[rank] = keys if epoch == books.epoch else NO_KEYS
        if not self.up:
            return False
        suspended = np.flatnonzero(index.tier == Tier.SUSPENDED)
        held = self._held_rows(suspended)
        holders = np.bincount(np.concatenate(held), minlength=len(index.tier))
        common = np.flatnonzero(holders == books.ranks)
        index.tier[suspended] = Tier.ABSENT
        back = common[index.tier[common] != Tier.WRITING]
        index.tier[back] = Tier.RESIDENT
        index.tell(back, in_tier=True)
        for other, rows in enumerate(held):
            rows = rows[holders[rows] < books.ranks]
            books.order_delete(index.keys_of(rows), other)
            books.freed(rows)
        books.freed(suspended)
        books.counters["recovered_blocks"] += len(common)
        return True

    def rotate(self) -> None:
        """Whatever was retiring or recovered is void; nobody waits for an answer any more."""
        self._books.commands.extend(Agree(rank, i) for rank, i in self._retiring)
        self._retiring.clear()
        self._recovered.clear()

    def _held_rows(self, suspended: Rows) -> list[Rows]:
        """For each rank what it holds; a rank that stayed up holds what was suspended."""
        held = []
        for rank in range(self._books.ranks):
            keys = self._recovered.pop(rank, None)
            rows = suspended if keys is None else self._books.index.add_all(keys)
            held.append(distinct(rows))
        return held
