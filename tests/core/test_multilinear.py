"""The checksum of `tierkv.multilinear` against its formula in plain integers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.multilinear import CHUNK_BYTES, CHUNK_CHARS, LANES, LAST_CHARS, LEVELS, checksums

SEED = 0x0123456789ABCDEF
GOLDEN = {
    0: "541246ecc0c59f0d",
    1: "f75073f1b159d758",
    7: "1571c0eaf464f968",
    8: "f15dc960c827daee",
    8191: "c2cc8df3710872e1",
    8192: "c6349ec7b5493e8d",
    8193: "f883152b38a093e0",
    65536: "647948039933bbde",
    1 << 20: "ed08f791d9758670",
    (8 << 20) + 24: "ff2e4f401ab77b5e",
}
"""By length of `pattern`: part of the format, stores in the field depend on them."""


def pattern(nbytes: int) -> bytes:
    return hashlib.shake_128(b"pattern").digest(nbytes)


def one(payload: bytes, seed: int = SEED) -> int:
    return int(checksums([payload], np.array([seed], np.uint64))[0])


def formula(payload: bytes, seed: int = SEED) -> int:
    """The same from the docstring, character by character, in Python's own integers."""
    n = LANES * (1 + CHUNK_CHARS)
    text = hashlib.shake_128(b"tierkv: keys of MULTILINEAR, version 1")
    raw = text.digest(8 * (LEVELS * n + LANES * (1 + LAST_CHARS)))
    keys = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]

    def signed(data: bytes) -> list[int]:
        starts = range(0, len(data), 4)
        return [int.from_bytes(data[i : i + 4], "little", signed=True) for i in starts]

    def multilinear(level: int, chars: list[int], width: int) -> bytes:
        out = b""
        for lane in range(LANES):
            m = keys[level * n + lane * (1 + width) :]
            total = m[0] + sum(a * b for a, b in zip(m[1:], chars, strict=False))
            out += (total % 2**64 >> 32).to_bytes(4, "little")
        return out

    data, level = payload, 0
    while level == 0 or len(data) > 8:
        data += bytes(-len(data) % CHUNK_BYTES) if data else bytes(CHUNK_BYTES)
        parts = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        data = b"".join(multilinear(level, signed(part), CHUNK_CHARS) for part in parts)
        level += 1
    tail = len(payload).to_bytes(4, "little") + seed.to_bytes(8, "little")
    return int.from_bytes(multilinear(LEVELS, signed(data + tail), LAST_CHARS), "little")


@pytest.mark.parametrize(("nbytes", "expected"), GOLDEN.items())
def test_golden_vectors_do_not_change(nbytes: int, expected: str) -> None:
    assert f"{one(pattern(nbytes)):016x}" == expected


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 8191, 8192, 8193, 3 * 8192 + 2, 70_000])
def test_it_is_the_formula_of_its_docstring(nbytes: int) -> None:
    payload = pattern(nbytes)
    assert one(payload) == formula(payload)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 2**64 - 1))
def test_a_batch_of_any_lengths_is_the_same_as_one_by_one(blocks: list[bytes], seed: int) -> None:
    seeds = np.arange(len(blocks), dtype=np.uint64) + np.uint64(seed // 2)
    together = checksums([memoryview(b) for b in blocks], seeds).tolist()
    assert together == [one(b, s) for b, s in zip(blocks, seeds.tolist(), strict=True)]


def swapped(data: bytearray, width: int, a: int, b: int) -> None:
    i, j = a % (len(data) // width) * width, b % (len(data) // width) * width
    data[i : i + width], data[j : j + width] = data[j : j + width], data[i : i + width]


def flipped(data: bytearray, a: int, b: int) -> None:
    data[a % len(data)] ^= 1 << b % 8


def rotated(data: bytearray, a: int, b: int) -> None:
    del b
    data[:] = data[a % 64 :] + data[: a % 64]


DAMAGES: dict[str, Callable[[bytearray, int, int], None]] = {
    "bit": flipped,
    "words": lambda data, a, b: swapped(data, 8, a, b),
    "halves": lambda data, a, b: swapped(data, 4, a, b),
    "chunks": lambda data, a, b: swapped(data, CHUNK_BYTES, a, b),
    "shift": rotated,
    "zeros": lambda data, a, b: data.__setitem__(slice(None), bytes(len(data))),
    "cut": lambda data, a, b: data.__delitem__(slice(-1 - a % 9, None)),
    "longer": lambda data, a, b: data.extend(bytes(1 + a % 9)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(["random", "zeros", "top bits"]),
    st.sampled_from([8192, 3 * 8192, 3 * 8192 + 8, 20_001]),
    st.integers(0, 2**16),
    st.integers(0, 2**16),
)
def test_any_change_is_seen(damage: str, kind: str, nbytes: int, a: int, b: int) -> None:
    data = bytearray(pattern(nbytes))
    if kind == "zeros":
        data = bytearray(nbytes)
    elif kind == "top bits":  # words that differ in their top bit only: a dot product's blind spot
        data = bytearray(nbytes)
        data[7::16] = b"\x80" * len(data[7::16])
    before = bytes(data)
    DAMAGES[damage](data, a, b)
    assert (one(bytes(data)) == one(before)) == (bytes(data) == before)


def test_zeros_have_a_checksum_that_depends_on_their_length_and_seed() -> None:
    found = {one(bytes(n), seed) for n in range(0, 40_000, 999) for seed in (0, 1, 1 << 63)}
    assert len(found) == 41 * 3
    assert 0 not in found


def test_checksums_are_spread_evenly() -> None:
    """Each of the 64 bits is set in about half of the checksums of blocks that differ in a bit."""
    blocks = [(1 << i).to_bytes(1024, "little") for i in range(8192)]
    sums = checksums(blocks, np.zeros(len(blocks), np.uint64))
    assert len(np.unique(sums)) == len(blocks)
    ones = np.unpackbits(sums.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert ((ones > 0.4) & (ones < 0.6)).all()


def test_whoever_verifies_needs_no_torch() -> None:
    code = "import sys, tierkv.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
