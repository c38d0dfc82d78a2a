"""Cases of kind HASH that are decided by the hash chain alone."""

from __future__ import annotations

import pytest

from tests.core.test_hashing import builtin_hash_calls, in_a_fresh_process
from tierkv import reach
from tierkv.hashing import Extras, HashChain, chain
from tierkv.layout import Group, GroupKind, Layout


def test_case_014_six_processes_with_any_hash_seed_agree() -> None:
    seen = {in_a_fresh_process(seed) for seed in (None, "0", "random") for _ in range(2)}
    assert len(seen) == 1
    assert builtin_hash_calls() == []


def test_case_016_forked_and_spawned_children_agree() -> None:
    forked, spawned = in_a_fresh_process(None, forked=True), in_a_fresh_process("random")
    assert len(forked) == 2 * 32 * 16
    assert forked == spawned


def test_case_021_adapter_salt_and_image_of_one_name_are_three_things() -> None:
    tokens = [1, 2, 3, 4]
    extras = [
        Extras(),
        Extras(adapter="X"),
        Extras(salt="X"),
        Extras(images=((0, b"X"),)),
        Extras(adapter="ab", salt="c"),
        Extras(adapter="a", salt="bc"),
        Extras(images=((0, b"ab"), (1, b"c"))),
        Extras(images=((0, b"a"), (1, b"bc"))),
    ]
    hashes = {chain(tokens, 4, extras=e).hashes[0] for e in extras}
    assert len(hashes) == len(extras)


def test_case_022_another_adapter_or_version_shares_no_hash() -> None:
    tokens = list(range(64))
    chains = [
        chain(tokens, 16, extras=Extras(adapter=name)).hashes for name in ("A@1", "B@1", "A@2")
    ]
    assert len({h for hashes in chains for h in hashes}) == 3 * 4


def test_case_023_another_tenant_shares_no_hash() -> None:
    tokens = list(range(64))
    first = chain(tokens, 16, extras=Extras(salt="s1")).hashes
    second = chain(tokens, 16, extras=Extras(salt="s2")).hashes
    assert not set(first) & set(second)


def test_case_025_ids_are_hashed_in_full_width() -> None:
    ids = [65, 321, 65 + 2**16, 65 + 2**24, 2**32 - 1]
    assert len({chain([i], 1).hashes[0] for i in ids}) == len(ids)
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match=f"token id {wrong} at position 0"):
            chain([wrong], 1)


def test_case_026_a_shortened_request_is_hashed_anew() -> None:
    layout = Layout((Group(name="f", kind=GroupKind.FULL, block_tokens=4, block_bytes=1),))
    request = [1, 2, 3, 99]
    stale = chain(request, 4)
    request = [*request[:3], 7]
    fresh = HashChain(4)
    fresh.extend(request)
    ((first, end),) = reach.keep(layout, reach.DENSE, len(request))[0].tolist()
    named = [fresh.hashes[reach.block_hash_index(layout, 0, i)] for i in range(first, end)]
    assert named == [chain([1, 2, 3, 7], 4).hashes[0]]
    assert stale.hashes[0] not in named
