"""What leaves a full tier: policies compared on a trace, block by block and by whole segments.

One group, one block per id of the trace. A prompt hits its longest prefix of blocks that are there,
so a hole ends the hit; what a prompt lacks is stored after it was answered, and of one prompt the
deepest block leaves first. `Segments` does what the nvme tier does: it appends to segments, gives
back a whole one where it needs room, and first writes again what `tierkv.policy.worth_keeping`
says; it runs the real function on a real index. Capacities are shares of the footprint, the number
of distinct blocks of the trace.

The constants of the policy were chosen on the public trace itself, out of about seventy settings,
and neighboring settings differ by half a percent: its numbers there are no prediction for another
trace. On the made-up ones (`--synthetic`) it loses to LRU in a small tier, about a tenth at 5 %,
most of that because whole segments leave and the rest because reuses say little there.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from bench.traces import Trace
from tierkv import policy
from tierkv.blocks import HASH_BYTES
from tierkv.books import BLOCKS_PER_MEMORY
from tierkv.index import Index, Rows, Tier
from tierkv.past import Past
from tierkv_backends.nvme import space

Prompts = Sequence[tuple[int, ...]]
Hits = Iterator[int]
"""Blocks that each prompt hits, in order."""

NEVER: Final = 1 << 60
SEGMENTS: Final = (32, 64, 128, 256)
"""How many segments the tier is cut into. 256 MiB of 5.5 KiB per token are about 100 blocks of 512
tokens; 5 % of the public trace are about 90 such segments."""


def footprint(prompts: Prompts) -> int:
    """Distinct blocks."""
    return len({block for prompt in prompts for block in prompt})


def _prefix(prompt: tuple[int, ...], held: Any) -> int:
    return next((n for n, block in enumerate(prompt) if block not in held), len(prompt))


def lru(prompts: Prompts, capacity: int) -> Hits:
    """Least recently used first."""
    held: OrderedDict[int, None] = OrderedDict()
    for prompt in prompts:
        yield _prefix(prompt, held)
        for block in reversed(prompt):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)


def fifo(prompts: Prompts, capacity: int) -> Hits:
    """Stored first, out first."""
    held: OrderedDict[int, None] = OrderedDict()
    for prompt in prompts:
        yield _prefix(prompt, held)
        for block in reversed(prompt):
            held.setdefault(block)
        while len(held) > capacity:
            held.popitem(last=False)


def s3_fifo(prompts: Prompts, capacity: int) -> Hits:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth, a main one, and a ghost queue.

    A block that leaves the small queue goes on to the main one if it was used more than once
    since; the main queue gives a block as many further rounds as it was used, three at most; a
    block that the ghost queue remembers starts in the main one.
    """
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghost: OrderedDict[int, None] = OrderedDict()
    used: dict[int, int] = {}
    small_room = max(1, capacity // 10)

    def evict() -> None:
        while small and (len(small) >= small_room or not main):
            block = small.popleft()
            if used[block] > 1:
                used[block] = 0
                main.append(block)
                continue
            del used[block]
            ghost[block] = None
            if len(ghost) > capacity - small_room:
                ghost.popitem(last=False)
            return
        while main:
            block = main.popleft()
            if not used[block]:
                del used[block]
                return
            used[block] -= 1
            main.append(block)

    for prompt in prompts:
        yield _prefix(prompt, used)
        for block in reversed(prompt):
            if block in used:
                used[block] = min(3, used[block] + 1)
                continue
            while len(used) >= capacity:
                evict()
            (main if block in ghost else small).append(block)
            ghost.pop(block, None)
            used[block] = 0


def belady(prompts: Prompts, capacity: int) -> Hits:
    """The block that is needed last leaves first, and one that never is needed again at once.

    Blocks are chosen one by one: no rule is known to do better, but it is no proof that none does.
    """
    after: list[list[int]] = [[]] * len(prompts)
    coming: dict[int, int] = {}
    for n in range(len(prompts) - 1, -1, -1):
        after[n] = [coming.get(block, NEVER) for block in prompts[n]]
        coming.update(dict.fromkeys(prompts[n], n))
    held: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []
    for prompt, nexts in zip(prompts, after, strict=True):
        yield _prefix(prompt, held)
        for depth, (block, when) in enumerate(zip(prompt, nexts, strict=True)):
            if when == NEVER:
                held.pop(block, None)
                continue
            held[block] = when
            heapq.heappush(latest, (-when, -depth, block))
        while len(held) > capacity:
            when, _, block = heapq.heappop(latest)
            if held.get(block) == -when:
                del held[block]


class Segments:
    """The nvme tier, whose blocks leave by whole segments (`tierkv_backends.nvme.space`).

    The tier is `segments` segments of equal size, all of them within the capacity: the one that is
    written, the one that takes what is written again, and the blank ones in reserve included. One
    of those there always is; two, where less than half a segment is left for what is written again.
    Where one is missing, the segment that was sealed first is given up: what
    `tierkv.policy.worth_keeping` says is written again, at most half of it. One of which the policy
    keeps more goes to the end of the order as it is, at most `space.PASSES` of them in a row; then
    that goes of which it keeps least.

    What differs: one lane writes, not up to three, and a block's headers take no space.
    """

    def __init__(self, prompts: Prompts, capacity: int, segments: int) -> None:
        segments = max(space.LEAST_SEGMENTS, min(segments, capacity))
        self._prompts = prompts
        self.size = max(1, capacity // segments)
        self.index = Index(1)
        self.past = Past()
        self.past.reserve(capacity // BLOCKS_PER_MEMORY)
        self._names: dict[int, bytes] = {}
        self.stored = self.rewritten = 0
        self._sealed: deque[Rows] = deque()
        self._writes, self._own = _Lane(), _Lane()
        self._blanks = segments

    @property
    def write_amplification(self) -> float:
        """Blocks written per block stored."""
        return (self.stored + self.rewritten) / max(1, self.stored)

    def hits(self) -> Hits:
        """Replay all prompts."""
        index = self.index
        for now, prompt in enumerate(self._prompts, 1):
            names = [self._name(block) for block in prompt]
            rows = index.rows_of(0, names)
            lacking = np.flatnonzero(rows < 0)
            hit = int(lacking[0]) if len(lacking) else len(prompt)
            yield hit
            self._use(rows[:hit], rows[rows >= 0], now)
            if len(lacking):
                fresh = [names[n] for n in lacking.tolist()]
                new = index.add_many(np.zeros(len(fresh), np.uint16), fresh)
                index.tick[new], index.depth[new] = now, lacking + 1
                index.uses[new] = self.past.recall(index.keys_of(new))
                index.tier[new] = Tier.WRITING
                self.stored += len(new)
                self._append(self._writes, new)

    def _use(self, hit: Rows, there: Rows, now: int) -> None:
        """A prompt hit some rows; `there` are all of its rows that are stored. As the ledger."""
        index = self.index
        index.gap[hit] = now - index.tick[hit]
        index.uses[hit] = np.minimum(index.uses[hit], 254) + 1
        index.tick[there] = now

    def _name(self, block: int) -> bytes:
        name = self._names.get(block)
        if name is None:
            name = blake2b(block.to_bytes(8, "little"), digest_size=HASH_BYTES).digest()
            self._names[block] = name
        return name

    def _append(self, lane: _Lane, rows: Rows) -> None:
        while len(rows):
            if not lane.room:
                self._begin(lane)
            part, rows = rows[: lane.room], rows[lane.room :]
            lane.parts.append(part)
            lane.room -= len(part)
            self.index.tier[part] = Tier.RESIDENT

    def _begin(self, lane: _Lane) -> None:
        """Seal a lane's segment, take a blank one, and see that there is another."""
        if lane.parts:
            self._sealed.append(np.concatenate(lane.parts))
        lane.parts, lane.room = [], self.size
        self._blanks -= 1
        while lane is self._writes and not self._blanks - (self._own.room < self.size // 2) > 0:
            rows, keep = self._victim()
            self._give_up(rows[~keep])
            self.rewritten += int(keep.sum())
            self._append(self._own, rows[keep])
            self._blanks += 1

    def _victim(self) -> tuple[Rows, NDArray[np.bool_]]:
        """The segment that goes, and what of it is written again."""
        passed: list[tuple[int, Rows, NDArray[np.bool_]]] = []
        for _ in range(min(space.PASSES, len(self._sealed))):
            rows = self._sealed.popleft()
            keep = policy.worth_keeping(self.index, rows)
            kept = int(keep.sum())
            passed.append((kept, rows, keep))
            if kept <= len(rows) // 2:
                break
        least = min(range(len(passed)), key=lambda n: passed[n][0])
        _, rows, keep = passed.pop(least)
        self._sealed.extend(stays for _, stays, _ in passed)
        keep[np.flatnonzero(keep)[len(rows) // 2 :]] = False
        return rows, keep

    def _give_up(self, rows: Rows) -> None:
        self.past.remember(self.index.keys_of(rows), self.index.uses[rows])
        self.index.tier[rows] = Tier.ABSENT
        self.index.reap_all(rows)


@dataclass(slots=True)
class _Lane:
    """A segment that is written: its parts so far, and how many blocks it still takes."""

    parts: list[Rows] = field(default_factory=list)
    room: int = 0


BLOCKWISE: Final = {"fifo": fifo, "lru": lru, "s3-fifo": s3_fifo, "belady": belady}


def compare(
    trace: Trace, shares: Sequence[float], segments: Sequence[int] = SEGMENTS
) -> dict[str, Any]:
    """Every policy at every share of the footprint; progress goes to standard error.

    Returns `footprint_blocks` and `sizes`, one a share: `capacity_share`, `capacity_blocks`,
    `hit_tokens` by policy, and `default`, one a number of segments: `segments`, `segment_blocks`,
    `hit_tokens`, `of_lru`, `of_belady`, `write_amplification`. The policy `default` of `hit_tokens`
    is the one with most segments.
    """
    prompts = [prompt.ids for prompt in trace.prompts]
    blocks = footprint(prompts)
    sizes = []
    for share in shares:
        capacity = max(1, round(share * blocks))
        hits = {}
        for name, run in BLOCKWISE.items():
            hits[name] = _count(f"{share:.0%} {name}", run(prompts, capacity), trace)
        runs = [_default(trace, prompts, share, capacity, n, hits) for n in segments]
        sizes.append(
            {
                "capacity_share": share,
                "capacity_blocks": capacity,
                "hit_tokens": hits | {"default": runs[-1]["hit_tokens"]},
                "default": runs,
            }
        )
    return {"footprint_blocks": blocks, "block_tokens": trace.block_tokens, "sizes": sizes}


def _default(
    trace: Trace,
    prompts: Prompts,
    share: float,
    capacity: int,
    segments: int,
    hits: dict[str, int],
) -> dict[str, Any]:
    run = Segments(prompts, capacity, segments)
    tokens = _count(f"{share:.0%} default, {segments} segments", run.hits(), trace)
    return {
        "segments": segments,
        "segment_blocks": run.size,
        "hit_tokens": tokens,
        "of_lru": tokens / max(1, hits["lru"]),
        "of_belady": tokens / max(1, hits["belady"]),
        "write_amplification": run.write_amplification,
    }


def _count(what: str, hits: Hits, trace: Trace) -> int:
    """Hit tokens in all; says on standard error how far it is."""
    steps = track(
        hits, what, total=len(trace.prompts), console=Console(stderr=True), transient=True
    )
    return sum(steps) * trace.block_tokens


def table(answer: dict[str, Any]) -> str:
    """The answer for people: hit tokens as shares of Belady's."""
    names = [name for name in (*BLOCKWISE, "default") if name != "belady"]
    lines = [
        f"{answer['trace']}: {answer['footprint_blocks']:,} blocks of {answer['block_tokens']} "
        "tokens; hit tokens as a share of Belady's",
        "capacity " + "".join(f"{name:>10}" for name in names) + "   default by segments",
    ]
    for size in answer["sizes"]:
        best = max(1, size["hit_tokens"]["belady"])
        shares = "".join(f"{size['hit_tokens'][name] / best:10.3f}" for name in names)
        runs = "; ".join(
            f"{run['segments']}: {run['of_lru']:.3f} of LRU, "
            f"written {run['write_amplification']:.2f}x"
            for run in size["default"]
        )
        lines.append(f"{size['capacity_share']:8.0%} {shares}   {runs}")
    return "\n".join(lines)
