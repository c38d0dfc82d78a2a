"""Cases of kind NS, held against every registered backend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tierkv import registry
from tierkv.backend import Backend
from tierkv.blocks import Keys, Outcome
from tierkv.layout import Group, GroupKind, Layout
from tierkv.namespace import Namespace
from tierkv.testing import assert_same, load, make_blocks, make_context, save, sizes

BYTES = [4096]
LAYOUT = Layout((Group(name="f", kind=GroupKind.FULL, block_tokens=16, block_bytes=4096),))


@contextlib.asynccontextmanager
async def opened(url: str, namespace: bytes, rank: int = 0) -> AsyncIterator[Backend]:
    backend = registry.make_backend(url)
    await backend.open(make_context(BYTES, namespace=namespace, rank=rank))
    try:
        yield backend
    finally:
        await backend.close()


@pytest.mark.parametrize("change", [{"kv_dtype": "fp8_e4m3"}, {"salt": "b"}, {"identity": "r2"}])
async def test_case_007_another_kv_dtype_misses_in_every_backend(
    tier: Callable[[], str], change: dict[str, str]
) -> None:
    told: dict[str, Any] = {"model": "m", "identity": "r1", "kv_dtype": "bfloat16"}
    before = Namespace(layout=LAYOUT, **told).digest
    after = Namespace(layout=LAYOUT, **{**told, **change}).digest
    blocks = make_blocks(3, BYTES)
    async with opened(tier(), before) as a, opened(tier(), after) as b:
        await save(a, blocks)
        assert not (await b.contains(Keys.of(blocks))).any()
        assert set((await load(b, sizes(blocks))).values()) == {Outcome.MISSING}


async def test_case_008_ranks_with_equal_hashes_keep_their_own_bytes(
    tier: Callable[[], str],
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(opened(tier(), b"n" * 32, rank)) for rank in range(4)
        ]
        for rank, backend in enumerate(ranks):
            await save(backend, make_blocks(3, BYTES, variant=rank))
        for rank, backend in enumerate(ranks):
            own = make_blocks(3, BYTES, variant=rank)
            assert_same(await load(backend, sizes(own)), own)


async def test_case_009_pipeline_stages_with_equal_hashes_keep_their_own_bytes(
    tier: Callable[[], str],
) -> None:
    stages = [
        Namespace(layout=LAYOUT, model="m", identity="r1", pp_size=2, pp_rank=stage).digest
        for stage in range(2)
    ]
    blocks = [make_blocks(3, BYTES, variant=stage) for stage in range(2)]
    async with opened(tier(), stages[0]) as first, opened(tier(), stages[1]) as second:
        await save(first, blocks[0])
        assert set((await load(second, sizes(blocks[1]))).values()) == {Outcome.MISSING}
        await save(second, blocks[1])
        assert_same(await load(first, sizes(blocks[0])), blocks[0])
        assert_same(await load(second, sizes(blocks[1])), blocks[1])
