"""A checksum that a GPU computes with a handful of launches: MULTILINEAR over a tree. numpy half.

`tierkv.device_sums` is the same function in torch. Little endian throughout.

**The hash.** MULTILINEAR of Lemire and Kaser, "Strongly Universal String Hashing is Fast", The
Computer Journal 57(11), 2014 (arXiv:1202.4961), Theorem 3.1 with K = 64 and L = 32: for 32-bit
characters c and random 64-bit keys m::

    h(c) = (m_0 + m_1 c_1 + ... + m_n c_n  mod 2^64) >> 32

is strongly universal: two different strings of equal length have equal hashes with probability
2^-32 over the choice of m. The shift is what a plain dot product lacks: the low bits that it drops
are the weak ones (a difference in a character's top bit reaches only the top bits of the sum), and
m_0 gives zeros a hash. Two hashes with independent keys stand side by side: 64 bits, 2^-64.
The theorem needs no more of characters than that different ones differ modulo 2^32, so the words
are read as signed.

**The tree.** As long a string of keys as the block would not stay in a cache, so chunks of 8 KiB
are hashed with the same keys, and the 8-byte results with keys of their own, until one is left
(Wegman and Carter, "New Hash Functions and Their Use in Authentication and Set Equality", JCSS 22,
1981). A last hash takes that one, the length in bytes and the block's seed. So the zeros that fill
the last chunk cannot be taken for data, and blocks of different keys do not verify for each other.

**The bound.** Each of at most three levels and the last hash fail with 2^-64, together below
2^-62. The keys are fixed (SHAKE-128 of a text), so this speaks of faults that do not know them: it
is no authentication, as little as XXH3 is.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES: Final = 8192
"""Bytes per hash of the first level: two times its keys are 32 KiB, which an L1 cache holds."""

CHUNK_CHARS: Final = CHUNK_BYTES // 4
LANES: Final = 2
"""Hashes side by side, each of 32 bits."""

LEVELS: Final = 3
"""Each shrinks by 1024: enough for blocks of 8 GiB, and a record holds lengths below 4 GiB."""

LAST_CHARS: Final = 5
"""Of the last hash: the top of the tree (2), length in bytes (1), seed (2)."""

_KEY_TEXT: Final = b"tierkv: keys of MULTILINEAR, version 1"

TILE_CHUNKS: Final = 64
"""Chunks per product: 1 MiB once they are widened, which an L2 cache holds."""

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@functools.cache
def level_keys(level: int) -> tuple[Int64s, Int64s]:
    """(m_0 as int64[LANES], the other m as int64[LANES, CHUNK_CHARS]) of a level.

    `level` LEVELS is the last hash, of LAST_CHARS. Read-only: they are part of the format.
    """
    n = LANES * (1 + CHUNK_CHARS)
    text = hashlib.shake_128(_KEY_TEXT).digest((LEVELS * n + LANES * (1 + LAST_CHARS)) * 8)
    keys = np.frombuffer(text, "<i8")[level * n : (level + 1) * n].reshape(LANES, -1)
    others = np.ascontiguousarray(keys[:, 1:])
    others.flags.writeable = False
    return keys[:, 0], others


def as_char(nbytes: int) -> int:
    """A length below 4 GiB as the signed 32-bit character that stands for it."""
    return int(np.uint32(nbytes).astype(np.int32))


def checksums(payloads: Sequence[Any], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64[n]: the checksum of each payload (any buffer), with its seed.

    Payloads of equal length share the upper levels. Reads every byte: run it in a thread.
    """
    arrays = [np.frombuffer(p, np.uint8) for p in payloads]
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    chunks = np.maximum(-(-lengths // CHUNK_BYTES), 1)
    starts = np.cumsum(chunks) - chunks
    leaves = _leaves(arrays, int(chunks.sum()))
    out = np.empty(len(arrays), np.uint64)
    for nbytes in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == nbytes)
        top = leaves[starts[rows, None] + np.arange(chunks[rows[0]])]
        level = 1
        while top.shape[1] > 1:
            top = _hash(_in_chunks(top.reshape(len(rows), -1)), level)
            level += 1
        out[rows] = _last(top[:, 0], nbytes, seeds[rows])
    return out


def _leaves(arrays: Sequence[NDArray[np.uint8]], chunks: int) -> Int32s:
    """int32[chunks, LANES]: the first level of all payloads, chunk after chunk.

    Blocks are widened into one tile, so that small ones do not cost a call each.
    """
    out = np.empty((chunks, LANES), np.int32)
    tile = np.empty((min(TILE_CHUNKS, chunks), CHUNK_CHARS), np.int64)
    done = filled = 0
    for chars in itertools.chain.from_iterable(map(_chars, arrays)):
        for at in range(0, len(chars), TILE_CHUNKS):
            part = chars[at : at + TILE_CHUNKS]
            if filled + len(part) > len(tile):
                out[done : done + filled] = _hash(tile[:filled], 0)
                done, filled = done + filled, 0
            tile[filled : filled + len(part)] = part
            filled += len(part)
    out[done:] = _hash(tile[:filled], 0)
    return out


def _chars(data: NDArray[np.uint8]) -> Iterator[Int32s]:
    """int32[.., CHUNK_CHARS]: the whole chunks of a payload, and the last one filled with zeros."""
    whole = len(data) // CHUNK_BYTES * CHUNK_BYTES
    if whole:
        yield data[:whole].view("<i4").reshape(-1, CHUNK_CHARS)
    if whole < len(data) or not len(data):
        tail = np.zeros(CHUNK_BYTES, np.uint8)
        tail[: len(data) - whole] = data[whole:]
        yield tail.view("<i4").reshape(1, CHUNK_CHARS)


def _hash(chars: Int32s | Int64s, level: int) -> Int32s:
    """int32[..., LANES] of int32[..., up to CHUNK_CHARS]; zeros behind them would add nothing."""
    first, others = level_keys(level)
    sums = np.einsum("...j,kj->...k", chars, others[:, : chars.shape[-1]])
    sums += first
    sums >>= 32
    out: Int32s = sums.astype(np.int32)
    return out


def _in_chunks(chars: Int32s) -> Int32s:
    """int32[n, chunks, up to CHUNK_CHARS]: rows of characters, filled up where they are many."""
    n, given = chars.shape
    if given <= CHUNK_CHARS:
        return chars[:, None]
    out = np.zeros((n, -(-given // CHUNK_CHARS) * CHUNK_CHARS), np.int32)
    out[:, :given] = chars
    return out.reshape(n, -1, CHUNK_CHARS)


def _last(top: Int32s, nbytes: int, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64[n]: the first lane is the low half."""
    chars = np.empty((len(top), LAST_CHARS), np.int32)
    chars[:, :2] = top
    chars[:, 2] = as_char(nbytes)
    chars[:, 3:] = np.ascontiguousarray(seeds, "<u8").view("<i4").reshape(-1, 2)
    return _hash(chars, LEVELS).astype("<i4").view("<u8").reshape(-1).astype(np.uint64)
