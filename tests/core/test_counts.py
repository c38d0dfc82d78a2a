"""What counters say of the storage tier, they say of it alone."""

from __future__ import annotations

import pytest

from tests.core.simulator import Simulator
from tests.core.tables import full
from tests.core.test_ledger import declined, prompt
from tierkv.layout import Layout

FULL = Layout((full(16),))


@pytest.mark.parametrize("has_tier", [True, False])
def test_a_save_fails_only_where_there_is_a_tier_to_write_to(has_tier: bool) -> None:
    world = Simulator(FULL, slots=8, has_tier=has_tier)
    world.run("a", prompt(1, 5), [], fault=declined)
    stats = world.ledger.stats()
    assert stats["saved_blocks"] == 5
    assert stats["stored_blocks"] == 0
    assert bool(stats["failed_save_blocks"]) == has_tier


@pytest.mark.parametrize("has_tier", [True, False])
def test_blocks_in_pinned_memory_are_hit_but_not_loaded_from_the_tier(has_tier: bool) -> None:
    world = Simulator(FULL, slots=8, has_tier=has_tier)
    first = prompt(1, 5)
    world.run("a", first, [])
    world.run("b", first, [])
    stats = world.ledger.stats()
    assert stats["hit_blocks"] == 5
    assert stats["loaded_blocks"] == stats["loaded_bytes"] == 0


def test_of_a_hit_from_both_only_what_the_tier_gave_is_loaded() -> None:
    world = Simulator(FULL, slots=8)
    first, long = prompt(1, 6), prompt(2, 4)
    world.run("a", first, [])
    world.run("b", long, [])  # takes the place of the first one's end
    world.run("c", first, [])
    stats = world.ledger.stats()
    assert stats["hit_blocks"] == 6
    assert 0 < stats["loaded_blocks"] < 6
