"""Group tables in one line each, and what a stored prompt gives to later ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tests.core.oracle import Block
from tierkv import reach
from tierkv.layout import Group, GroupKind, Layout


def full(block: int, name: str = "full", *, draft: bool = False) -> Group:
    return Group(name=name, kind=GroupKind.FULL, block_tokens=block, block_bytes=block, draft=draft)


def swa(
    block: int, window: int, name: str = "swa", *, extra: int = 0, draft: bool = False
) -> Group:
    return Group(
        name=name,
        kind=GroupKind.SLIDING_WINDOW,
        block_tokens=block,
        block_bytes=block,
        window_tokens=window,
        extra_tokens=extra,
        draft=draft,
    )


def mamba(block: int, name: str = "mamba") -> Group:
    return Group(name=name, kind=GroupKind.RECURRENT, block_tokens=block, block_bytes=7)


def scratch(block: int, name: str = "scratch") -> Group:
    return Group(name=name, kind=GroupKind.SCRATCH, block_tokens=block, block_bytes=1)


def stored(
    layout: Layout,
    tokens: int,
    policy: str = "dense",
    produced: Collection[int] | None = None,
    junctions: Iterable[int] = (),
) -> set[Block]:
    """The blocks kept of a prompt."""
    ranges = reach.keep(layout, reach.Policy.parse(policy), tokens, produced, junctions=junctions)
    return {(g, i) for g, r in enumerate(ranges) for lo, hi in r.tolist() for i in range(lo, hi)}


def hit(layout: Layout, tokens: int, present: Collection[Block], *, local_tokens: int = 0) -> int:
    """The longest hit of a prompt of `tokens` tokens for which `present` blocks are there."""
    return reach.longest_hit(
        layout, tokens, lambda g, i: (g, i) in present, local_tokens=local_tokens
    )
