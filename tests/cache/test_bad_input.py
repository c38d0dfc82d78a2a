"""What a user in a hurry gives the async API: one clear error, and nothing leased or lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tierkv import Group, GroupKind, Layout

LAYOUT = Layout((Group(name="a", kind=GroupKind.FULL, block_tokens=4, block_bytes=5000),))
TOKENS = list(range(25))


def pages() -> dict[str, list[torch.Tensor]]:
    return {"a": [torch.ones((8, 5000), dtype=torch.uint8)]}


def open_cache(url: str = "", **options: Any) -> tierkv.Cache:
    return tierkv.open(
        url, layout=LAYOUT, namespace="m@1", **{"pinned": "1MiB", "policy": "dense"} | options
    )


@pytest.mark.parametrize("bad", [2**31, -1, "x", 1.5])
async def test_a_block_id_that_is_none_is_refused_before_anything_is_claimed(bad: Any) -> None:
    async with open_cache() as cache:
        with pytest.raises(ValueError, match=r"group 'a': entry 0 is .*; write a block id"):
            await cache.save(TOKENS, pages(), {"a": [bad] * 6})
        assert cache.stats()["pinned_bytes"] == 0
        saved = await cache.save(TOKENS, pages(), {"a": [*range(6)]})
        assert saved.blocks == 6
        hit = await cache.lookup(TOKENS)
        with pytest.raises(ValueError, match="write a block id"):
            await cache.load(hit, pages(), {"a": [bad] * 6})
        assert (await cache.load(hit, pages(), {"a": [*range(6)]})).tokens == 24
        assert cache.stats()["leased_blocks"] == 0


async def test_numpy_ids_are_block_ids() -> None:
    async with open_cache() as cache:
        await cache.save(TOKENS, pages(), {"a": list(np.arange(6, dtype=np.int32))})
        assert (await cache.lookup(TOKENS)).tokens == 24


async def test_one_page_for_two_blocks_is_refused_for_a_load() -> None:
    async with open_cache() as cache:
        await cache.save(TOKENS, pages(), {"a": [*range(6)]})
        hit = await cache.lookup(TOKENS)
        with pytest.raises(ValueError, match="two blocks of the hit have the same page"):
            await cache.load(hit, pages(), {"a": [1] * 6})


async def test_a_hit_fits_only_the_cache_it_is_from_and_only_once() -> None:
    async with open_cache() as one, open_cache() as two:
        for cache in (one, two):
            await cache.save(TOKENS, pages(), {"a": [*range(6)]})
        hit, other = await one.lookup(TOKENS), await two.lookup(TOKENS)
        with pytest.raises(KeyError, match="is of another cache"):
            await two.load(hit, pages(), {"a": [*range(6)]})
        assert (await one.load(hit, pages(), {"a": [*range(6)]})).tokens == 24
        with pytest.raises(KeyError, match="it ended"):
            await one.load(hit, pages(), {"a": [*range(6)]})
        other.release()


async def test_a_hit_that_was_dropped_delays_others_no_longer_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/kv?capacity=1MiB"
    async with open_cache(url) as cache:
        await cache.save(TOKENS, pages(), {"a": [*range(6)]})
        await cache.flush()
    monkeypatch.setattr("tierkv.cache._ASK_AGAIN_S", 0.01)
    async with open_cache(url) as cache:
        cache._ledger._pending_s = 0.05
        dropped = await cache.lookup(TOKENS)  # promised from the tier, never loaded, never released
        second = await cache.lookup(TOKENS)
        assert second.miss is not None
        dropped.release()
        assert (await cache.lookup(TOKENS)).tokens == 24


@pytest.mark.parametrize("bad", [-4, 7])
async def test_local_tokens_off_the_alignment_are_refused(bad: int) -> None:
    async with open_cache() as cache:
        with pytest.raises(ValueError, match="write a multiple of the alignment, 4"):
            await cache.lookup(TOKENS, local_tokens=bad)


@pytest.mark.parametrize("bad", [-1, 26])
async def test_computed_tokens_outside_the_prompt_are_refused(bad: int) -> None:
    async with open_cache() as cache:
        with pytest.raises(ValueError, match="the prompt has 25"):
            await cache.save(TOKENS, pages(), {"a": [*range(6)]}, computed_tokens=bad)


@pytest.mark.parametrize("bad", [torch.ones(8, 5000), [np.ones((8, 5000))]])
async def test_pages_that_are_no_lists_of_tensors_are_refused(bad: Any) -> None:
    async with open_cache() as cache:
        with pytest.raises(tierkv.LayoutError, match="group 'a': write a list of torch tensors"):
            await cache.save(TOKENS, {"a": bad}, {"a": [*range(6)]})


def test_an_arena_that_holds_not_even_one_block_is_refused() -> None:
    with pytest.raises(tierkv.CapacityError, match=r"hold no block .* write at least 12288"):
        open_cache(pinned=8192)
    open_cache(pinned=12288)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_bytes", 4096.5), ("block_tokens", "4"), ("kind", "fulll"), ("window_tokens", True)],
)
def test_a_group_with_a_field_that_cannot_be_is_refused(field: str, value: Any) -> None:
    good: dict[str, Any] = {"name": "a", "kind": "full", "block_tokens": 4, "block_bytes": 4096}
    with pytest.raises(tierkv.LayoutError, match=r"group 'a': .*; (write|kinds)"):
        Group(**good | {field: value})


def test_a_kind_written_as_text_is_that_kind() -> None:
    assert not Group(name="a", kind="scratch", block_tokens=4, block_bytes=1).reusable  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["hash_block_tokens", "alignment_tokens"])
def test_a_negative_unit_or_alignment_is_refused(field: str) -> None:
    with pytest.raises(tierkv.LayoutError, match=f"layout: {field} is -4"):
        Layout(LAYOUT.groups, **{field: -4})


async def test_a_block_that_is_declined_again_and_again_is_counted_once() -> None:
    async with open_cache(pinned=5 * 8192) as cache:
        for n in range(4):
            await cache.save(
                [*range(n, n + 400)], {"a": [torch.ones((100, 5000)).byte()]}, {"a": [*range(100)]}
            )
        assert cache.stats()["declined_blocks"] <= 400
