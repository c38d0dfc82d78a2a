"""`auto` and `engine`: what is kept, what is learned from prompts that branch, what a hit may lose.

Prompts go through the planner, or through a ledger without a tier, so what is tested is what is
done: junctions come from the index, not from the test.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.oracle import Block, Oracle
from tests.core.scale import examples
from tests.core.tables import full, mamba, swa
from tests.core.test_reach_law import SIZES_TOGETHER, groups, make_layout
from tierkv import planner, reach
from tierkv.blocks import Copied, MoveDone, Outcome
from tierkv.errors import ConfigError
from tierkv.hashing import chain
from tierkv.index import Index, Tier
from tierkv.layout import Group, GroupKind, Layout
from tierkv.ledger import Ledger
from tierkv.presets import load_preset
from tierkv.stock import SeenBoundaries, Stock

Tokens = list[int]


class Planned:
    """An index that is filled by the planner alone; what it wants saved is there at once.

    wanted: every key that was ever saved, with the prompt and block it was saved for.
    """

    def __init__(self, layout: Layout, policy: str) -> None:
        self.layout, self.policy = layout, reach.Policy.parse(policy)
        self.index = Index(len(layout.groups))
        self.wanted: set[tuple[int, bytes]] = set()

    def save(
        self,
        tokens: Tokens,
        cuts: Tokens | None = None,
        states: set[int] | None = None,
        prompt_tokens: int | None = None,
    ) -> planner.SaveProgress:
        """Compute a prompt in steps that end at `cuts`; from `prompt_tokens` on it is an answer."""
        hashes = chain(tokens, self.layout.hash_block_tokens).hashes
        progress = planner.SaveProgress()
        prompt = prompt_tokens or len(tokens)
        for upto in [*sorted(cuts or []), len(tokens)]:
            plan = planner.plan_save(
                self.index,
                self.layout,
                self.policy,
                hashes,
                progress,
                computed_tokens=upto,
                known_tokens=max(prompt, upto),
                block_ids=self.pages(upto, states),
            )
            progress = plan.progress
            keys = zip(plan.wanted.groups.tolist(), plan.names, strict=True)
            self.wanted |= set(keys)
            new = plan.rows < 0
            rows = self.index.add_many(
                plan.wanted.groups[new], [n for n, a in zip(plan.names, new, strict=True) if a]
            )
            self.index.tier[rows] = Tier.RESIDENT
        return progress

    def pages(self, upto: int, states: set[int] | None) -> list[list[int | None]]:
        tables: list[list[int | None]] = []
        for g in self.layout.groups:
            table: list[int | None] = list(range(1, upto // g.block_tokens + 1))
            if g.kind is GroupKind.RECURRENT and states is not None:
                ends = [(i + 1) * g.block_tokens for i in range(len(table))]
                table = [p if e in states else None for p, e in zip(table, ends, strict=True)]
            tables.append(table)
        return tables

    def hit(self, tokens: Tokens) -> int:
        hashes = chain(tokens, self.layout.hash_block_tokens).hashes
        return planner.plan_hit(self.index, self.layout, hashes, known_tokens=len(tokens)).tokens

    def keys(self, tokens: Tokens, blocks: set[Block]) -> set[tuple[int, bytes]]:
        hashes = chain(tokens, self.layout.hash_block_tokens).hashes
        return {(g, hashes[reach.block_hash_index(self.layout, g, i)]) for g, i in blocks}


def fresh(start: int, count: int) -> Tokens:
    return list(range(start, start + count))


@st.composite
def families(draw: st.DrawFn, layout: Layout) -> list[Tokens]:
    """Prompts of which each leaves an earlier one somewhere."""
    step = layout.alignment_tokens
    made: list[Tokens] = []
    for n in range(draw(st.integers(1, 5))):
        base = draw(st.sampled_from(made)) if made else []
        common = draw(st.integers(0, len(base)))
        made.append(base[:common] + fresh(1000 * (n + 1), draw(st.integers(1, 5 * step + 2))))
    return made


@st.composite
def layouts(draw: st.DrawFn, *, most: int = 4) -> Layout:
    sizes = draw(st.sampled_from(SIZES_TOGETHER))
    return make_layout([draw(groups(i, sizes)) for i in range(draw(st.integers(1, most)))])


def common(a: Tokens, b: Tokens) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=examples(250), deadline=None)
@given(st.data(), layouts())
def test_auto_loses_no_more_of_a_hit_than_it_says(data: st.DataObject, layout: Layout) -> None:
    step = layout.alignment_tokens
    policy = f"auto:{data.draw(st.integers(1, 3 * step))}"
    ours, dense = Planned(layout, policy), Planned(layout, "dense")
    made = data.draw(families(layout))
    for tokens in made:
        cuts = data.draw(st.lists(st.integers(1, len(tokens)), max_size=3))
        ours.save(tokens, cuts)
        dense.save(tokens, cuts)
    bound = reach.lost_tokens_at_most(layout, ours.policy)
    assert bound is not None
    for tokens in made:
        assert ours.hit(tokens) == dense.hit(tokens), "the same prompt again loses nothing"
        longer = [*tokens, *fresh(90_000, 2 * step)]
        assert ours.hit(longer) == dense.hit(longer), "a longer prompt loses nothing"
        for at in range(0, len(tokens), max(1, step // 2)):
            branch = tokens[:at] + fresh(80_000, 2 * step)
            assert dense.hit(branch) - bound <= ours.hit(branch) <= dense.hit(branch)


@settings(max_examples=examples(250), deadline=None)
@given(st.data(), layouts(), st.sampled_from(["auto", "end", "interval"]))
def test_what_is_stored_is_the_need_of_ends_rungs_and_junctions_and_nothing_else(
    data: st.DataObject, layout: Layout, kind: str
) -> None:
    step = layout.alignment_tokens
    policy = kind if kind == "end" else f"{kind}:{data.draw(st.integers(1, 3 * step))}"
    oracle, world = Oracle.of(layout), Planned(layout, policy)
    has_full = any(g.kind is GroupKind.FULL for g in layout.groups)
    useful: set[tuple[int, bytes]] = set()
    kept_full: list[tuple[Tokens, int]] = []
    for tokens in data.draw(families(layout)):
        junction = 0
        if has_full:  # the longest beginning whose full-attention blocks are all there
            most = max((min(n, common(tokens, t)) for t, n in kept_full), default=0)
            ahead = [g.block_tokens for g in layout.groups if oracle.is_draft(g)]
            junction = world_prefix(oracle, layout, tokens, most, max(ahead, default=0))
        progress = world.save(tokens, data.draw(st.lists(st.integers(1, len(tokens)), max_size=3)))
        if has_full:
            assert progress.junctions in ((junction,), ()) and sum(progress.junctions) == junction
        kept = oracle.kept_boundaries(policy, len(tokens), None, progress.junctions)
        need = oracle.store(kept)
        useful |= world.keys(tokens, need)
        assert world.wanted == useful
        ends = [(i + 1) * layout.groups[g].block_tokens for g, i in need if is_full(layout, g)]
        kept_full.append((tokens, max(ends, default=0)))


def is_full(layout: Layout, group: int) -> bool:
    return layout.groups[group].kind is GroupKind.FULL


def world_prefix(oracle: Oracle, layout: Layout, tokens: Tokens, shared: int, ahead: int) -> int:
    """The largest boundary whose full-attention blocks, look-ahead included, lie in `shared`."""
    best = 0
    for b in range(oracle.alignment, len(tokens) - ahead + 1, oracle.alignment):
        blocks = [(g, i) for g, i in oracle.need(b) if is_full(layout, g)]
        if all((i + 1) * layout.groups[g].block_tokens <= shared for g, i in blocks):
            best = b
    return best


def test_a_prompt_that_leaves_a_known_one_makes_its_junction_a_boundary() -> None:
    layout = Layout((full(4), swa(2, 4)))
    world = Planned(layout, "auto:1000")
    trunk = fresh(0, 41)
    world.save(trunk)
    first, second = trunk[:22] + fresh(100, 9), trunk[:22] + fresh(200, 9)
    assert world.hit(first) == 0, "nobody knew that prompts would leave there"
    progress = world.save(first)
    assert progress.junctions == (20,)
    assert world.hit(second) == 20
    assert world.hit(trunk[:20] + fresh(300, 1)) == 20


def test_a_junction_is_learned_from_what_came_back_after_a_restart_too() -> None:
    layout = Layout((full(4), swa(2, 4)))
    world, trunk = Planned(layout, "end"), fresh(0, 41)
    world.save(trunk)
    again = Planned(layout, "end")
    again.index = world.index  # a restart recovers the index and nothing else
    again.save(trunk[:22] + fresh(100, 9))
    assert again.hit(trunk[:22] + fresh(200, 9)) == 20


def test_without_full_attention_the_planner_alone_knows_no_junction() -> None:
    layout = Layout((swa(4, 8), mamba(4)))
    world, trunk = Planned(layout, "auto:16"), fresh(0, 41)
    world.save(trunk)
    progress = world.save(trunk[:30] + fresh(100, 9))
    assert progress.junctions == ()
    assert world.hit(trunk[:30] + fresh(200, 9)) == 16


def test_an_answer_that_grows_keeps_rungs_and_no_end_at_every_step() -> None:
    layout = Layout((full(4), swa(2, 4)))
    world = Planned(layout, "auto:16")
    tokens = fresh(0, 60)
    world.save(tokens, fresh(20, 41), prompt_tokens=20)
    need = Oracle.of(layout).store([16, 20, 32, 48])  # the prompt's two ends, and rungs
    assert world.wanted == world.keys(tokens, need)


def test_where_few_states_are_taken_the_ladder_stands_on_those() -> None:
    layout = Layout((full(4), mamba(4), swa(2, 4)))
    world = Planned(layout, "auto:16")
    tokens, states = fresh(0, 101), {12, 28, 44, 60, 76, 92}
    world.save(tokens, sorted(states), states)
    need = Oracle.of(layout).store(sorted(states - {12}))  # 28 stands for 16, 44 for 32, …
    assert world.wanted == world.keys(tokens, need)
    assert world.hit([*tokens, 5]) == 92


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_cut_finds_the_same_states_worth_keeping(data: st.DataObject) -> None:
    layout = Layout((full(4), mamba(4), swa(2, 4)))
    tokens = fresh(0, data.draw(st.integers(1, 90)))
    states = data.draw(st.frozensets(st.sampled_from(range(4, 92, 4))))
    policy = f"auto:{data.draw(st.sampled_from([4, 7, 16, 30]))}"
    world = Planned(layout, policy)
    # The end looks for the last state of its own step alone, so that step is the whole prompt.
    world.save(tokens, data.draw(st.sampled_from([[], [2]])), set(states))
    kept = Oracle.of(layout).kept_boundaries(policy, len(tokens), states)
    assert world.wanted == world.keys(tokens, Oracle.of(layout).store(kept))


def test_the_default_bounds_what_a_hit_of_deepseek_v4_loses() -> None:
    layout = load_preset("dsv4-flash")
    assert reach.lost_tokens_at_most(layout, reach.AUTO) == 4096 - 256
    assert reach.lost_tokens_at_most(layout, reach.DENSE) == 0
    assert reach.lost_tokens_at_most(layout, reach.Policy.parse("end")) is None
    assert reach.lost_tokens_at_most(layout, reach.Policy.parse("interval:300")) == 256


@pytest.mark.parametrize(
    ("setting", "policy"), [(None, "dense"), (0, "end"), (4096, "auto"), (512, "auto:512")]
)
def test_engine_follows_the_engines_own_setting(setting: int | None, policy: str) -> None:
    assert str(reach.Policy.parse("engine").resolve(setting)) == policy
    assert reach.Policy.parse("interval:64").resolve(setting) == reach.Policy.parse("interval:64")


def test_engine_means_nothing_without_an_engine() -> None:
    layout, engine = Layout((full(4),)), reach.Policy.parse("engine")
    with pytest.raises(ConfigError, match="'engine' follows an engine"):
        Ledger(layout, arena_bytes=1 << 20, boundary_policy=engine)
    with pytest.raises(ConfigError, match="'engine' is for engines"):
        reach.boundaries(layout, engine, 100)


def serve(ledger: Ledger, owner: str, tokens: Tokens) -> int:
    """Look a prompt up and save it; the hit."""
    hashes = chain(tokens, ledger.layout.hash_block_tokens).hashes
    hit = ledger.lookup(owner, hashes, known_tokens=len(tokens)).tokens
    move = ledger.begin_save(
        owner,
        hashes,
        computed_tokens=len(tokens),
        known_tokens=len(tokens),
        block_ids=[list(range(1, 50))] * len(ledger.layout.groups),
    )
    if move is not None:
        ledger.apply(0, Copied(move.id))
        ledger.apply(0, MoveDone(move.id, np.full(len(move), Outcome.DECLINED, np.uint8)))
    ledger.release(owner)
    return hit


@pytest.mark.parametrize("groups", [(full(4), swa(2, 4)), (swa(4, 8), mamba(4)), (mamba(4),)])
def test_the_ledger_learns_junctions_by_itself(groups: tuple[Group, ...]) -> None:
    ledger = Ledger(Layout(groups), arena_bytes=200 << 12, clock=lambda: 0.0)
    trunk = fresh(0, 41)
    assert serve(ledger, "a", trunk) == 0
    assert serve(ledger, "b", trunk[:22] + fresh(100, 9)) == 0
    assert serve(ledger, "c", trunk[:22] + fresh(200, 9)) == 20
    assert serve(ledger, "d", trunk[:13] + fresh(300, 9)) in (0, 12)
    assert serve(ledger, "e", trunk[:13] + fresh(400, 9)) == 12
    ledger.rotate()
    assert serve(ledger, "f", trunk[:22] + fresh(500, 9)) == 0


def test_what_is_remembered_of_prompts_has_a_bound() -> None:
    seen = SeenBoundaries(most=12)
    old, new = chain(fresh(0, 32), 4).hashes, chain(fresh(1000, 32), 4).hashes
    seen.add(old)
    seen.add(new)
    assert len(seen) == 12
    assert all(name in seen for name in new)
    # Of the oldest, the end was forgotten first, so where its chain is known it has no hole.
    assert [name in seen for name in old] == [True] * 4 + [False] * 4
    stock = Stock(Index(1), Layout((mamba(4),)), old)
    assert stock.last_seen(seen) == 16
    assert stock.last_seen(set(old)) == 32
    assert stock.last_seen(()) == 0
