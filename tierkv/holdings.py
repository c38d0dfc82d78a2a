"""What the ranks' storage tiers hold, taken together: recovery, retirement, loss of a tier.

A block is promised from the tier only while every rank holds it. A rank's holdings are learned
when its tier opens (`Recovered`), shrink when it asks to give blocks up (`Retire`), and are
suspended while it is down (`TierDown`).
"""

from __future__ import annotations

import logging

import numpy as np

from tierkv.blocks import NO_KEYS, Keys
from tierkv.books import Agree, Books
from tierkv.index import Rows, Tier

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
        resident = rows[index.tier[rows] == Tier.RESIDENT]
        index.tier[resident] = Tier.ABSENT
        books.count("evicted_tier", resident)
        books.count_tokens("evicted_tier", resident)
        for other in range(books.ranks):
            if other != rank:
                books.order_delete(index.keys_of(resident), other)
        self._retiring[rank, retire_id] = rows
        writing: Rows = rows[index.tier[rows] == Tier.WRITING]
        self.answer_retirements()
        books.freed(resident)
        return writing

    def answer_retirements(self) -> None:
        """Agree to every retirement whose blocks no load is reading any more."""
        for (rank, retire_id), rows in list(self._retiring.items()):
            if not (self._books.index.tier_leases[rows] > 0).any():
                del self._retiring[rank, retire_id]
                self._books.commands.append(Agree(rank, retire_id))

    def down(self, rank: int, reason: str) -> None:
        """A rank's tier is gone for now."""
        log.warning("tier of rank %d is down (%s): hits from it are off", rank, reason)
        books, index = self._books, self._books.index
        self._up.discard(rank)
        self._recovered.pop(rank, None)
        resident = np.flatnonzero(index.tier == Tier.RESIDENT)
        index.tier[resident] = Tier.SUSPENDED if books.ranks > 1 else Tier.ABSENT
        self._retiring = {k: v for k, v in self._retiring.items() if k[0] != rank}
        books.freed(resident)
        books.counters["tier_down"] += 1

    def recover(self, rank: int, keys: Keys, epoch: int) -> bool:
        """A rank's tier is open and holds `keys`. True once every rank's is."""
        books, index = self._books, self._books.index
        self._up.add(rank)
        self._recovered[rank] = keys if epoch == books.epoch else NO_KEYS
        if not self.up:
            return False
        common = self._common()
        self._recovered.clear()
        rows = index.add_all(common)
        index.tier[rows[index.tier[rows] != Tier.WRITING]] = Tier.RESIDENT
        left = np.flatnonzero(index.tier == Tier.SUSPENDED)
        index.tier[left] = Tier.ABSENT
        books.freed(left)
        books.counters["recovered_blocks"] += len(common)
        return True

    def rotate(self) -> None:
        """Whatever was retiring or recovered is void; nobody waits for an answer any more."""
        self._books.commands.extend(Agree(rank, i) for rank, i in self._retiring)
        self._retiring.clear()
        self._recovered.clear()

    def _common(self) -> Keys:
        """What every rank holds. A rank that stayed up holds what was suspended."""
        books = self._books
        if books.ranks == 1:
            return self._recovered[0]
        suspended = books.index.keys_of(np.flatnonzero(books.index.tier == Tier.SUSPENDED))
        held = {r: set(self._recovered.get(r, suspended)) for r in range(books.ranks)}
        common = set.intersection(*held.values())
        for rank, keys in held.items():
            books.order_delete(Keys.of(keys - common), rank)
        return Keys.of(common)
