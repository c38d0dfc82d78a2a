"""The codec over every backend: all of it comes back, whatever the codec was and is."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tierkv
from tierkv import Group, GroupKind, Layout
from tierkv.backend import Backend, BlockBatch, SupportsVerify
from tierkv.blocks import Keys, Outcome
from tierkv.errors import ConfigError
from tierkv.registry import make_backend
from tierkv.storage import StorageConfig
from tierkv.testing import FaultyBackend, never_blocked
from tierkv.testing.batches import (
    Key,
    agree_at_once,
    assert_guards_untouched,
    assert_same,
    empty_batch,
    make_batch,
    make_key,
    sizes,
)
from tierkv.testing.contract import ThreadJobs, cancelled_at_job
from tierkv.tier import Tier
from tierkv_backends.memory import MemoryBackend

BLOCK_BYTES = (40_000, 30_001, 100)
"""Shuffling pays, nothing pays, too small."""


@pytest.fixture(params=["memory", "file", "nvme", "sqlite"])
def url(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, sample_package: pathlib.Path
) -> str:
    options = {"file": "?capacity=64MiB", "nvme": "?capacity=64MiB&segment=1MiB"}
    return f"{request.param}://{tmp_path}/kv{options.get(request.param, '')}"


def payload(key: Key) -> bytes:
    group, block_hash = key
    rng = np.random.default_rng(list(block_hash[:8]))
    if group == 1:
        return rng.bytes(BLOCK_BYTES[1])
    return (rng.integers(0, 200, BLOCK_BYTES[group] // 2) + 0x4100).astype("<i2").tobytes()


def blocks_of(n: int, first: int = 0) -> dict[Key, bytes]:
    keys = [make_key(i, i % 3) for i in range(first, first + n)]
    return {key: payload(key) for key in keys}


@asynccontextmanager
async def opened(url: str, codec: str, backend: Backend | None = None) -> AsyncIterator[Tier]:
    config = StorageConfig(
        url=url,
        namespace=b"\x01" * 32,
        namespace_text="test",
        arena_bytes=4096,
        block_bytes=BLOCK_BYTES,
        codec=codec,
    )
    tier = Tier(backend or make_backend(url), config)
    await tier.open(agree_at_once, clear=False)
    try:
        yield tier
    finally:
        await tier.close()


async def save(tier: Tier, blocks: Mapping[Key, bytes]) -> BlockBatch:
    batch = make_batch(blocks)
    before = bytes(batch.arena)
    assert (await tier.save(batch)).tolist() == [Outcome.DONE] * len(blocks)
    assert bytes(batch.arena) == before
    return batch


async def load(tier: Tier, wanted: Mapping[Key, int]) -> dict[Key, bytes | Outcome]:
    batch = empty_batch(wanted)
    outcomes = await tier.load(batch)
    assert_guards_untouched(batch)
    return {
        key: bytes(batch.payload(i)) if outcomes[i] == Outcome.DONE else Outcome(int(outcomes[i]))
        for i, key in enumerate(wanted)
    }


async def test_blocks_come_back_whatever_the_codec_was_and_is(url: str) -> None:
    before, during, after = (blocks_of(9, first) for first in (0, 100, 200))
    backend = None
    if url.startswith("memory"):

        class Kept(MemoryBackend):
            async def close(self) -> None:
                """Stays as it is."""

        backend = Kept()
    stored: dict[Key, bytes] = {}
    for codec, blocks in (("none", before), ("lz4", during), ("none", after)):
        async with opened(url, codec, backend) as tier:
            assert_same(await load(tier, sizes(stored)), stored)
            batch = await save(tier, blocks)
            encoded = (batch.records["codec"] != 0).tolist()
            assert encoded == [codec == "lz4" and key[0] == 0 for key in blocks]
            stored |= blocks
            assert_same(await load(tier, sizes(stored)), stored)
            await tier.refresh_usage()
            assert tier.usage["tier_mode_codec"] == codec
    async with opened(url, "lz4", backend) as tier:
        assert_same(await load(tier, sizes(stored)), stored)
        await save(tier, before)  # what is there already is left as it is
        assert_same(await load(tier, sizes(stored)), stored)
        missing = make_key(999, 0)
        assert await load(tier, {missing: BLOCK_BYTES[0]}) == {missing: Outcome.MISSING}


@pytest.mark.parametrize("scheme", ["memory", "file", "nvme"])
async def test_the_quota_counts_what_is_stored_not_what_it_was(
    tmp_path: pathlib.Path, scheme: str
) -> None:
    segment = "&segment=1MiB" if scheme == "nvme" else ""
    url = f"{scheme}://{tmp_path}/kv?capacity=4MiB{segment}"
    zeros = {make_key(i, 0): bytes(BLOCK_BYTES[0]) for i in range(200)}  # 8 MB
    async with opened(url, "lz4") as tier:
        await save(tier, zeros)
        assert_same(await load(tier, sizes(zeros)), zeros)
        await tier.refresh_usage()
        assert tier.usage["tier_blocks"] == 200
        assert tier.usage["tier_payload_bytes"] < 100_000
        assert tier.usage["tier_physical_bytes"] <= 4 << 20
        assert tier.count["codec_encoded_blocks"] == 200
        assert tier.count["codec_bytes_before"] == 200 * BLOCK_BYTES[0]
        assert tier.count["codec_bytes_after"] == tier.usage["tier_payload_bytes"]


@pytest.mark.parametrize("scheme", ["file", "nvme"])
async def test_verify_proves_encoded_blocks_and_finds_a_damaged_one(
    tmp_path: pathlib.Path, scheme: str
) -> None:
    segment = "&segment=1MiB" if scheme == "nvme" else ""
    url = f"{scheme}://{tmp_path}/kv?capacity=64MiB{segment}"
    blocks = blocks_of(9)
    async with opened(url, "lz4") as tier:
        await save(tier, blocks)
    backend = make_backend(url)
    assert isinstance(backend, SupportsVerify)
    found = await backend.verify(lambda done, total: None)
    assert (found.blocks, found.corrupt, found.skipped) == (9, (), ())
    assert found.payload_bytes < sum(sizes(blocks).values())
    wanted = make_batch(blocks)
    first = next(iter(blocks))
    async with opened(url, "none") as tier:
        await tier._coder.load(wanted)  # for its records
        stored = int(wanted.records["stored_bytes"][0])
    damaged(tmp_path / "kv", first, stored, scheme)
    found = await make_backend(url).verify(lambda done, total: None)  # type: ignore[attr-defined]  # checked above
    assert [(bad.group, bad.hash_hex) for bad in found.corrupt] == [(0, first[1].hex())]
    async with opened(url, "none") as tier:
        corrupt = {**blocks, first: Outcome.CORRUPT}
        assert_same(await load(tier, sizes(blocks)), corrupt)
        assert_same(await load(tier, sizes(blocks)), {**corrupt, first: Outcome.MISSING})


def damaged(root: pathlib.Path, key: Key, stored_bytes: int, scheme: str) -> None:
    """Flip a bit in the middle of a block on the disk."""
    if scheme == "file":
        (path,) = root.rglob(f"{key[1].hex()}.kv")
        at = 64 + stored_bytes // 2
    else:
        (path,) = root.rglob("seg-*1.tkv")
        header = path.read_bytes()
        entry = header.index(key[1], 4096)  # the first extent's table
        at = int.from_bytes(header[entry + 64 : entry + 72], "little") + stored_bytes // 2
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def test_a_read_that_fails_fails_only_the_encoded_blocks() -> None:
    faulty = FaultyBackend(MemoryBackend())
    blocks = blocks_of(6)
    async with opened("memory://", "lz4", faulty) as tier:
        await save(tier, blocks)
        faulty.fail("read", RuntimeError("unforeseen"), nth=2)
        expected = {k: data if k[0] else Outcome.FAILED for k, data in blocks.items()}
        assert_same(await load(tier, sizes(blocks)), expected)
        assert tier.count["unforeseen_errors"] == 1
        assert_same(await load(tier, sizes(blocks)), blocks)


async def test_a_backend_that_knows_no_lengths_is_refused_in_one_line() -> None:
    class Plain(MemoryBackend):
        lengths = None  # type: ignore[assignment]  # as if it were not there

    with pytest.raises(ConfigError) as caught:
        async with opened("memory://x", "lz4", Plain()):
            pass
    assert str(caught.value) == (
        "tier 'memory://x': codec 'lz4' needs a backend that knows the lengths of its blocks, "
        "and memory does not; write codec none"
    )
    async with opened("memory://x", "none", Plain()) as tier:
        await save(tier, blocks_of(3))
        assert_same(await load(tier, sizes(blocks_of(4))), {**blocks_of(3), **only_missing(3)})


def only_missing(number: int) -> dict[Key, Outcome]:
    return {make_key(number, number % 3): Outcome.MISSING}


@pytest.mark.parametrize("job", range(1, 9))
async def test_a_cancelled_load_or_save_leaves_the_arena_alone(job: int) -> None:
    blocks = blocks_of(12)
    backend = MemoryBackend()
    async with opened("memory://", "lz4", backend) as tier:
        with ThreadJobs(hold_from=job) as jobs:
            batch = make_batch(blocks)
            await cancelled_at_job(jobs, tier.save(batch))
            await jobs.take_back_and_watch(batch)
        await save(tier, blocks)
        with ThreadJobs(hold_from=job) as jobs:
            batch = empty_batch(sizes(blocks))
            await cancelled_at_job(jobs, tier.load(batch))
            await jobs.take_back_and_watch(batch)
        assert_same(await load(tier, sizes(blocks)), blocks)


@pytest.mark.every_loop
async def test_the_loop_is_never_blocked(url: str) -> None:
    blocks, backend = blocks_of(12), make_backend(url)
    with never_blocked():
        async with opened(url, "lz4", backend) as tier:
            await save(tier, blocks)
            assert_same(await load(tier, sizes(blocks)), blocks)


_keys = st.lists(st.sampled_from([make_key(i, i % 3) for i in range(7)]), max_size=5, unique=True)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(["none", "lz4", "delete"]), _keys), max_size=6))
def test_any_history_of_codecs_agrees_with_a_dict(history: list[tuple[str, list[Key]]]) -> None:
    everything = {make_key(i, i % 3): BLOCK_BYTES[i % 3] for i in range(7)}

    async def run() -> None:
        right: dict[Key, bytes] = {}
        backend = MemoryBackend()
        async with (
            opened("memory://", "lz4", backend) as lz4,
            opened("memory://", "none", backend) as none,
        ):
            for word, keys in history:
                if word == "delete":
                    await none.delete(Keys.of(keys))
                    right = {k: v for k, v in right.items() if k not in keys}
                else:
                    blocks = {key: payload(key) for key in keys}
                    await save(lz4 if word == "lz4" else none, blocks)
                    right |= blocks
                for tier in (lz4, none):
                    found = await load(tier, everything)
                    assert_same(found, {k: right.get(k, Outcome.MISSING) for k in everything})

    asyncio.run(run())


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_cache_with_a_codec_gives_back_what_it_was_given(
    tmp_path: pathlib.Path, isolation: str
) -> None:
    layout = Layout(
        (Group(name="kv", kind=GroupKind.FULL, block_tokens=16, block_bytes=32 * 1024),)
    )
    pages = (torch.arange(8 * 16 * 1024) % 251 + 0x4100).to(torch.int16).reshape(8, -1)
    tokens, table = list(range(16 * 7 + 1)), {"kv": list(range(7))}

    def cache(codec: str) -> tierkv.Cache:
        return tierkv.open(
            f"nvme://{tmp_path}/kv?capacity=64MiB&segment=1MiB",
            layout=layout,
            namespace="model@rev1",
            pinned="2MiB",
            policy="dense",
            isolation=isolation,  # type: ignore[arg-type]  # one of the two
            codec=codec,
        )

    async with cache("lz4") as one:
        await one.save(tokens, {"kv": [pages]}, table)
        await one.flush()
        stats = one.stats()
    for codec in ("none", "lz4"):
        async with cache(codec) as two:
            assert two.stats()["storage_tier_payload_bytes"] < 7 * 32 * 1024 * 0.7
            hit = await two.lookup(tokens)
            mine = torch.zeros_like(pages)
            loaded = await two.load(hit, {"kv": [mine]}, table)
            assert loaded.tokens == 112
            assert torch.equal(mine[:7], pages[:7])
    assert stats["storage_tier_mode_codec"] == "lz4"


def test_a_codec_that_cannot_be_is_refused_at_open() -> None:
    layout = {
        "groups": [{"name": "kv", "kind": "full", "block_tokens": 16, "block_bytes": 4096}],
    }
    with pytest.raises(ConfigError, match=r"codec is 'zstd'; write one of: none, lz4"):
        tierkv.open("memory://", layout=layout, namespace="m@1", codec="zstd")
    with pytest.raises(ConfigError, match="codec 'lz4' has nothing to compress"):
        tierkv.open("", layout=layout, namespace="m@1", codec="lz4")
