"""The law of reachability, against an oracle that counts tokens one by one.

Nothing is missing: what a policy stores gives every hit that storing everything gives, at the
boundaries the policy keeps. Nothing is wasted: without any one stored block some hit is shorter.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.core.oracle import Block, Oracle
from tests.core.scale import examples
from tierkv import reach
from tierkv.layout import Group, GroupKind, Layout

SIZES = (1, 2, 3, 4, 5, 6, 8)
SIZES_TOGETHER = ((1, 2, 4, 8), (1, 2, 3, 6), (2, 3, 4), (3, 4, 6, 8), (1, 2, 5), (4, 5, 8))
MAX_ALIGNMENT = 40  # larger ones are tried by example: the oracle counts tokens one by one
KINDS = [str(k) for k in GroupKind]


@st.composite
def groups(draw: st.DrawFn, index: int, sizes: tuple[int, ...] = SIZES) -> Group:
    kind = GroupKind(draw(st.sampled_from(KINDS)))
    geometry: dict[str, int] = {}
    if kind is GroupKind.SLIDING_WINDOW:
        geometry = {
            "window_tokens": draw(st.integers(1, 40)),
            "extra_tokens": draw(st.sampled_from((0, 0, 1, 3, 9))),
        }
    elif kind is GroupKind.CHUNKED_LOCAL:
        geometry = {"chunk_tokens": draw(st.integers(1, 40))}
    elif kind is GroupKind.COMPRESSOR:
        ratio = draw(st.sampled_from((1, 2, 4, 5, 8, 12)))
        geometry = {"ratio": ratio, "window_tokens": ratio * draw(st.sampled_from((1, 2, 3)))}
    return Group(
        name=f"g{index}",
        kind=kind,
        block_tokens=draw(st.sampled_from(sizes)),
        block_bytes=1,
        draft=draw(st.sampled_from((False, False, True))),
        **geometry,
    )


@dataclass(frozen=True)
class World:
    """A layout, a stored prompt, and how it was computed."""

    layout: Layout
    oracle: Oracle
    policy: str
    known: int
    produced: frozenset[int] | None
    junctions: tuple[int, ...]

    def stored(self) -> set[Block]:
        ranges = reach.keep(
            self.layout,
            reach.Policy.parse(self.policy),
            self.known,
            self.produced,
            junctions=self.junctions,
        )
        return blocks_of(ranges)


def blocks_of(ranges: list[reach.Ranges]) -> set[Block]:
    for r in ranges:
        flat = r.reshape(-1).tolist()
        assert all(low < high for low, high in itertools.pairwise(flat)), "not disjoint"
    return {(g, i) for g, r in enumerate(ranges) for lo, hi in r.tolist() for i in range(lo, hi)}


def make_layout(drawn: list[Group]) -> Layout:
    if all(g.kind is GroupKind.SCRATCH for g in drawn):
        drawn = [Group(name="f", kind=GroupKind.FULL, block_tokens=4, block_bytes=1), *drawn]
    sizes = [g.block_tokens for g in drawn if g.reusable]
    assume(math.lcm(*sizes) <= MAX_ALIGNMENT)
    return Layout(tuple(drawn))


@st.composite
def worlds(
    draw: st.DrawFn, policies: tuple[str, ...] = ("dense", "end", "interval", "auto")
) -> World:
    count = draw(st.integers(1, 9))
    sizes = draw(st.sampled_from(SIZES_TOGETHER))
    layout = make_layout([draw(groups(i, sizes)) for i in range(count)])
    step = layout.alignment_tokens
    known = draw(st.integers(1, 4 * step + 3))
    policy = draw(st.sampled_from(policies))
    if policy in ("interval", "auto"):
        policy += f":{draw(st.integers(1, 2 * step))}"
    marks = [b for b in range(step, known + 1, step)]
    produced = draw(st.none() | st.frozensets(st.sampled_from(marks or [step])))
    junctions = tuple(draw(st.lists(st.integers(0, known), max_size=2)))
    return World(layout, Oracle.of(layout), policy, known, produced, junctions)


def lookups(world: World) -> list[tuple[int, int]]:
    """(known tokens, tokens shared with the stored prompt) of prompts that come later."""
    n, step = world.known, world.oracle.alignment
    branches = [(n + step, s) for s in {n // 2, max(0, n - 1), n - n % step}]
    return [(n, n), (n + 1, n), (n + 2 * step, n), *branches]


def shared(world: World, blocks: set[Block], tokens: int) -> set[Block]:
    """The blocks that a prompt which shares `tokens` tokens can name."""
    sizes = [g.block_tokens for g in world.layout.groups]
    return {(g, i) for g, i in blocks if (i + 1) * sizes[g] <= tokens}


def our_hit(layout: Layout, known: int, present: set[Block], local: int = 0) -> int:
    asked: list[Block] = []

    def ask(group: int, block: int) -> bool:
        asked.append((group, block))
        return (group, block) in present

    found = reach.longest_hit(layout, known, ask, local_tokens=local)
    assert len(asked) == len(set(asked)), "a block was asked for twice"
    return found


@settings(max_examples=examples(700), deadline=None)
@given(worlds())
def test_stored_blocks_give_the_hits_that_everything_gives(world: World) -> None:
    oracle = world.oracle
    kept = oracle.kept_boundaries(world.policy, world.known, world.produced, world.junctions)
    stored = world.stored()
    assert stored == oracle.store(kept)
    everything = oracle.everything(world.known, world.produced)
    for known, common in lookups(world):
        have = shared(world, stored, common)
        could = shared(world, everything, common)
        ours = our_hit(world.layout, known, have)
        assert ours == oracle.hit(known, have)
        best = our_hit(world.layout, known, could)
        assert best == oracle.hit(known, could)
        if world.policy == "dense":
            assert ours == best
        promised = [b for b in kept if b < known and oracle.possible(b, known)]
        assert ours >= max((b for b in promised if oracle.need(b) <= could), default=0)


@settings(max_examples=examples(300), deadline=None)
@given(worlds())
def test_without_any_stored_block_some_hit_is_shorter(world: World) -> None:
    oracle, stored = world.oracle, world.stored()
    kept = oracle.kept_boundaries(world.policy, world.known, world.produced, world.junctions)
    reach_to = max([g.block_tokens for g in world.layout.groups if oracle.is_draft(g)], default=1)
    for block in sorted(stored):
        lengths = [b + max(1, reach_to) for b in kept if block in oracle.need(b)]
        assert lengths, f"no kept boundary needs {block}"
        without = stored - {block}
        assert any(
            our_hit(world.layout, n, without) < our_hit(world.layout, n, stored) for n in lengths
        ), f"{block} is stored for nothing"


@settings(max_examples=examples(300), deadline=None)
@given(worlds(), st.data())
def test_any_cut_into_steps_stores_the_same_blocks_each_once(
    world: World, data: st.DataObject
) -> None:
    inner = data.draw(st.lists(st.integers(0, world.known), max_size=6))
    cuts = [0, *sorted(inner), world.known]
    kept = functools.partial(
        reach.boundaries,
        world.layout,
        reach.Policy.parse(world.policy),
        world.known,
        world.produced,
        junctions=world.junctions,
    )
    at = kept()
    seen: set[Block] = set()
    passed: list[int] = []
    sizes = [g.block_tokens for g in world.layout.groups]
    for after, upto in itertools.pairwise(cuts):
        new = reach.became_available(world.layout, at, after, upto)
        assert kept(after_tokens=after, upto_tokens=upto).tolist() == new.tolist()
        needed = blocks_of(reach.needs(world.layout, new))
        assert all((i + 1) * sizes[g] <= upto for g, i in needed), "offered before it was computed"
        if len(new):
            assert after < reach.next_boundary(world.layout, after) <= upto
        passed += new.tolist()
        seen |= needed
    assert passed == at.tolist()
    assert seen == world.stored()


@settings(max_examples=examples(300), deadline=None)
@given(worlds(("dense", "interval", "auto")), st.data())
def test_decoding_step_by_step_stores_what_the_whole_text_would(
    world: World, data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(1, world.known))
    policy = reach.Policy.parse(world.policy)
    seen: set[Block] = set()
    for after, upto in itertools.pairwise([0, *range(prompt, world.known + 1)]):
        at = reach.boundaries(world.layout, policy, upto, end_tokens=prompt)
        seen |= blocks_of(
            reach.needs(world.layout, reach.became_available(world.layout, at, after, upto))
        )
    assert seen == blocks_of(reach.keep(world.layout, policy, world.known, end_tokens=prompt))


@settings(max_examples=examples(300), deadline=None)
@given(worlds(), st.data())
def test_what_the_engine_holds_itself_counts_as_present(world: World, data: st.DataObject) -> None:
    everything = sorted(world.oracle.everything(world.known, world.produced))
    lost = data.draw(st.sets(st.sampled_from(everything))) if everything else set()
    present = set(everything) - lost
    local = data.draw(st.integers(0, world.known))
    ours = our_hit(world.layout, world.known, present, local)
    assert ours == world.oracle.hit(world.known, present, local)
    if ours:
        for g, group in enumerate(world.layout.groups):
            first, end = reach.load_range(world.layout, g, ours, local_tokens=local)
            moved = {(g, i) for i in range(first, end)}
            assert moved <= present
            read = {t // group.block_tokens for t in world.oracle.tokens_read(group, ours)}
            held = {i for i in read if (i + 1) * group.block_tokens <= local}
            assert {i for _, i in moved} == read - held


@settings(max_examples=examples(200), deadline=None)
@given(worlds())
def test_no_hit_passes_the_boundary_it_was_given(world: World) -> None:
    present = world.oracle.everything(world.known)
    step = world.layout.alignment_tokens
    for cap in range(0, world.known + step, step):
        ours = reach.longest_hit(
            world.layout, world.known, lambda g, i: (g, i) in present, max_boundary=cap
        )
        assert ours == min(cap // step * step, world.oracle.hit(world.known, present))
