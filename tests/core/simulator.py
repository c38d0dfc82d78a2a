"""An engine in few words: prompts cut into steps, pages that come and go, ranks that answer.

It does with the ledger what an engine's scheduler does: looks a prompt up, loads the hit, computes
the rest step by step, and offers the pages it has right then. Pages behind a window are gone in
the next step, and a recurrent state exists only where a step ended (or everywhere, as told).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tests.core.oracle import Block, Oracle
from tierkv.blocks import Copied, Keys, Move, MoveDone, MoveKind, Outcome, Recovered, slot_bytes
from tierkv.hashing import chain
from tierkv.layout import Layout
from tierkv.ledger import Agree, Ledger, Rotate, Submit

Key = tuple[int, bytes]

Table = list[int | None]

Fault = Callable[[int, Key], Outcome]
"""What a rank answers for one key of a save."""


def no_fault(rank: int, key: Key) -> Outcome:
    return Outcome.DONE


class Simulator:
    """One engine of `ranks` ranks over one ledger whose arena takes `slots` blocks of any group.

    computed: every key whose block the engine had computed at some time. With draft groups: less
        those that no boundary of their request needs (its end came before the look-ahead's).
    stored: every key that all ranks have stored successfully.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        slots: int,
        ranks: int = 1,
        policy: str = "dense",
        has_tier: bool = True,
    ) -> None:
        self.layout = layout
        self.oracle = Oracle.of(layout)
        self.ranks = ranks
        largest = max(slot_bytes(n) for n in layout.block_bytes)
        self.ledger = Ledger(
            layout,
            arena_bytes=slots * largest,
            ranks=ranks,
            has_tier=has_tier,
            boundary_policy=policy,
            clock=lambda: 0.0,
        )
        self.tiers: list[set[Key]] = [set() for _ in range(ranks)]
        self.computed: set[Key] = set()
        self.stored: set[Key] = set()
        self.waiting: list[Move] = []
        self.saves = 0
        for rank in range(ranks):
            self.ledger.apply(rank, Recovered(Keys.of([])))

    # Ranks -------------------------------------------------------------------------------

    def answer(self, move: Move, fault: Fault = no_fault) -> None:
        """All ranks copy and answer this move."""
        keys = list(move.keys)
        good = np.ones(len(keys), bool)
        for rank, tier in enumerate(self.tiers):
            out = np.zeros(len(keys), np.uint8)
            for i, key in enumerate(keys):
                if move.kind is MoveKind.SAVE:
                    out[i] = fault(rank, key)
                    if out[i] == Outcome.DONE:
                        tier.add(key)
                elif move.from_tier[i] and key not in tier:
                    out[i] = Outcome.MISSING
            good &= out == Outcome.DONE
            if move.kind is MoveKind.SAVE:
                self.ledger.apply(rank, Copied(move.id))
            else:
                assert good.all(), "the ledger promised what a tier does not have"
            self.ledger.apply(rank, MoveDone(move.id, out))
        if move.kind is MoveKind.SAVE:
            self.stored |= {key for key, g in zip(keys, good.tolist(), strict=True) if g}
        self.obey(fault)

    def obey(self, fault: Fault = no_fault) -> None:
        for command in self.ledger.take_commands():
            match command:
                case Submit(rank, move) if move.kind is MoveKind.DELETE:
                    for r, tier in enumerate(self.tiers):
                        if rank in (None, r):
                            tier -= set(move.keys)
                case Submit(_, move):
                    self.answer(move, fault)
                case Agree() | Rotate():
                    raise AssertionError("nothing was retired or rotated")

    def answer_waiting(self, fault: Fault = no_fault) -> None:
        while self.waiting:
            self.answer(self.waiting.pop(0), fault)

    # The engine ----------------------------------------------------------------------------

    def key(self, hashes: Sequence[bytes], block: Block) -> Key:
        group, index = block
        tokens = self.layout.groups[group].block_tokens
        block_hash = hashes[(index + 1) * tokens // self.layout.hash_block_tokens - 1]
        return group, block_hash

    def tables(self, start: int, upto: int, states: set[int], pages: set[Block]) -> list[Table]:
        """What an engine has pages for while it computes [start, upto); block i lies in page i."""
        tables: list[Table] = []
        for g, group in enumerate(self.layout.groups):
            size = group.block_tokens
            table: Table = [None] * -(-upto // size)
            low = 0
            match str(group.kind):
                case "sliding_window":
                    low = start - (group.window_tokens - 1) - group.extra_tokens
                case "chunked_local":
                    low = start // group.chunk_tokens * group.chunk_tokens
                case "compressor":
                    low = start - (group.window_tokens - 1)
            for i in range(len(table)):
                end = (i + 1) * size
                if str(group.kind) == "recurrent":
                    there = end in states or end > upto
                else:
                    there = end > start or (end > low and (g, i) in pages)
                table[i] = i if there else None
            tables.append(table)
        return tables

    def run(
        self,
        owner: str,
        tokens: Sequence[int],
        cuts: Iterable[int],
        *,
        local: int = 0,
        every_state: bool = False,
        decoded: int = 0,
        fault: Fault = no_fault,
        answer_now: Callable[[], bool] = lambda: True,
        patient: bool = False,
    ) -> int:
        """Serve one request to its end; the hit it began with.

        cuts: where prefill steps end. decoded: so many of the last tokens come one by one.
        local: the engine's own prefix hit. patient: a step waits until all its blocks found room.
        """
        hashes = chain(list(tokens), self.layout.hash_block_tokens).hashes
        prompt = len(tokens) - decoded
        before = set(self.computed)
        start = max(local, self._load(owner, hashes, prompt, local))
        pages: set[Block] = set()
        if start:
            pages = {b for b in self.oracle.need(start) if self._end(b) <= start}
            self.computed |= {self.key(hashes, b) for b in pages}
        ends = sorted({c for c in cuts if start < c < prompt} | {prompt})
        ends += range(prompt + 1, len(tokens) + 1)
        at, states = start, {start}
        for end in [e for e in ends if e > at] or [at]:
            states |= set(range(at, end + 1)) if every_state else {end}
            tables = self.tables(at, end, states, pages)
            known = max(prompt, end)
            self._note(hashes, tables, end)
            self._offer(owner, hashes, tables, end, known, fault, answer_now, patient)
            pages = {(g, i) for g, t in enumerate(tables) for i, p in enumerate(t) if p is not None}
            at, states = end, {end}
        self.ledger.release(owner)
        self.obey(fault)
        if any(self.layout.lookahead_blocks):
            self.computed = before | self.useful(tokens)
        return start

    def _end(self, block: Block) -> int:
        return (block[1] + 1) * self.layout.groups[block[0]].block_tokens

    def _load(self, owner: str, hashes: Sequence[bytes], known: int, local: int) -> int:
        hit = self.ledger.lookup(owner, hashes, known_tokens=known, local_tokens=local)
        if hit.pending or hit.tokens <= local:
            return local
        move = self.ledger.begin_load(owner, [list(range(len(hashes)))] * len(self.layout.groups))
        self.answer(move)
        return hit.tokens

    def _note(self, hashes: Sequence[bytes], tables: list[Table], end: int) -> None:
        for g, table in enumerate(tables):
            if self.layout.groups[g].reusable:
                whole = [i for i, p in enumerate(table) if p is not None]
                self.computed |= {
                    self.key(hashes, (g, i)) for i in whole if self._end((g, i)) <= end
                }

    def _offer(
        self,
        owner: str,
        hashes: Sequence[bytes],
        tables: list[Table],
        end: int,
        known: int,
        fault: Fault,
        answer_now: Callable[[], bool],
        patient: bool,
    ) -> None:
        for _ in range(200):
            if not self.ledger.save_is_due(owner, end):
                return  # as an engine does; the law must hold all the same
            move = self.ledger.begin_save(
                owner, hashes, computed_tokens=end, known_tokens=known, block_ids=tables
            )
            if move is not None:
                self._check(hashes, tables, end, move)
                self.saves += 1
                if answer_now():
                    self.answer(move, fault)
                else:
                    self.waiting.append(move)
            if not patient or not self.ledger.declined_blocks(owner):
                return
            self.answer_waiting()
        raise AssertionError("a step never found room for its blocks")

    def _check(self, hashes: Sequence[bytes], tables: list[Table], end: int, move: Move) -> None:
        """A save takes blocks that are computed and have a page, each once."""
        assert len(set(move.keys)) == len(move)
        for key, block_id in zip(move.keys, move.block_ids.tolist(), strict=True):
            block = key[0], block_id  # block i lies in page i
            assert self.key(hashes, block) == key
            assert tables[key[0]][block_id] == block_id
            assert self._end(block) <= end

    # What should be found ------------------------------------------------------------------

    def hit(self, tokens: Sequence[int], *, local: int = 0) -> int:
        """The hit that the ledger gives a prompt now; nothing stays leased."""
        hashes = chain(list(tokens), self.layout.hash_block_tokens).hashes
        hit = self.ledger.lookup("probe", hashes, known_tokens=len(tokens), local_tokens=local)
        assert not hit.pending
        self.ledger.release("probe")
        self.obey()
        return hit.tokens

    def best(self, tokens: Sequence[int], keys: set[Key], *, local: int = 0) -> int:
        """The hit that the oracle gives the prompt if exactly `keys` were there."""
        hashes = chain(list(tokens), self.layout.hash_block_tokens).hashes
        everything = self.oracle.everything(len(tokens))
        present = {b for b in everything if self.key(hashes, b) in keys}
        return self.oracle.hit(len(tokens), present, local)

    def useful(self, tokens: Sequence[int]) -> set[Key]:
        """The keys of a prompt that some hit over everything computed can read."""
        hashes = chain(list(tokens), self.layout.hash_block_tokens).hashes
        useful: set[Key] = set()
        for b in range(1, len(tokens) + 1):
            if self.oracle.possible(b, len(tokens)):
                keys = {self.key(hashes, block) for block in self.oracle.need(b)}
                if keys <= self.computed:
                    useful |= keys
        return useful

    def assert_settled(self) -> None:
        """Nothing is leased or in flight, and every slot is accounted for."""
        ledger, books = self.ledger, self.ledger._books
        assert not self.waiting
        assert ledger.moves_in_flight == 0
        assert not books.index.leases.any()
        assert not books.index.tier_leases.any()
        assert ledger._flights.load_bytes == ledger._flights.save_bytes == 0
        pinned = np.flatnonzero(books.index.pinned)
        slots = books.room.slots
        assert books.room.slot_bytes(pinned) == slots.capacity_bytes - slots.free_bytes
