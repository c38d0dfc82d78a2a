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
34     1     checksum algorithm (1: XXH3-64 of the payload, seeded by the key)
35     1     codec (0: raw)
36     4     record version and magic (0x544B5631, "TKV1")
40     4     payload bytes before the codec
44     4     payload bytes as stored
48     8     the first eight bytes of the namespace digest
56     8     checksum of the stored payload
====== ===== ==========================================================================

The seed is the first eight bytes of the hash xor the group, so that another block's payload,
even of the same length, never verifies: a misplaced record is a miss, not foreign KV. The
namespace stands in the record so that a backend which mixes namespaces up can serve nothing of it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

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
    """Checksum algorithms by the number that stands in the record."""

    XXH3_64 = 1


def checksums(keys: Keys, payloads: Sequence[Any]) -> NDArray[np.uint64]:
    """uint64[n]: XXH3-64 of each payload (any buffer), seeded by its key, so that it binds them.

    Reads every byte and releases the GIL on large payloads: run it in a thread.
    """
    first_words = np.frombuffer(keys.hashes, "<u8")[:: HASH_BYTES // 8]
    seeds = (first_words ^ keys.groups).tolist()
    digest = xxhash.xxh3_64_intdigest
    sums = (digest(p, seed) for p, seed in zip(payloads, seeds, strict=True))
    return np.fromiter(sums, np.uint64, len(keys))


def blank(n: int) -> Records:
    """n zeroed records; a zeroed record matches no key."""
    return np.zeros(n, RECORD_DTYPE)


def namespace_mark(digest: bytes) -> int:
    """What stands in a record for a namespace: the first eight bytes of its digest."""
    return int.from_bytes(digest[:8], "little")


def seal_sync(keys: Keys, payloads: list[memoryview], namespace: int = 0) -> Records:
    """Records for `payloads`, one a key, marked with their namespace (`namespace_mark`).

    Reads every byte: run it in a thread.
    """
    records = blank(len(keys))
    records["hash"] = np.frombuffer(keys.hashes, f"V{HASH_BYTES}")
    records["group"] = keys.groups
    records["algorithm"] = Algorithm.XXH3_64
    records["magic"] = RECORD_MAGIC
    records["namespace"] = namespace
    nbytes = [p.nbytes for p in payloads]
    records["raw_bytes"] = nbytes
    records["stored_bytes"] = nbytes
    records["checksum"] = checksums(keys, payloads)
    return records


def verify_sync(
    keys: Keys, records: Records, payloads: list[memoryview], namespace: int | None = None
) -> NDArray[np.bool_]:
    """bool[n]: record names this key, this length, and the payload's checksum is right.

    namespace: the mark that the record must bear; None takes any (a store that is verified from
        outside). Reads every byte of payloads whose record matches: run it in a thread.
    """
    names = np.frombuffer(keys.hashes, np.uint8).reshape(-1, HASH_BYTES)
    found = np.ascontiguousarray(records["hash"]).view(np.uint8).reshape(-1, HASH_BYTES)
    good: NDArray[np.bool_] = (
        (records["magic"] == RECORD_MAGIC)
        & (records["algorithm"] == Algorithm.XXH3_64)
        & (records["group"] == keys.groups)
        & (
            records["stored_bytes"]
            == np.fromiter((p.nbytes for p in payloads), np.uint64, len(keys))
        )
        & (names == found).all(axis=1)
    )
    if namespace is not None:
        good &= records["namespace"] == np.uint64(namespace)
    rows = np.flatnonzero(good)
    if len(rows) < len(good):
        keys, payloads = keys.take(rows), [payloads[i] for i in rows.tolist()]
    good[rows] = checksums(keys, payloads) == records["checksum"][rows]
    return good
