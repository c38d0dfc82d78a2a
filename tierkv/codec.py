"""LZ4 between arena and storage tier, where it pays. Off unless it is asked for.

A block that a codec made shorter lies in the tier as its encoded payload; its record says how it
was made and how long it was (`tierkv.record`), and the checksum is that of what is stored. So a
backend moves it like any other, and one that was written with the codec on is read with it off.

**What pays.** Of each group of a batch a sample is encoded first, as it is and with the bytes of
2-byte types shuffled (`Codec.LZ4_SHUFFLE2`): BF16 and FP16 numbers of like size share their high
byte, which LZ4 only sees when those bytes lie together. Shuffling costs twice the time and has to
save `MIN_SAVING` once more. Where neither saves that much, and for each block that turns out not
to, the block is stored raw, straight from the arena. Blocks below `MIN_BYTES` always are. What to
expect is in bench/codec.py.

**Memory.** Encoded blocks pass through buffers outside the arena (`Bounce`). A batch takes at most
a quarter more than its payload, so the bounds of the I/O scheduler hold for them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import lz4.block  # type: ignore[import-untyped]  # it ships no types
import numpy as np
from numpy.typing import NDArray

from tierkv import record
from tierkv.backend import Backend, BlockBatch, Outcomes, SupportsLengths, finish
from tierkv.blocks import ARENA_ALIGN, Outcome, slot_bytes
from tierkv.errors import ConfigError
from tierkv.record import Codec, Encoded
from tierkv.urls import nearest

CODECS: Final = ("none", "lz4")

MIN_BYTES: Final = 16 << 10
"""Smaller blocks stay raw: a slot of the bounce buffer is rounded up to a page, media to 512."""

MIN_SAVING: Final = 1 / 8
"""Of a block, in bytes. Encoding takes 0.2 to 3 CPU seconds per GB and decoding 0.2 to 0.9
(bench/codec.py), against 0.1 for a checksum: a few per cent of the disk are no good bargain."""

SAMPLE_BYTES: Final = 32 << 10
"""Per group and batch, in `SAMPLE_PIECES`, and never more than a quarter of a block: at most 1 % of
a 16 MiB batch is encoded in vain."""

SAMPLE_PIECES: Final = 4
"""Spread over the block: layers of one block differ."""

KEPT_BYTES: Final = 64 << 20
"""Bounce buffers that wait for their next use; fresh memory costs 0.25 s per GB to touch."""

_T = TypeVar("_T")


def parse_codec(given: object, url: str, what: str) -> str:
    """The one of `CODECS` that was written; `ConfigError` names `what`.

    url: of the storage tier; without one there is nothing to compress.
    """
    if not isinstance(given, str) or given not in CODECS:
        near = nearest(given, CODECS) if isinstance(given, str) else ""
        raise ConfigError(f"{what} is {given!r}{near}; write one of: {', '.join(CODECS)}")
    if given != "none" and not url:
        raise ConfigError(f"{what} {given!r} has nothing to compress: there is no storage tier")
    return given


# One block. ------------------------------------------------------------------------------------


def encode_sync(codec: Codec, data: Any) -> bytes:
    """The bytes that `decode_sync` turns back into `data` (any buffer)."""
    source = _shuffled(data) if codec is Codec.LZ4_SHUFFLE2 else data
    encoded: bytes = lz4.block.compress(source, store_size=False)
    return encoded


def decode_sync(codec: int, data: Any, into: memoryview) -> bool:
    """Fill `into` to its last byte; False, with `into` undefined, where `data` is not just that."""
    if codec not in (Codec.LZ4, Codec.LZ4_SHUFFLE2):
        return False
    try:  # never writes beyond the size it is given, whatever `data` is
        plain = lz4.block.decompress(data, uncompressed_size=len(into))
    except lz4.block.LZ4BlockError:
        return False
    if len(plain) != len(into):
        return False
    if codec == Codec.LZ4:
        into[:] = plain
    else:
        _unshuffle(plain, into)
    return True


def pays(raw_bytes: int, stored_bytes: int) -> bool:
    """Whether so much is saved that the block is stored encoded."""
    return stored_bytes <= raw_bytes * (1 - MIN_SAVING)


# As 16-bit operations, which numpy runs in vector registers: 8 GB/s against 2.6 for strided bytes.
def _shuffled(data: Any) -> NDArray[np.uint8]:
    """Even bytes, odd bytes, and the last one where their number is odd."""
    source = np.frombuffer(data, np.uint8)
    half = len(source) // 2
    words = source[: 2 * half].view("<u2")
    out = np.empty(len(source), np.uint8)
    np.copyto(out[:half], words, casting="unsafe")  # the low byte
    np.copyto(out[half : 2 * half], words >> 8, casting="unsafe")
    out[2 * half :] = source[2 * half :]
    return out


def _unshuffle(plain: bytes, into: memoryview) -> None:
    planes, target = np.frombuffer(plain, np.uint8), np.frombuffer(into, np.uint8)
    half = len(planes) // 2
    words = target[: 2 * half].view("<u2")
    np.copyto(words, planes[half : 2 * half])
    np.left_shift(words, 8, out=words)
    np.bitwise_or(words, planes[:half], out=words)
    target[2 * half :] = planes[2 * half :]


# A batch. --------------------------------------------------------------------------------------


def choose_sync(batch: BlockBatch) -> NDArray[np.uint8]:
    """uint8[n] of `Codec`: what pays for a sample of each group, RAW where nothing does."""
    chosen = np.zeros(len(batch), np.uint8)
    for group in np.unique(batch.keys.groups).tolist():
        rows = np.flatnonzero((batch.keys.groups == group) & (batch.nbytes >= MIN_BYTES))
        if len(rows):
            chosen[rows] = _best(_sample(batch.payload(int(rows[len(rows) // 2]))))
    return chosen


def _sample(payload: memoryview) -> bytes:
    piece = min(SAMPLE_BYTES, payload.nbytes // 4) // SAMPLE_PIECES
    starts = [payload.nbytes * i // SAMPLE_PIECES & ~7 for i in range(SAMPLE_PIECES)]
    return b"".join(payload[a : a + piece] for a in starts)


def _best(sample: bytes) -> Codec:
    plain, shuffled = (len(encode_sync(c, sample)) for c in (Codec.LZ4, Codec.LZ4_SHUFFLE2))
    if pays(len(sample), shuffled) and pays(plain, shuffled):
        return Codec.LZ4_SHUFFLE2
    return Codec.LZ4 if pays(len(sample), plain) else Codec.RAW


def encode_batch_sync(
    batch: BlockBatch, codec: NDArray[np.uint8], memory: memoryview, offsets: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode blocks into `memory` at `offsets`, where slots of their full size are.

    Returns the codec of each and its stored bytes; RAW, and nothing written, where it does not
    pay after all.
    """
    codec, stored = codec.copy(), batch.nbytes.copy()
    for i, (payload, start) in enumerate(zip(batch.payloads(), offsets.tolist(), strict=True)):
        data = encode_sync(Codec(int(codec[i])), payload)
        if pays(payload.nbytes, len(data)):
            memory[start : start + len(data)] = data
            stored[i] = len(data)
        else:
            codec[i] = Codec.RAW
    return codec, stored


def decode_batch_sync(stored: BlockBatch, mark: int, into: Sequence[memoryview]) -> Outcomes:
    """Verify blocks as they are stored, and decode each into its buffer.

    DONE; CORRUPT where a block is not proven or cannot be decoded; MISSING where it is proven to
    be one of another length.
    """
    outcomes = np.full(len(stored), Outcome.CORRUPT, np.uint8)
    good = record.verify_sync(stored.keys, stored.records, stored.payloads(), mark)
    raw_bytes, codecs = stored.records["raw_bytes"].tolist(), stored.records["codec"].tolist()
    for i in np.flatnonzero(good).tolist():
        if raw_bytes[i] != into[i].nbytes:
            outcomes[i] = Outcome.MISSING
        elif decode_sync(codecs[i], stored.payload(i), into[i]):
            outcomes[i] = Outcome.DONE
    return outcomes


class Bounce:
    """Page-aligned buffers outside the arena, kept for their next use up to `KEPT_BYTES`."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    @contextlib.contextmanager
    def lease(self, nbytes: int) -> Iterator[memoryview]:
        """At least `nbytes`, with old contents, until the context ends. On one thread only."""
        size = 1 << max(nbytes - 1, (1 << 20) - 1).bit_length()
        buffer = next((b for b in self._free if len(b) == size), None)
        if buffer is None:
            buffer = mmap.mmap(-1, size)
        else:
            self._free.remove(buffer)
        try:
            yield memoryview(buffer)
        finally:
            if sum(map(len, self._free)) + size <= KEPT_BYTES:
                self._free.append(buffer)


class Run(Protocol):
    """Runs a function in a thread."""

    def __call__(self, work: Callable[[], _T], /) -> asyncio.Future[_T]:
        """Start it."""
        ...


class Coder:
    """Batches through a codec, to and from one backend; for `tierkv.tier`, on its loop.

    mark: of the namespace (`record.namespace_mark`). run, threads: of the tier's pool. count:
    where blocks and bytes are counted. When a call ends, cancelled or not, nothing touches the
    batch's arena any more.
    """

    def __init__(
        self, backend: Backend, mark: int, run: Run, threads: int, count: Counter[str]
    ) -> None:
        self._backend = backend
        self._mark = mark
        self._run = run
        self._threads = threads
        self._count = count
        self._bounce = Bounce()

    async def save(self, batch: BlockBatch) -> Outcomes:
        """Seal and write a batch, encoded where it pays; fills `batch.records`."""
        (chosen,) = await self._all([partial(choose_sync, batch)])
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return await self._write(batch, None)
        offsets, total = _slots(batch.nbytes[rows])
        outcomes = np.full(len(batch), Outcome.FAILED, np.uint8)
        with self._bounce.lease(total) as memory:
            codec, stored = await self._encode(batch.take(rows), chosen[rows], memory, offsets)
            took = np.flatnonzero(codec)
            rows, codec, stored = rows[took], codec[took], stored[took]
            encoded = BlockBatch(
                batch.keys.take(rows), record.blank(len(rows)), memory, offsets[took], stored
            )
            how = Encoded(codec, batch.nbytes[rows].astype(np.uint32))
            others = np.setdiff1d(np.arange(len(batch)), rows)
            for places, part, before in (
                (rows, encoded, how),
                (others, batch.take(others), None),
            ):
                outcomes[places] = await self._write(part, before)
                batch.records[places] = part.records
        return outcomes

    async def _encode(
        self,
        batch: BlockBatch,
        codec: NDArray[np.uint8],
        memory: memoryview,
        offsets: NDArray[np.int64],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        pieces = self._pieces(len(batch))
        done = await self._all(
            [
                partial(encode_batch_sync, batch.take(p), codec[p], memory, offsets[p])
                for p in pieces
            ]
        )
        codec, stored = codec.copy(), batch.nbytes.copy()
        for piece, (its_codec, its_stored) in zip(pieces, done, strict=True):
            codec[piece], stored[piece] = its_codec, its_stored
        return codec, stored

    async def _write(self, batch: BlockBatch, encoded: Encoded | None) -> Outcomes:
        if not len(batch):
            return np.empty(0, np.uint8)
        made, mark = record.made_in(batch.records), self._mark
        seal = partial(
            record.seal_sync, batch.keys, batch.payloads(), mark, made=made, encoded=encoded
        )
        (batch.records[:],) = await self._all([seal])
        if encoded is None:
            self._count["codec_raw_blocks"] += len(batch)
        else:
            self._count["codec_encoded_blocks"] += len(batch)
            self._count["codec_bytes_before"] += int(encoded.raw_bytes.sum(dtype=np.int64))
            self._count["codec_bytes_after"] += int(batch.nbytes.sum())
        return await self._backend.write(batch)

    async def load(self, batch: BlockBatch) -> Outcomes:
        """Read what is shorter than its slot, prove it and decode it; all else is MISSING."""
        outcomes = np.full(len(batch), Outcome.MISSING, np.uint8)
        if not isinstance(self._backend, SupportsLengths):
            return outcomes
        lengths = await self._backend.lengths(batch.keys)
        rows = np.flatnonzero((lengths > 0) & (lengths < batch.nbytes))
        if not len(rows):
            return outcomes
        offsets, total = _slots(lengths[rows])
        into = [batch.payload(i) for i in rows.tolist()]
        with self._bounce.lease(total) as memory:
            stored = BlockBatch(
                batch.keys.take(rows), record.blank(len(rows)), memory, offsets, lengths[rows]
            )
            found = np.array(await self._backend.read(stored), np.uint8)
            read = np.flatnonzero(found == Outcome.DONE)
            pieces = [read[piece] for piece in self._pieces(len(read))]
            done = await self._all(
                [
                    partial(decode_batch_sync, stored.take(p), self._mark, [into[i] for i in p])
                    for p in pieces
                ]
            )
            for piece, its_outcomes in zip(pieces, done, strict=True):
                found[piece] = its_outcomes
            outcomes[rows] = found
            batch.records[rows] = stored.records
        return outcomes

    def _pieces(self, n: int) -> list[NDArray[np.intp]]:
        """Positions of n blocks in about equal parts, one a thread."""
        return np.array_split(np.arange(n), max(1, min(n, self._threads)))

    async def _all(self, work: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run all in threads, and wait for all: they work in buffers that others want back."""
        jobs: list[asyncio.Future[_T]] = []
        try:
            for one in work:
                jobs.append(self._run(one))
        finally:  # also where a thread could not be started
            done = await finish(asyncio.gather(*jobs, return_exceptions=True))
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return [result for result in done if not isinstance(result, BaseException)]


def _slots(nbytes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Offsets of slots one behind the other, and their bytes together."""
    padded = -(-nbytes.astype(np.int64) // ARENA_ALIGN) * ARENA_ALIGN
    ends = np.cumsum(padded)
    return ends - padded, int(padded.sum())


assert slot_bytes(1) == ARENA_ALIGN  # `_slots` is its rule for a column
