"""The law of reachability, kept by the ledger: whatever way prompts are computed, what the ranks
stored gives later prompts the hits that everything computed would give, and nothing else is stored.
"""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.scale import examples
from tests.core.simulator import Key, Simulator, no_fault
from tests.core.test_reach_law import groups, make_layout
from tierkv.blocks import Outcome
from tierkv.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return make_layout([draw(groups(i)) for i in range(draw(st.integers(1, 4)))])


@st.composite
def prompts(draw: st.DrawFn, layout: Layout, count: int = 3) -> list[list[int]]:
    """Prompts that share beginnings: each branches off an earlier one somewhere."""
    step = layout.alignment_tokens
    made: list[list[int]] = []
    for n in range(draw(st.integers(1, count))):
        base = draw(st.sampled_from(made)) if made else []
        shared = draw(st.integers(0, len(base)))
        fresh = draw(st.integers(1, 3 * step + 2))
        made.append(base[:shared] + [1000 * (n + 1) + i for i in range(fresh)])
    return made


def cuts_of(data: st.DataObject, tokens: list[int]) -> list[int]:
    return data.draw(st.lists(st.integers(1, len(tokens)), max_size=5), label="cuts")


def later(layout: Layout, tokens: list[int]) -> list[list[int]]:
    """The same prompt, a longer one, much longer ones, and ones that branch off."""
    step, n = layout.alignment_tokens, len(tokens)
    new = [9_000_000 + i for i in range(3 * step)]
    return [
        tokens,
        tokens + new[:1],
        tokens + new,
        *(tokens[:s] + new for s in {n // 2, n - 1, n - n % step}),
    ]


def room_for(layout: Layout, tokens: list[list[int]]) -> int:
    """Slots of an arena whose budget just holds any one prompt and what follows it."""
    longest = max(map(len, tokens)) + 3 * layout.alignment_tokens
    blocks = sum(longest // g.block_tokens + 1 for g in layout.groups)
    return blocks * 8 // 7 + 1


@settings(max_examples=examples(250), deadline=None)
@given(st.data(), layouts(), st.sampled_from([1, 1, 2]))
def test_without_faults_every_hit_is_that_of_everything_and_nothing_is_wasted(
    data: st.DataObject, layout: Layout, ranks: int
) -> None:
    made = data.draw(prompts(layout), label="prompts")
    world = Simulator(layout, slots=room_for(layout, made), ranks=ranks)
    useful: set[Key] = set()
    for n, tokens in enumerate(made):
        decoded = data.draw(st.sampled_from([0, 0, min(5, len(tokens) - 1)]), label="decoded")
        if any(world.oracle.is_draft(g) for g in layout.groups):
            decoded = 0  # nobody knows that the look-ahead will come; later the window is gone
        world.run(
            f"r{n}",
            tokens,
            cuts_of(data, tokens),
            every_state=data.draw(st.booleans(), label="every state"),
            decoded=decoded,
            patient=True,
        )
        useful |= world.useful(tokens)
        assert world.stored <= useful, "stored for nothing"
    for tokens in made:
        for prompt in later(layout, tokens):
            assert world.hit(prompt) == world.best(prompt, world.computed)
    world.assert_settled()


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), layouts())
def test_a_prefix_that_the_engine_holds_itself_is_kept_as_well(
    data: st.DataObject, layout: Layout
) -> None:
    (tokens,) = data.draw(prompts(layout, count=1))
    local = data.draw(st.integers(0, (len(tokens) - 1) // layout.alignment_tokens))
    world = Simulator(layout, slots=room_for(layout, [tokens]))
    world.run(
        "r", tokens, cuts_of(data, tokens), local=local * layout.alignment_tokens, patient=True
    )
    assert world.stored <= world.useful(tokens)
    for prompt in later(layout, tokens):
        assert world.hit(prompt) == world.best(prompt, world.computed)
        for held in range(0, len(prompt), layout.alignment_tokens):
            hit = world.hit(prompt, local=held)
            assert max(hit, held) == max(world.best(prompt, world.computed, local=held), held)


@settings(max_examples=examples(250), deadline=None)
@given(st.data(), layouts(), st.sampled_from([1, 2]), st.randoms(use_true_random=False))
def test_after_faults_everything_is_offered_again_and_nothing_for_ever(
    data: st.DataObject, layout: Layout, ranks: int, dice: Random
) -> None:
    made = data.draw(prompts(layout), label="prompts")
    world = Simulator(layout, slots=room_for(layout, made), ranks=ranks)
    cuts = [cuts_of(data, tokens) for tokens in made]

    def fault(rank: int, key: Key) -> Outcome:
        return dice.choice([Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.DECLINED])

    for n in range(data.draw(st.integers(1, 6), label="faulty requests")):
        which = data.draw(st.integers(0, len(made) - 1), label="which")
        world.run(
            f"r{n}",
            made[which],
            cuts[which],
            fault=fault,
            answer_now=lambda: dice.random() < 0.5,
        )
        if data.draw(st.booleans(), label="answers come"):
            world.answer_waiting(fault)
    world.answer_waiting(fault)
    world.ledger.rewrite()
    world.obey()
    for n, tokens in enumerate(made):
        for prompt in later(layout, tokens):
            assert world.hit(prompt) == world.best(prompt, world.stored), "something was forgotten"
        world.run(f"again{n}", tokens, cuts[n], patient=True)
        for prompt in later(layout, tokens)[:3]:
            assert world.hit(prompt) == world.best(prompt, world.computed)
    before = world.saves
    for n, tokens in enumerate(made):
        world.run(f"once more{n}", tokens, cuts[n], fault=no_fault, patient=True)
        world.run(f"twice more{n}", tokens, cuts[n], fault=no_fault, patient=True)
        for prompt in later(layout, tokens):
            assert world.hit(prompt) == world.best(prompt, world.stored)
    assert world.saves - before <= len(made), "what is stored is offered again and again"
    world.assert_settled()
