"""Small faults planted in `reach` must be seen by the law, or the law proves nothing."""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.oracle import Block, Oracle
from tierkv import reach
from tierkv.layout import Group, GroupKind, Layout

SOURCE = Path(reach.__file__).read_text()

MUTATIONS = {
    "a window one token short": (
        "group.window_tokens - 1 + group",
        "group.window_tokens - 2 + group",
    ),
    "a window one token long": ("group.window_tokens - 1 + group", "group.window_tokens + group"),
    "retained tokens are forgotten": (" + group.extra_tokens", ""),
    "a compressor is always its window": ("1 if falls_back_to_window(layout, index) else", "1 or"),
    "a compressor is never its window": (
        "kept = 1 if falls_back",
        "kept = group.ratio if falls_back",
    ),
    "a state is a run of two": ("return group.block_tokens", "return 2 * group.block_tokens"),
    "a chunk is a window": (
        "boundary // row.chunk_tokens * row.chunk_tokens",
        "boundary - row.chunk_tokens",
    ),
    "the look-ahead block is forgotten": (
        "layout.lookahead_blocks, strict",
        "[0] * len(layout.groups), strict",
    ),
    "a look-ahead for every group": (
        "layout.lookahead_blocks, strict",
        "[1] * len(layout.groups), strict",
    ),
    "a look-ahead beyond the known tokens": (
        "top = known_tokens - lookahead_tokens(layout)",
        "top = known_tokens",
    ),
    "the last token is not computed again": (
        "top = known_tokens - 1 if",
        "top = known_tokens if",
    ),
    "scratch vetoes and is stored": (
        "GroupKind.SCRATCH:\n            return 0",
        "GroupKind.SCRATCH:\n            return 1",
    ),
    "the whole prompt's last boundary is lost": (
        "min(final, last) + 1, dtype",
        "min(final, last), dtype",
    ),
    "end forgets the same prompt again": (
        "[min(reachable, max(0, end - 1) // step), reachable]",
        "[reachable]",
    ),
    "end forgets the longer prompt": ("// step), reachable]", "// step)]"),
    "states that were never made are kept": (
        "states = produced is not None and has",
        "states = False and has",
    ),
    "a rung without a state is dropped": ("np.diff(passed, prepend=0) > 0", "passed < 0"),
    "a state after its rung is another rung": ("prepend=0) > 0]", "prepend=0) >= 0]"),
    "touching ranges are lost": ("firsts[1:] > ends[:-1]", "firsts[1:] >= ends[:-1] + 9"),
    "a candidate is jumped over": (
        "limit // step * step\n    return 0",
        "(limit // step - 1) * step\n    return 0",
    ),
    "the jump goes too far": ("missing - row.ahead_blocks) *", "missing - 1 - row.ahead_blocks) *"),
    "a full group's prefix may have a hole": (
        "if not self._ask(group, b)",
        "if b != 2 and not self._ask(group, b)",
    ),
    "a tail is looked for one segment too low": (
        "range(high, low, -self._step)",
        "range(high - self._step, low, -self._step)",
    ),
    "a tail is looked for in the next block": (
        "self._block_tokens[g] - 1) for",
        "self._block_tokens[g]) for",
    ),
    "auto forgets its ladder": (
        "policy.kind is not PolicyKind.END:",
        "policy.kind is PolicyKind.INTERVAL:",
    ),
    "auto forgets the end": (
        "policy.kind is not PolicyKind.INTERVAL:",
        "policy.kind is PolicyKind.END:",
    ),
    "junctions are forgotten": ("for j in junctions]", "for j in ()]"),
    "the answer's end is kept at every step": (
        "known_tokens if end_tokens is None else end_tokens",
        "known_tokens",
    ),
    "the first blocks of a step are lost": ("ready > after_tokens)", "ready > after_tokens + 1)"),
    "a step offers what an earlier one did": ("(ready > after_tokens) & ", ""),
    "a cut begins one boundary late": ("// step + 1, max(0, upto", "// step + 2, max(0, upto"),
    "a cut ends beyond what is computed": (
        "max(0, upto_tokens - ahead) // step",
        "max(0, upto_tokens) // step",
    ),
    "a cut offers earlier states": ("(kept >= first) & ", ""),
    "a cut's first rung is lost": (
        "-(-first * step // interval), ((",
        "-(-first * step // interval) + 1, ((",
    ),
    "a boundary is looked for too late": (
        "// step + 1) * step + ahead",
        "// step + 2) * step + ahead",
    ),
    "a window's need by itself is one token short": (
        "np.maximum(0, at - row.back_tokens)",
        "np.maximum(0, at - row.back_tokens + 1)",
    ),
    "a step offers blocks it has not computed": (
        "ready = at + lookahead_tokens(layout)",
        "ready = at",
    ),
}


def mutant(old: str, new: str) -> Any:
    assert SOURCE.count(old) >= 1, f"the planted fault no longer fits the source: {old!r}"
    module = types.ModuleType("reach_mutant")
    sys.modules["reach_mutant"] = module
    exec(compile(SOURCE.replace(old, new), "reach_mutant.py", "exec"), module.__dict__)
    return module


def layouts() -> Iterator[Layout]:
    """A fixed list: every kind alone and in company, marked and not."""

    def group(
        name: str, kind: GroupKind, block: int, draft: bool = False, **geometry: int
    ) -> Group:
        return Group(
            name=name, kind=kind, block_tokens=block, block_bytes=1, draft=draft, **geometry
        )

    full = group("full", GroupKind.FULL, 4)
    tails = [
        group("win", GroupKind.SLIDING_WINDOW, 2, window_tokens=5),
        group("wide", GroupKind.SLIDING_WINDOW, 2, window_tokens=13, extra_tokens=2),
        group("one", GroupKind.SLIDING_WINDOW, 2, window_tokens=1, draft=True),
        group("chunk", GroupKind.CHUNKED_LOCAL, 2, chunk_tokens=6),
        group("state", GroupKind.RECURRENT, 4),
        group("csa", GroupKind.COMPRESSOR, 2, window_tokens=4, ratio=2),
        group("odd", GroupKind.COMPRESSOR, 2, window_tokens=6, ratio=3),
        group("fulldraft", GroupKind.FULL, 2, draft=True),
        group("scratch", GroupKind.SCRATCH, 1, draft=True),
    ]
    yield Layout((full,))
    for tail in tails:
        yield Layout((full, tail))
        if tail.reusable:
            yield Layout((tail,))
    for first, second in itertools.pairwise(tails):
        yield Layout((full, first, second))


def check_law(r: Any) -> None:
    """Both halves of the law, and cuts into steps, for the fixed layouts."""
    for layout in layouts():
        oracle = Oracle.of(layout)
        for known in (3, 4, 8, 9, 17, 21):
            for policy in ("dense", "end", "interval:8", "auto:12"):
                for produced in (None, frozenset({8, 16})):
                    check_prompt(r, layout, oracle, known, policy, produced)
        for policy in ("end", "auto:12"):
            kept = r.boundaries(
                layout, r.Policy.parse(policy), 40, junctions=[6, 29], end_tokens=20
            )
            assert kept.tolist() == oracle.kept_boundaries(policy, 40, None, [6, 29], 20)


def check_prompt(
    r: Any,
    layout: Layout,
    oracle: Oracle,
    known: int,
    policy: str,
    produced: frozenset[int] | None,
) -> None:
    parsed = r.Policy.parse(policy)
    stored = blocks(r.keep(layout, parsed, known, produced))
    assert stored == oracle.store(oracle.kept_boundaries(policy, known, produced))
    at, passed = r.boundaries(layout, parsed, known, produced), []
    for after, upto in ((0, known // 2), (known // 2, known - 1), (known - 1, known)):
        new = r.became_available(layout, at, after, upto)
        cut = r.boundaries(layout, parsed, known, produced, after_tokens=after, upto_tokens=upto)
        assert cut.tolist() == new.tolist()
        needed = blocks(r.needs(layout, new))
        assert all((i + 1) * layout.groups[g].block_tokens <= upto for g, i in needed)
        assert not len(new) or after < r.next_boundary(layout, after) <= upto
        passed += new.tolist()
    assert passed == at.tolist()
    for g in range(len(layout.groups)):
        firsts, ends = r.need_each(layout, g, at)
        each = list(zip(firsts.tolist(), ends.tolist(), strict=True))
        assert each == [r.need(layout, g, b) for b in at.tolist()]
    whole = oracle.everything(known + 4)
    for shorter in (known - 1, known):  # another prompt stored more than this one knows
        ours = r.longest_hit(layout, shorter, lambda g, i: (g, i) in whole)
        assert ours == oracle.hit(shorter, whole)
    rng = random.Random(known)
    for known_later in (known, known + 4):
        for lost in (set(), set(rng.sample(sorted(stored), len(stored) // 3))):
            have = stored - lost
            ours = r.longest_hit(layout, known_later, lambda g, i, h=have: (g, i) in h)
            assert ours == oracle.hit(known_later, have)


def blocks(ranges: list[Any]) -> set[Block]:
    for rows in ranges:
        flat = rows.reshape(-1).tolist()
        assert all(low < high for low, high in itertools.pairwise(flat))
    return {(g, i) for g, rows in enumerate(ranges) for a, b in rows.tolist() for i in range(a, b)}


def test_the_unchanged_source_passes_the_quick_law() -> None:
    check_law(mutant("import functools", "import functools"))


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_law_turns_red_when(name: str) -> None:
    module = mutant(*MUTATIONS[name])
    with pytest.raises(AssertionError):
        check_law(module)
