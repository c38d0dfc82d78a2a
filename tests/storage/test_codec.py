"""`tierkv.codec`: every byte comes back or the block is a miss, and only what pays is encoded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv import record
from tierkv.backend import BlockBatch
from tierkv.blocks import Keys, Outcome
from tierkv.codec import (
    KEPT_BYTES,
    MIN_BYTES,
    Bounce,
    Coder,
    choose_sync,
    decode_sync,
    encode_sync,
    parse_codec,
    pays,
)
from tierkv.errors import ConfigError
from tierkv.record import Codec
from tierkv.testing.batches import (
    FILL,
    Key,
    assert_guards_untouched,
    empty_batch,
    make_batch,
    make_context,
    make_key,
)
from tierkv_backends.memory import MemoryBackend

CODECS = (Codec.LZ4, Codec.LZ4_SHUFFLE2)
DTYPES = ("u1", "i2", "f2", "f4", "f8")


def smooth(n: int, dtype: str = "i2", seed: int = 0) -> bytes:
    """Numbers of like size, as in a KV cache, but easier on LZ4."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 256, n) + 0x4100).astype(dtype).tobytes()


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Bytes as blocks hold them: numbers of any type, noise, zeros, runs; of any length."""
    nbytes = draw(st.integers(1, 70_000))
    seed, kind = draw(st.integers(0, 99)), draw(st.sampled_from([*DTYPES, "noise", "zeros"]))
    if kind == "zeros":
        return bytes(nbytes)
    if kind == "noise":
        return np.random.default_rng(seed).bytes(nbytes)
    return smooth(nbytes, kind, seed)[:nbytes]


# One block. -----------------------------------------------------------------------------------


def decoded(codec: int, data: bytes, nbytes: int) -> bytes | None:
    """What comes back, in the middle of a buffer whose other bytes must stay."""
    buffer = memoryview(bytearray([FILL]) * (nbytes + 128))
    done = decode_sync(codec, data, buffer[64 : 64 + nbytes])
    assert bytes(buffer[:64]) + bytes(buffer[64 + nbytes :]) == bytes([FILL]) * 128
    return bytes(buffer[64 : 64 + nbytes]) if done else None


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None)
@given(payloads())
def test_what_was_encoded_comes_back(codec: Codec, payload: bytes) -> None:
    assert decoded(codec, encode_sync(codec, payload), len(payload)) == payload


@settings(deadline=None)
@given(payloads())
def test_a_shuffled_payload_is_its_even_bytes_then_its_odd_ones(payload: bytes) -> None:
    paired = len(payload) // 2 * 2
    expected = payload[:paired:2] + payload[1:paired:2] + payload[paired:]
    plain = lz4.block.decompress(
        encode_sync(Codec.LZ4_SHUFFLE2, payload), uncompressed_size=len(payload)
    )
    assert plain == expected


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None)
@given(payloads(), st.integers(-40, 40).filter(bool), st.data())
def test_a_payload_of_another_length_or_cut_is_refused(
    codec: Codec, payload: bytes, change: int, data: st.DataObject
) -> None:
    encoded = encode_sync(codec, payload)
    wanted = max(0, len(payload) + change)
    if wanted != len(payload):
        assert decoded(codec, encoded, wanted) is None
    cut = data.draw(st.integers(0, len(encoded) - 1))
    assert decoded(codec, encoded[:cut], len(payload)) is None


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.integers(1, 5000))
def test_garbage_never_leaves_its_buffer(codec: Codec, garbage: bytes, nbytes: int) -> None:
    got = decoded(codec, garbage, nbytes)
    assert got is None or len(got) == nbytes


@pytest.mark.parametrize("codec", [Codec.RAW, 3, 255])
def test_a_codec_that_nobody_knows_is_refused(codec: int) -> None:
    assert decoded(codec, b"abcd", 4) is None


# What pays. -----------------------------------------------------------------------------------


def test_shuffling_is_used_where_it_makes_blocks_shorter() -> None:
    batch = make_batch(
        {
            make_key(0, 0): smooth(40_000, "i2"),
            make_key(1, 1): np.random.default_rng(0).bytes(80_000),
            make_key(2, 2): bytes(80_000),
            make_key(3, 3): smooth(40_000, "u1") * 2,
            make_key(4, 4): bytes(MIN_BYTES - 1),
        }
    )
    raw, plain, shuffled = Codec.RAW, Codec.LZ4, Codec.LZ4_SHUFFLE2
    assert choose_sync(batch)[[0, 1, 2, 4]].tolist() == [shuffled, raw, plain, raw]


@pytest.mark.parametrize(
    ("raw_bytes", "stored_bytes", "expected"),
    [(8000, 7000, True), (8000, 7001, False), (8000, 8000, False), (8000, 8100, False)],
)
def test_an_eighth_must_be_saved(raw_bytes: int, stored_bytes: int, expected: bool) -> None:
    assert pays(raw_bytes, stored_bytes) is expected


@pytest.mark.parametrize(
    ("given", "url", "message"),
    [
        ("lz5", "memory://", "codec is 'lz5' (did you mean 'lz4'?); write one of: none, lz4"),
        ("", "memory://", "codec is ''; write one of: none, lz4"),
        (None, "memory://", "codec is None; write one of: none, lz4"),
        (True, "memory://", "codec is True; write one of: none, lz4"),
        ("lz4", "", "codec 'lz4' has nothing to compress: there is no storage tier"),
    ],
)
def test_a_codec_that_cannot_be_is_refused_in_one_line(
    given: object, url: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_codec(given, url, "codec")
    assert str(caught.value) == message


def test_bounce_buffers_are_used_again_and_bounded() -> None:
    def address(view: memoryview) -> int:
        return np.frombuffer(view, np.uint8).ctypes.data

    bounce = Bounce()
    with bounce.lease(3 << 20) as first, bounce.lease(3 << 20) as second:
        assert first.nbytes >= 3 << 20
        used = {address(first), address(second)}
        assert len(used) == 2
        assert all(a % 4096 == 0 for a in used)
    with bounce.lease(4 << 20) as again, bounce.lease(0) as small:
        assert address(again) in used
        assert address(small) not in used
    leases = [bounce.lease(16 << 20) for _ in range(8)]
    for lease in leases:
        lease.__enter__()
    for lease in leases:
        lease.__exit__(None, None, None)
    assert sum(map(len, bounce._free)) <= KEPT_BYTES


# A batch. -------------------------------------------------------------------------------------

MARK = 7


@asynccontextmanager
async def coder_over(backend: Any) -> AsyncIterator[tuple[Coder, Counter[str]]]:
    count: Counter[str] = Counter()
    await backend.open(make_context([1 << 20]))
    with ThreadPoolExecutor(3) as pool:

        def run(work: Callable[[], Any]) -> asyncio.Future[Any]:
            return asyncio.wrap_future(pool.submit(work))

        yield Coder(backend, MARK, run, 3, count), count
    await backend.close()


def mixed_blocks(n: int = 9) -> dict[Key, bytes]:
    """Of four groups: shuffled pays, nothing pays, LZ4 pays, too small."""
    kinds: tuple[Callable[[int], bytes], ...] = (
        lambda i: smooth(20_000, "i2", i),
        lambda i: np.random.default_rng(i).bytes(30_001),
        lambda i: bytes([i]) * 50_000,
        lambda i: bytes([i]) * 100,
    )
    return {make_key(i, i % 4): kinds[i % 4](i) for i in range(n)}


async def load(coder: Coder, wanted: dict[Key, int]) -> dict[Key, bytes | Outcome]:
    batch = empty_batch(wanted)
    outcomes = await coder.load(batch)
    assert_guards_untouched(batch)
    return {
        key: bytes(batch.payload(i)) if outcomes[i] == Outcome.DONE else Outcome(int(outcomes[i]))
        for i, key in enumerate(wanted)
    }


async def test_a_mixed_batch_is_stored_as_it_pays_and_comes_back() -> None:
    blocks = mixed_blocks()
    async with coder_over(MemoryBackend()) as (coder, count):
        batch = make_batch(blocks)
        before = bytes(batch.arena)
        assert (await coder.save(batch)).tolist() == [Outcome.DONE] * 9
        assert bytes(batch.arena) == before
        assert batch.records["codec"].tolist() == [2, 0, 1, 0, 2, 0, 1, 0, 2]
        encoded = batch.records["codec"] != 0
        assert (batch.records["raw_bytes"] == batch.nbytes).all()
        assert (batch.records["stored_bytes"][~encoded] == batch.nbytes[~encoded]).all()
        assert (batch.records["stored_bytes"][encoded] < batch.nbytes[encoded] * 0.6).all()
        assert count["codec_encoded_blocks"] == 5
        assert count["codec_raw_blocks"] == 4
        assert count["codec_bytes_before"] == batch.nbytes[encoded].sum()
        assert count["codec_bytes_after"] == batch.records["stored_bytes"][encoded].sum()
        found = await load(coder, {key: len(data) for key, data in blocks.items()})
        raw = {key: Outcome.MISSING for key, e in zip(blocks, encoded, strict=True) if not e}
        assert found == {**blocks, **raw}  # those are read without it


class Edited(MemoryBackend):
    """Lets a test rewrite a stored block."""

    def edit(self, key: Key, change: Callable[[np.ndarray, bytearray], bytes | None]) -> None:
        raw, payload = self._blocks[key]
        stored = np.frombuffer(bytearray(raw), record.RECORD_DTYPE)
        data = bytearray(payload)
        data[:] = change(stored, data) or data
        self._blocks[key] = (stored.tobytes(), bytes(data))


def resealed(key: Key, stored: np.ndarray, data: bytearray) -> None:
    """Make the record prove the payload as it is now."""
    how = record.Encoded(stored["codec"], stored["raw_bytes"])
    keys = Keys.of([key])
    stored[:] = record.seal_sync(keys, [memoryview(data)], MARK, encoded=how)


KEY = make_key(0, 0)
PLAIN = smooth(20_000)


async def stored(backend: Edited, coder: Coder) -> None:
    assert (await coder.save(make_batch({KEY: PLAIN, make_key(4, 0): PLAIN})))[0] == Outcome.DONE


@pytest.mark.parametrize("place", ["first", "middle", "last"])
async def test_a_damaged_payload_is_corrupt_and_its_neighbor_is_not(place: str) -> None:
    backend = Edited()
    async with coder_over(backend) as (coder, _):
        await stored(backend, coder)

        def damage(_: np.ndarray, data: bytearray) -> None:
            at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[place]
            data[at] ^= 1

        backend.edit(KEY, damage)
        found = await load(coder, dict.fromkeys([KEY, make_key(4, 0)], len(PLAIN)))
        assert found == {KEY: Outcome.CORRUPT, make_key(4, 0): PLAIN}


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.LZ4_SHUFFLE2, 99])
async def test_a_proven_payload_that_cannot_be_decoded_is_corrupt(codec: int) -> None:
    backend = Edited()
    async with coder_over(backend) as (coder, _):
        await stored(backend, coder)

        def damage(its: np.ndarray, data: bytearray) -> None:
            data[: len(data) // 2] = b"\xff" * (len(data) // 2)
            its["codec"] = codec
            resealed(KEY, its, data)

        backend.edit(KEY, damage)
        assert await load(coder, {KEY: len(PLAIN)}) == {KEY: Outcome.CORRUPT}


async def test_a_changed_codec_is_never_followed() -> None:
    backend = Edited()
    async with coder_over(backend) as (coder, _):
        await stored(backend, coder)
        backend.edit(KEY, lambda its, _: its.__setitem__("codec", Codec.LZ4))
        assert await load(coder, {KEY: len(PLAIN)}) == {KEY: Outcome.CORRUPT}


async def test_a_block_of_another_length_is_missing_whether_encoded_or_raw() -> None:
    async with coder_over(MemoryBackend()) as (coder, _):
        noise = np.random.default_rng(0).bytes(20_000)
        await coder.save(make_batch({KEY: PLAIN, make_key(1, 1): noise}))
        wanted = {KEY: len(PLAIN) + 2, make_key(1, 1): len(noise) + 1, make_key(2, 0): 9}
        assert set((await load(coder, wanted)).values()) == {Outcome.MISSING}


async def test_a_backend_that_knows_no_lengths_has_nothing_shorter() -> None:
    class Plain(MemoryBackend):
        lengths = None  # type: ignore[assignment]  # as if it were not there

    backend = MemoryBackend()
    async with coder_over(backend) as (coder, _):
        await coder.save(make_batch({KEY: PLAIN}))
        coder._backend = Plain()
        assert await load(coder, {KEY: len(PLAIN)}) == {KEY: Outcome.MISSING}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3), payloads()), max_size=8))
def test_any_batch_comes_back(rows: list[tuple[int, bytes]]) -> None:
    blocks = {make_key(i, group): data for i, (group, data) in enumerate(rows)}

    async def there_and_back() -> None:
        async with coder_over(MemoryBackend()) as (coder, _):
            batch: BlockBatch = make_batch(blocks)
            assert (await coder.save(batch) == Outcome.DONE).all()
            good = batch.records["codec"] == Codec.RAW
            found = await load(coder, {key: len(data) for key, data in blocks.items()})
            for is_raw, (key, data) in zip(good, blocks.items(), strict=True):
                assert found[key] == (Outcome.MISSING if is_raw else data)

    asyncio.run(there_and_back())
