"""What hindsight would have kept: Belady's rule over the blocks that a policy stores."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Final

import numpy as np

from bench.traces import Names, Trace
from tierkv import planner
from tierkv.blocks import slot_bytes
from tierkv.index import Index, Rows, Tier
from tierkv.layout import Layout

_NEVER: Final = 1 << 60


class _Cache:
    """A cache of `capacity_bytes` that knows when every row is needed next."""

    def __init__(self, layout: Layout, index: Index, capacity_bytes: int) -> None:
        self._index = index
        self._sizes = [slot_bytes(n) for n in layout.block_bytes]
        self._free = capacity_bytes
        self._next: dict[int, int] = {}
        self._latest: list[tuple[int, int]] = []

    def need_again(self, row: int, when: int) -> None:
        """A row that is in the cache is needed next at `when`; a row that never is leaves."""
        if row in self._next:
            if when == _NEVER:
                self._drop(row)
            else:
                self._note(row, when)

    def offer(self, row: int, when: int) -> None:
        """Take a row in, unless all that would have to leave for it is needed earlier."""
        size = self._sizes[int(self._index.group[row])]
        while row not in self._next and when < _NEVER:
            if self._free >= size:
                self._free -= size
                self._index.tier[row] = Tier.RESIDENT
                self._note(row, when)
                return
            latest = self._pop_latest()
            if latest is None:
                return
            if self._next[latest] <= when:
                self._note(latest, self._next[latest])
                return
            self._drop(latest)

    def _note(self, row: int, when: int) -> None:
        self._next[row] = when
        heapq.heappush(self._latest, (-when, row))

    def _pop_latest(self) -> int | None:
        while self._latest:
            when, row = heapq.heappop(self._latest)
            if self._next.get(row) == -when:
                return row
        return None

    def _drop(self, row: int) -> None:
        del self._next[row]
        self._index.tier[row] = Tier.ABSENT
        self._free += self._sizes[int(self._index.group[row])]


def belady_hits(
    layout: Layout,
    trace: Trace,
    index: Index,
    loaded: list[Rows],
    kept: list[Rows],
    capacity_bytes: int,
) -> list[int]:
    """Hit tokens per prompt where the block that is needed last always leaves first.

    index, loaded, kept: of a run without a limit. Blocks are chosen one by one: no other rule that
    stores the same blocks is known to do better, but it is no proof that none does. The index's
    residency is overwritten.
    """
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for n in range(len(loaded) - 1, -1, -1):
        for row in loaded[n].tolist():
            uses[row].append(n)
    index.tier[:] = Tier.ABSENT
    cache = _Cache(layout, index, capacity_bytes)
    hits = []
    for n, prompt in enumerate(trace.prompts):
        names = Names(prompt, trace.block_tokens, layout.hash_block_tokens)
        hit = planner.plan_hit(index, layout, names, known_tokens=trace.known_tokens(prompt))
        hits.append(hit.tokens)
        for row in loaded[n].tolist():
            uses[row].pop()
            cache.need_again(row, uses[row][-1] if uses[row] else _NEVER)
        for row in np.unique(kept[n]).tolist():
            cache.offer(row, uses[row][-1] if uses[row] else _NEVER)
    return hits
