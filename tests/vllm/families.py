"""Model families on the real engine: what a cache owes each of them, measured in two engines.

Round 1 computes prompts, round 2 asks for them again while the engine's own cache is empty. The
other engine has no connector and a pool that holds everything: its round 2 comes from its own
cache, so both compute the same tokens in the same shapes and must agree (but for `NOISE`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engines import Answer, Engine, engine, prompt

from tierkv import reach
from tierkv.layout import Layout
from tierkv.plan import plan_prompt

PROMPTS = 2


@dataclass(frozen=True)
class Family:
    """A tiny model of a family; `tokens` per prompt, `blocks` in the pool."""

    name: str
    model: str
    kind: str
    tokens: int = 500
    blocks: int = 400
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.model

    def __hash__(self) -> int:
        return hash(self.model)

    @property
    def prompts(self) -> list[list[int]]:
        """What both rounds ask."""
        return [prompt(seed, self.tokens) for seed in range(PROMPTS)]


FAMILIES = (
    Family("Llama", "tinyllama", "full (GQA)"),
    Family("Gemma 3", "tinygemma3", "full + windows"),
    Family("gpt-oss", "tinygptoss", "full + windows with sinks"),
    Family("Llama 4", "tinyllama4", "full + chunked local", tokens=900),
    Family("DeepSeek V3", "tinydsv3", "MLA", settings={"block_size": 16}),
    Family(
        *("Qwen3-Next", "tinyqwen3next", "full + recurrent"),
        tokens=600,
        blocks=60,
        settings={"dtype": "bfloat16", "block_size": 256},
    ),
    Family(
        *("DeepSeek V4", "tinydsv4", "sparse MLA + windows + compressor states"),
        tokens=1500,
        blocks=2200,
        settings={"dtype": "bfloat16", "block_size": 256, "max_model_len": 1536},
    ),
)


@dataclass(frozen=True)
class Found:
    """What came of a family.

    alone, ours: answers of (round 1, round 2). corrupted: group → answers of a round 2 in which
    what was loaded of that group was zeroed. stored_bytes, offered_bytes: what round 1 wrote to
    the tier, and all whole blocks of its prompts. loaded_blocks, wrong_blocks: blocks that round 2
    copied into pages, and those whose pages differ from what was saved.
    """

    layout: Layout
    alone: tuple[list[Answer], list[Answer]]
    ours: tuple[list[Answer], list[Answer]]
    corrupted: dict[int, list[Answer]]
    stored_bytes: int
    offered_bytes: int
    hit_bytes: int
    loaded_blocks: int
    wrong_blocks: int

    @property
    def hit_tokens(self) -> list[int]:
        """Cached tokens of round 2."""
        return [a.cached_tokens for a in self.ours[1]]

    @property
    def equal_hits(self) -> bool:
        """Whether the hits are those of the engine's own cache."""
        return self.hit_tokens == [a.cached_tokens for a in self.alone[1]]

    @property
    def equal_output(self) -> bool:
        """Whether both rounds gave the tokens and logprobs of the engine alone."""
        return all(
            same(a, b) and len(a) == PROMPTS for a, b in zip(self.ours, self.alone, strict=True)
        )

    @property
    def sees_corruption(self) -> bool:
        """Whether every prompt shows it when one group's bytes are wrong."""
        return all(
            not a.same_logprobs(b)
            for answers in self.corrupted.values()
            for a, b in zip(answers, self.alone[1], strict=True)
        )


def same(ours: list[Answer], theirs: list[Answer]) -> bool:
    """Tokens and logprobs, prompt by prompt."""
    return all(a.same_output(b) for a, b in zip(ours, theirs, strict=True))


def planned_bytes(layout: Layout, boundary: int) -> int:
    """What a hit at `boundary` moves, from the reachability table alone."""
    ranges = (reach.load_range(layout, g, boundary) for g in range(len(layout.groups)))
    return sum(
        (end - first) * g.block_bytes for (first, end), g in zip(ranges, layout.groups, strict=True)
    )


def forget(ours: Engine) -> None:
    """Empty the engine's own cache, so that the next hit is ours."""
    ours.settle()
    assert ours.llm.reset_prefix_cache()


@contextlib.contextmanager
def compared_pages(ours: Engine) -> Iterator[list[bool]]:
    """For each block loaded meanwhile, whether its pages hold what its save took from pages."""
    pages, layout = ours.worker_side._pages, ours.scheduler_side.ledger.layout
    gather, scatter = pages.gather, pages.scatter
    saved: dict[tuple[int, int], bytes] = {}
    equal: list[bool] = []

    def slots(groups: Any, arena: Any, offsets: Any) -> dict[tuple[int, int], bytes]:
        return {
            (g, at): bytes(arena[at : at + layout.groups[g].block_bytes].numpy())
            for g, at in zip(groups.tolist(), offsets.tolist(), strict=True)
        }

    def noting(groups: Any, block_ids: Any, arena: Any, offsets: Any) -> None:
        gather(groups, block_ids, arena, offsets)
        saved.update(slots(groups, arena, offsets))

    def comparing(groups: Any, block_ids: Any, arena: Any, offsets: Any) -> None:
        scatter(groups, block_ids, arena, offsets)
        there = arena.clone()
        there.zero_()
        gather(groups, block_ids, there, offsets)
        equal.extend(saved[key] == page for key, page in slots(groups, there, offsets).items())

    pages.gather, pages.scatter = noting, comparing
    try:
        yield equal
    finally:
        pages.gather, pages.scatter = gather, scatter


@contextlib.contextmanager
def zeroed_loads(ours: Engine, group: int) -> Iterator[None]:
    """What is loaded of one group meanwhile is zeros; the arena keeps what it holds."""
    pages, nbytes = ours.worker_side._pages, ours.scheduler_side.ledger.layout.block_bytes[group]
    scatter = pages.scatter

    def zeroing(groups: Any, block_ids: Any, arena: Any, offsets: Any) -> None:
        slots = [arena[at : at + nbytes] for at in offsets[groups == group].tolist()]
        kept = [slot.clone() for slot in slots]
        for slot in slots:
            slot.zero_()
        scatter(groups, block_ids, arena, offsets)
        for slot, data in zip(slots, kept, strict=True):
            slot.copy_(data)

    pages.scatter = zeroing
    try:
        yield
    finally:
        pages.scatter = scatter


@functools.cache
def measure(family: Family) -> Found:
    """Both engines, and one more round for each group that a hit reads."""
    with engine(family.model, blocks=family.blocks, **family.settings) as plain:
        alone = plain.ask(family.prompts), plain.ask(family.prompts)
    extra = {"url": "memory://"}
    with engine(family.model, blocks=family.blocks, extra=extra, **family.settings) as ours:
        with compared_pages(ours) as equal:
            first = ours.ask(family.prompts)
            forget(ours)
            stored = ours.counters["stored_bytes"]
            second = ours.ask(family.prompts)
        ours.settle()
        hit_bytes = ours.counters["hit_bytes"]
        layout, corrupted = ours.scheduler_side.ledger.layout, {}
        for group in range(len(layout.groups)):
            low, end = reach.load_range(layout, group, second[0].cached_tokens)
            if low == end:
                continue
            forget(ours)
            with zeroed_loads(ours, group):
                corrupted[group] = ours.ask(family.prompts)
    offered = plan_prompt(layout, family.tokens)["all_blocks_bytes"] * PROMPTS
    return Found(
        *(layout, alone, (first, second), corrupted, stored, offered, hit_bytes),
        *(len(equal), equal.count(False)),
    )
