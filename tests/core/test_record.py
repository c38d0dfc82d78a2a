"""The record beside every block: its bytes on media do not change, and what it proves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv import multilinear
from tierkv.blocks import Keys
from tierkv.record import (
    RECORD_BYTES,
    Algorithm,
    Codec,
    Encoded,
    Made,
    blank,
    namespace_mark,
    seal_sync,
    seeds,
    verify_sync,
)

HASH = bytes(range(32))
KEYS = Keys.of([(3, HASH)])
PAYLOAD = bytes(range(100))
GOLDEN = (
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "0300" "01" "00" "31564b54" "64000000" "64000000" "0807060504030201" "{checksum}"
)  # fmt: skip
CHECKSUM = "dfc1888589d8948f"
MARK = namespace_mark(bytes.fromhex("0807060504030201") + bytes(24))


def test_a_record_on_media_is_these_bytes() -> None:
    (record,) = seal_sync(KEYS, [memoryview(PAYLOAD)], MARK)
    raw = record.tobytes()
    assert len(raw) == RECORD_BYTES
    assert raw.hex() == GOLDEN.format(checksum=raw[56:].hex())
    assert raw[56:].hex() == CHECKSUM


def test_a_zeroed_record_proves_nothing() -> None:
    assert not verify_sync(KEYS, blank(1), [memoryview(PAYLOAD)])[0]


@pytest.mark.parametrize("other", [Keys.of([(2, HASH)]), Keys.of([(3, HASH[::-1])])])
def test_another_keys_payload_never_verifies_though_bytes_are_equal(other: Keys) -> None:
    theirs = seal_sync(other, [memoryview(PAYLOAD)], MARK)
    assert not verify_sync(KEYS, theirs, [memoryview(PAYLOAD)], MARK)[0]
    theirs["hash"], theirs["group"] = np.frombuffer(HASH, "V32"), 3  # even with the name forged
    assert not verify_sync(KEYS, theirs, [memoryview(PAYLOAD)], MARK)[0]


def test_another_namespaces_record_does_not_verify() -> None:
    theirs = seal_sync(KEYS, [memoryview(PAYLOAD)], MARK + 1)
    assert not verify_sync(KEYS, theirs, [memoryview(PAYLOAD)], MARK)[0]
    assert verify_sync(KEYS, theirs, [memoryview(PAYLOAD)])[0]  # from outside, any is taken


@st.composite
def sealed(draw: st.DrawFn) -> tuple[bytes, np.ndarray]:
    """A payload and its record: raw or encoded, by either algorithm."""
    payload = draw(st.binary(min_size=1, max_size=300))
    codec = draw(st.sampled_from(Codec))
    raw_bytes = len(payload) if codec is Codec.RAW else draw(st.integers(1, 2**32 - 1))
    encoded = Encoded(np.array([codec], np.uint8), np.array([raw_bytes], np.uint32))
    made = None
    if codec is Codec.RAW and draw(st.booleans()):
        made = made_elsewhere(KEYS, [payload])
    return payload, seal_sync(KEYS, [memoryview(payload)], MARK, made=made, encoded=encoded)


def made_elsewhere(keys: Keys, payloads: list[bytes]) -> Made:
    sums = multilinear.checksums(payloads, seeds(keys))
    return Made(np.full(len(keys), Algorithm.MULTILINEAR_64, np.uint8), sums)


@settings(deadline=None)
@given(sealed(), st.data())
def test_any_changed_byte_of_payload_or_record_is_seen(
    given: tuple[bytes, np.ndarray], data: st.DataObject
) -> None:
    payload, records = given
    assert verify_sync(KEYS, records, [memoryview(payload)], MARK)[0]
    bit = 1 << data.draw(st.integers(0, 7))
    at = data.draw(st.integers(0, len(payload) - 1))
    changed = bytearray(payload)
    changed[at] ^= bit
    assert not verify_sync(KEYS, records, [memoryview(changed)], MARK)[0]
    assert not verify_sync(KEYS, records, [memoryview(payload + b"x")], MARK)[0]
    assert not verify_sync(KEYS, records, [memoryview(payload[:-1])], MARK)[0]
    raw = bytearray(records.tobytes())
    raw[data.draw(st.integers(0, RECORD_BYTES - 1))] ^= bit
    damaged = np.frombuffer(bytes(raw), records.dtype)
    assert not verify_sync(KEYS, damaged, [memoryview(payload)], MARK)[0]


def test_a_record_summed_elsewhere_or_of_an_encoded_payload_is_these_bytes() -> None:
    (elsewhere,) = seal_sync(
        KEYS, [memoryview(PAYLOAD)], MARK, made=made_elsewhere(KEYS, [PAYLOAD])
    )
    assert elsewhere.tobytes()[34:36].hex() == "0200"
    assert elsewhere.tobytes()[56:].hex() == "3eaa1417f5a89338"
    encoded = Encoded(np.array([Codec.LZ4_SHUFFLE2], np.uint8), np.array([4096], np.uint32))
    (shuffled,) = seal_sync(KEYS, [memoryview(PAYLOAD)], MARK, encoded=encoded)
    assert shuffled.tobytes()[34:36].hex() == "0102"
    assert shuffled.tobytes()[40:48].hex() == "0010000064000000"
    assert shuffled.tobytes()[56:].hex() == "7d90437fe031a01d"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(1, 99)), max_size=12), st.data())
def test_every_row_of_a_mixed_batch_is_judged_alone(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Raw by either algorithm, encoded, and some of them damaged."""
    keys = Keys.of([(i, HASH) for i in range(len(rows))])
    payloads = [bytes([i]) * n for i, (_, n) in enumerate(rows)]
    kinds = np.array([kind for kind, _ in rows], np.uint8)
    made = made_elsewhere(keys, payloads)
    some = Made(np.where(kinds == 1, made.algorithm, 0).astype(np.uint8), made.checksum)
    raw_bytes = np.array([n * (1 + (kind == 2)) for kind, n in rows], np.uint32)
    encoded = Encoded(np.where(kinds == 2, Codec.LZ4, 0).astype(np.uint8), raw_bytes)
    views = [memoryview(p) for p in payloads]
    records = seal_sync(keys, views, MARK, made=some, encoded=encoded)
    assert (records["algorithm"] == np.where(kinds == 1, 2, 1)).all()
    assert verify_sync(keys, records, views, MARK).all()
    bad = [data.draw(st.booleans()) for _ in rows]
    for i in np.flatnonzero(bad).tolist():
        views[i] = memoryview(bytes([255 - i]) * len(payloads[i]))
    assert verify_sync(keys, records, views, MARK).tolist() == [not b for b in bad]


def test_a_checksum_made_elsewhere_does_not_speak_for_an_encoded_payload() -> None:
    encoded = Encoded(np.array([Codec.LZ4], np.uint8), np.array([500], np.uint32))
    made = made_elsewhere(KEYS, [PAYLOAD * 5])
    records = seal_sync(KEYS, [memoryview(PAYLOAD)], MARK, made=made, encoded=encoded)
    assert records["algorithm"][0] == Algorithm.XXH3_64
    assert verify_sync(KEYS, records, [memoryview(PAYLOAD)], MARK)[0]


@pytest.mark.parametrize("algorithm", [0, 3, 77, 255])
def test_an_algorithm_that_nobody_knows_proves_nothing(algorithm: int) -> None:
    records = seal_sync(KEYS, [memoryview(PAYLOAD)], MARK)
    records["algorithm"] = algorithm
    assert not verify_sync(KEYS, records, [memoryview(PAYLOAD)], MARK)[0]
