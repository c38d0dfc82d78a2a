"""The index seen along a prompt answers what a look at every single block would."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.scale import examples
from tests.core.tables import full, swa
from tests.core.test_reach_law import groups, make_layout
from tierkv import planner, reach
from tierkv.hashing import chain
from tierkv.index import Index, Pinned, Tier
from tierkv.layout import Layout
from tierkv.stock import Stock


def names_of(layout: Layout, tokens: int) -> list[bytes]:
    return chain(list(range(tokens)), layout.hash_block_tokens).hashes


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_a_hit_in_the_index_is_the_hit_of_asking_block_by_block(data: st.DataObject) -> None:
    layout = make_layout([data.draw(groups(i)) for i in range(data.draw(st.integers(1, 4)))])
    known = data.draw(st.integers(1, 40 * layout.alignment_tokens))
    hashes = names_of(layout, known)[: data.draw(st.sampled_from([3, 10**6]))]
    dice = data.draw(st.randoms(use_true_random=False))
    share = data.draw(st.sampled_from([0.5, 0.9, 0.99, 1.0]))
    index, there = Index(len(layout.groups), capacity=4), set()
    for g, group in enumerate(layout.groups):
        for block in range(known // group.block_tokens if group.reusable else 0):
            at = reach.block_hash_index(layout, g, block)
            if at >= len(hashes):
                break
            if dice.random() < share:
                there.add((g, block))
                row = index.add(g, hashes[at])
                state = dice.choice(["pinned", "filling", "tier", "both"])
                index.pinned[row] = {
                    "pinned": Pinned.RESIDENT,
                    "filling": Pinned.FILLING,
                    "both": Pinned.RESIDENT,
                }.get(state, Pinned.ABSENT)
                index.tier[row] = Tier.RESIDENT if state in ("tier", "both") else Tier.WRITING
            elif dice.random() < 0.5:  # known by name, but nowhere to be read
                row = index.add(g, hashes[at])
                index.tier[row] = dice.choice([Tier.WRITING, Tier.SUSPENDED, Tier.ABSENT])
    local = data.draw(st.sampled_from([0, 0, known // 2]))
    cap = data.draw(st.none() | st.integers(0, known))
    plan = planner.plan_hit(
        index, layout, hashes, known_tokens=known, local_tokens=local, max_boundary=cap
    )
    one_by_one = reach.longest_hit(
        layout, known, lambda g, b: (g, b) in there, local_tokens=local, max_boundary=cap
    )
    assert plan.tokens == one_by_one
    wanted = planner.load_ranges(layout, plan.tokens, local) if plan.tokens > local else []
    blocks = [(g, b) for g, first, end in wanted for b in range(first, end)]
    assert list(zip(plan.groups.tolist(), plan.blocks.tolist(), strict=True)) == blocks
    assert plan.rows.tolist() == [
        index.find(g, hashes[reach.block_hash_index(layout, g, b)]) for g, b in blocks
    ]
    assert plan.from_tier.tolist() == [not index.pinned[r] for r in plan.rows]
    assert plan.pending == any(index.pinned[r] == Pinned.FILLING for r in plan.rows)


class Counted(dict[bytes, int]):
    """A table of rows that counts how often it is asked."""

    asked = 0

    def get(self, name: bytes, default: int = -1) -> int:  # type: ignore[override]
        # the finder is always called with a default
        self.asked += 1
        return super().get(name, default)


def counted_index(groups: int) -> tuple[Index, list[Counted]]:
    index = Index(groups)
    tables = [Counted() for _ in range(groups)]
    index._row_of[:] = tables
    return index, tables


def test_where_nothing_is_there_few_questions_are_asked() -> None:
    layout = Layout((full(256), swa(64, 128)))
    index, tables = counted_index(2)
    names = [n.to_bytes(32, "big") for n in range(1_000_000 // 64)]
    assert Stock(index, layout, names).first_missing(0, 0, 3906) == 0
    assert planner.plan_hit(index, layout, names, known_tokens=1_000_000).tokens == 0
    assert sum(t.asked for t in tables) < 100


def test_a_prefix_without_tails_costs_one_question_a_boundary() -> None:
    layout = Layout((full(256), swa(64, 128), swa(64, 1024, "wide")))
    index, tables = counted_index(3)
    names = [n.to_bytes(32, "big") for n in range(1_000_000 // 64)]
    rows = index.add_many(np.zeros(3906, np.uint16), names[3::4][:3906])
    index.tier[rows] = Tier.RESIDENT
    for group in (1, 2):
        index.add(group, bytes(31) + b"x")  # an empty table is not asked at all
    assert planner.plan_hit(index, layout, names, known_tokens=1_000_000).tokens == 0
    assert [t.asked for t in tables] == [3906, 3906, 0]
