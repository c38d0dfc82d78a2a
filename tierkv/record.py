"""What lies on media for every block: a 64-byte record that proves the payload.

The record is made when a block is saved and checked whenever the block is read from a storage
tier, on every path and for every backend, in one place (the mover). A backend stores record and
payload together and returns both; it need not understand either.

Layout of a record (little endian, 64 bytes):

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
0      32    block hash
32     2     group
34     1     checksum algorithm (`Algorithm`)
35     1     codec (`Codec`)
36     4     record version and magic (0x544B5631, "TKV1")
40     4     payload bytes before the codec
44     4     payload bytes as stored
48     8     the first eight bytes of the namespace digest
56     8     checksum of the stored payload
====== ===== ==========================================================================

The seed of the checksum is the first eight bytes of the hash xor the group, so that another
block's payload, even of the same length, never verifies: a misplaced record is a miss, not foreign
KV. Where a codec was at work, the codec times 2^56 and the bytes before it times 2^16 are part of
the xor, so that a payload is never decoded in another way than it was encoded. The namespace
stands in the record so that a backend which mixes namespaces up can serve nothing of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv import multilinear
from tierkv.blocks import HASH_BYTES, Keys

RECORD_MAGIC: Final = 0x544B5631
RECORD_BYTES: Final = 64
RECORD_DTYPE: Final = np.dtype(
    [
        ("hash", f"V{HASH_BYTES}"),
        ("group", "<u2"),
        ("algorithm", "u1"),
        ("codec", "u1"),
        ("magic", "<u4"),
        ("raw_bytes", "<u4"),
        ("stored_bytes", "<u4"),
        ("namespace", "<u8"),
        ("checksum", "<u8"),
    ]
)
assert RECORD_DTYPE.itemsize == RECORD_BYTES  # a wrong dtype must never be written

Records = NDArray[np.void]
"""RECORD_DTYPE[n]."""


class Algorithm(enum.IntEnum):
    """Checksum algorithms by the number that stands in the record. Everyone verifies both."""

    XXH3_64 = 1
    """XXH3-64, seeded: where a CPU makes it."""
    MULTILINEAR_64 = 2
    """`tierkv.multilinear`: where a GPU makes it (`tierkv.device_sums`)."""


class Codec(enum.IntEnum):
    """How a payload is encoded, by the number that stands in the record. See `tierkv.codec`."""

    RAW = 0
    LZ4 = 1
    """An LZ4 block without a size in front of it."""
    LZ4_SHUFFLE2 = 2
    """The same over the even bytes followed by the odd ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What payloads were before a codec.

    codec: uint8[n] of `Codec`; RAW for a payload that is stored as it is.
    raw_bytes: uint32[n], their bytes before.
    """

    codec: NDArray[np.uint8]
    raw_bytes: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Checksums that were made elsewhere, where the blocks were (`tierkv.device_sums`).

    algorithm: uint8[n] of `Algorithm`; 0 where there is none for a row.
    checksum: uint64[n], with `seeds(keys)`.
    """

    algorithm: NDArray[np.uint8]
    checksum: NDArray[np.uint64]


def seeds(keys: Keys, encoded: Encoded | None = None) -> NDArray[np.uint64]:
    """uint64[n]: what each block's checksum is seeded with (see above)."""
    first_words = np.frombuffer(keys.hashes, "<u8")[:: HASH_BYTES // 8]
    out: NDArray[np.uint64] = first_words ^ keys.groups
    if encoded is not None:
        codec, raw_bytes = encoded.codec.astype(np.uint64), encoded.raw_bytes.astype(np.uint64)
        out ^= np.where(codec == Codec.RAW, np.uint64(0), codec << 56 | raw_bytes << 16)
    return out


def blank(n: int) -> Records:
    """n zeroed records; a zeroed record matches no key."""
    return np.zeros(n, RECORD_DTYPE)


def promised(algorithms: NDArray[np.uint8], checksums: NDArray[np.uint64], n: int) -> Records:
    """n blank records that carry checksums made elsewhere, if there are any, to `made_in`."""
    records = blank(n)
    if len(algorithms):
        records["algorithm"], records["checksum"] = algorithms, checksums
    return records


def made_in(records: Records) -> Made | None:
    """What `promised` put into them."""
    if not records["algorithm"].any():
        return None
    return Made(records["algorithm"].copy(), records["checksum"].copy())


def namespace_mark(digest: bytes) -> int:
    """What stands in a record for a namespace: the first eight bytes of its digest."""
    return int.from_bytes(digest[:8], "little")


def seal_sync(
    keys: Keys,
    payloads: Sequence[memoryview],
    namespace: int = 0,
    *,
    made: Made | None = None,
    encoded: Encoded | None = None,
) -> Records:
    """Records for `payloads` as they are stored, one a key, marked with `namespace_mark`.

    made: checksums of rows whose bytes need not be read here. encoded: what the payloads were
        before a codec; None: they are raw. Rows of `made` that are encoded are summed here.

    Reads every byte of the other rows: run it in a thread.
    """
    words = _plain_words(keys, payloads, namespace)
    records: Records = words.view(RECORD_DTYPE)[:, 0]
    if made is None and encoded is None:
        words[:, 7] = _xxh3(payloads, seeds(keys))
        return records
    if encoded is not None:
        records["codec"] = encoded.codec
        records["raw_bytes"] = encoded.raw_bytes
    if made is None:
        records["checksum"] = _xxh3(payloads, seeds(keys, encoded))
        return records
    taken = (made.algorithm != 0) & (records["codec"] == Codec.RAW)
    records["algorithm"][taken] = made.algorithm[taken]
    records["checksum"][taken] = made.checksum[taken]
    left = np.flatnonzero(~taken)
    ours = seeds(keys, encoded)[left]
    records["checksum"][left] = _xxh3([payloads[i] for i in left.tolist()], ours)
    return records


def verify_sync(
    keys: Keys, records: Records, payloads: Sequence[memoryview], namespace: int | None = None
) -> NDArray[np.bool_]:
    """bool[n]: record names this key, this length, and the payload's checksum is right.

    payloads: as they are stored; every byte of a record is proven, so one that was encoded may be
        decoded as its record says.
    namespace: the mark that the record must bear; None takes any (a store that is verified from
        outside). Reads every byte of payloads whose record matches: run it in a thread.
    """
    found = np.ascontiguousarray(records).view("<u8").reshape(-1, _WORDS)
    wanted = _plain_words(keys, payloads, namespace)
    if namespace is None:
        wanted[:, 6] = found[:, 6]
    if (found[:, :7] == wanted[:, :7]).all():  # nothing encoded, all by XXH3: the usual batch
        same: NDArray[np.bool_] = _xxh3(payloads, seeds(keys)) == found[:, 7]
        return same
    codec = records["codec"]
    good: NDArray[np.bool_] = (
        (found[:, :4] == wanted[:, :4]).all(axis=1)
        & (found[:, 4] & ~_FREE == wanted[:, 4] & ~_FREE)
        & _KNOWN[records["algorithm"]]
        & (records["stored_bytes"] == wanted[:, 5] >> 32)
        & ((codec != Codec.RAW) | (found[:, 5] == wanted[:, 5]))
        & (found[:, 6] == wanted[:, 6])
    )
    rows = np.flatnonzero(good)
    good[rows] = _proven(keys.take(rows), records[rows], [payloads[i] for i in rows.tolist()])
    return good


def _plain_words(
    keys: Keys, payloads: Sequence[memoryview], namespace: int | None
) -> NDArray[np.uint64]:
    """uint64[n, 8]: the records of raw payloads, summed by XXH3, without the checksum."""
    words = np.empty((len(keys), _WORDS), "<u8")
    words[:, :4] = np.frombuffer(keys.hashes, "<u8").reshape(-1, HASH_BYTES // 8)
    words[:, 4] = keys.groups | _PLAIN
    words[:, 5] = np.array([p.nbytes for p in payloads], "<u8") * _BOTH
    words[:, 6] = namespace or 0
    return words


def _proven(keys: Keys, records: Records, payloads: Sequence[memoryview]) -> NDArray[np.bool_]:
    """bool[n]: the checksums are right."""
    codec, algorithm = records["codec"], records["algorithm"]
    ours = seeds(keys, Encoded(codec, records["raw_bytes"]) if codec.any() else None)
    if (algorithm == Algorithm.XXH3_64).all():
        found = _xxh3(payloads, ours)
    else:
        found = np.empty(len(keys), np.uint64)
        for known, sums in _SUMS.items():
            rows = np.flatnonzero(algorithm == known)
            found[rows] = sums([payloads[i] for i in rows.tolist()], ours[rows])
    same: NDArray[np.bool_] = found == records["checksum"]
    return same


def _xxh3(payloads: Sequence[Any], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64[n]: XXH3-64 of each payload (any buffer). Releases the GIL on large ones."""
    digest = xxhash.xxh3_64_intdigest
    each = (digest(p, seed) for p, seed in zip(payloads, seeds.tolist(), strict=True))
    return np.fromiter(each, np.uint64, len(seeds))


_SUMS: Final[dict[Algorithm, Callable[[Sequence[Any], NDArray[np.uint64]], NDArray[np.uint64]]]] = {
    Algorithm.XXH3_64: _xxh3,
    Algorithm.MULTILINEAR_64: multilinear.checksums,
}
_WORDS: Final = RECORD_BYTES // 8
_PLAIN: Final = np.uint64(RECORD_MAGIC << 32 | Codec.RAW << 24 | Algorithm.XXH3_64 << 16)
"""Bytes 34 to 39 of a raw record, in the word that begins with the group."""
_BOTH: Final = np.uint64(1 + (1 << 32))
_FREE: Final = np.uint64(0xFFFF << 16)
"""Algorithm and codec in that word."""
_KNOWN: Final = np.isin(np.arange(256), list(_SUMS))
