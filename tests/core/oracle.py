"""What a hit needs, token by token, straight from the design's table: slow and obvious.

It shares no code with `tierkv.reach` and reads nothing of a layout but the groups' plain fields;
the alignment and the marks of draft groups are worked out here once more.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tierkv.layout import Group, Layout

Block = tuple[int, int]
"""(group index, block index)"""


@dataclass(frozen=True)
class Oracle:
    """The law for one table of groups."""

    groups: tuple[Group, ...]
    alignment: int

    @classmethod
    def of(cls, layout: Layout) -> Oracle:
        sizes = [g.block_tokens for g in layout.groups if g.kind != "scratch"]
        alignment = max(sizes)
        while any(alignment % s for s in sizes):
            alignment += 1
        return cls(layout.groups, alignment)

    def is_draft(self, group: Group) -> bool:
        if group.kind in ("recurrent", "scratch"):
            return False
        return any(
            other.draft
            and other.kind == group.kind
            and other.block_tokens == group.block_tokens
            and other.window_tokens == group.window_tokens
            and other.chunk_tokens == group.chunk_tokens
            and other.ratio == group.ratio
            for other in self.groups
        )

    def tokens_read(self, group: Group, b: int) -> list[int]:
        """Positions below `b` whose cache a hit at `b` reads."""
        read = []
        for position in range(b):
            distance = b - position  # 1 for the last token before the boundary
            match str(group.kind):
                case "full":
                    wanted = True
                case "sliding_window":
                    # The first computed token is at b: it sees itself and window - 1 before it.
                    wanted = distance <= group.window_tokens - 1 + group.extra_tokens
                case "chunked_local":
                    wanted = position // group.chunk_tokens == b // group.chunk_tokens
                case "recurrent":
                    wanted = distance <= group.block_tokens
                case "compressor":
                    if self.alignment % group.ratio == 0:
                        entry_end = b // group.ratio * group.ratio + group.ratio
                        wanted = position >= entry_end - group.window_tokens
                    else:
                        wanted = distance <= group.window_tokens - 1
                case _:
                    wanted = False
            if wanted:
                read.append(position)
        return read

    def need(self, b: int) -> frozenset[Block]:
        """Every block that a hit at `b` needs."""
        return _need(self, b)

    def possible(self, b: int, known: int) -> bool:
        """Whether a hit may end at `b` at all: aligned, and its look-ahead blocks are known."""
        if b <= 0 or b % self.alignment:
            return False
        return (
            all(b + group.block_tokens <= known for group in self.groups if self.is_draft(group))
            and b <= known
        )

    def hit(self, known: int, present: Collection[Block], local: int = 0) -> int:
        """The longest hit of `known` tokens; the last token is always computed."""
        for b in range(known - 1, local, -1):
            if self.possible(b, known) and all(
                block in present or self._ends(block) <= local for block in self.need(b)
            ):
                return b
        return 0

    def _ends(self, block: Block) -> int:
        return (block[1] + 1) * self.groups[block[0]].block_tokens

    def everything(self, known: int, produced: Collection[int] | None = None) -> set[Block]:
        """Every whole block that a prompt of `known` tokens makes."""
        blocks = set()
        for index, group in enumerate(self.groups):
            if group.kind == "scratch":
                continue
            for block in range(known // group.block_tokens):
                end = (block + 1) * group.block_tokens
                if group.kind == "recurrent" and produced is not None and end not in produced:
                    continue
                blocks.add((index, block))
        return blocks

    def kept_boundaries(
        self,
        policy: str,
        known: int,
        produced: Collection[int] | None = None,
        junctions: Iterable[int] = (),
        end: int | None = None,
    ) -> list[int]:
        """The boundaries that a policy keeps, one candidate after the other."""
        possible = [b for b in range(1, known + 1) if self.possible(b, known)]
        made = self._made(possible, produced)
        name, _, argument = policy.partition(":")
        kept: set[int] = set()
        if name == "dense":
            kept = set(made)
        wanted = {j - j % self.alignment for j in junctions}
        if name in ("end", "auto"):
            text = known if end is None else end
            ends = [b for b in range(1, text + 1) if self.possible(b, text)]
            wanted.add(max(ends, default=0))
            wanted.add(max((b for b in ends if b < text), default=0))
        for b in wanted & set(possible):  # where no state was taken, the last one before serves
            kept.add(max((m for m in made if m <= b), default=0))
        if name in ("interval", "auto"):
            every = int(argument or 4096)
            for mark in range(every, known + self.alignment, every):
                rung = mark - mark % self.alignment
                after = [m for m in made if m >= rung]
                if rung and after:  # where no state was taken, the next one after it serves
                    kept.add(after[0])
        return sorted(kept - {0})

    def _made(self, possible: list[int], produced: Collection[int] | None) -> list[int]:
        recurrent = any(g.kind == "recurrent" for g in self.groups)
        return [b for b in possible if not recurrent or produced is None or b in produced]

    def store(self, boundaries: Iterable[int]) -> set[Block]:
        """The union of the needs."""
        blocks: set[Block] = set()
        for b in boundaries:
            blocks |= self.need(b)
        return blocks


@functools.lru_cache(maxsize=1000)
def _need(oracle: Oracle, b: int) -> frozenset[Block]:
    blocks = set()
    for index, group in enumerate(oracle.groups):
        for position in oracle.tokens_read(group, b):
            blocks.add((index, position // group.block_tokens))
        if oracle.is_draft(group):
            blocks.add((index, b // group.block_tokens))
    return frozenset(blocks)
