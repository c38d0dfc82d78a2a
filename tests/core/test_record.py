"""The record beside every block: its bytes on media do not change, and what it proves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.blocks import Keys
from tierkv.record import RECORD_BYTES, blank, namespace_mark, seal_sync, verify_sync

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


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_byte_of_payload_or_record_is_seen(payload: bytes, data: st.DataObject) -> None:
    records = seal_sync(KEYS, [memoryview(payload)], MARK)
    assert verify_sync(KEYS, records, [memoryview(payload)], MARK)[0]
    bit = 1 << data.draw(st.integers(0, 7))
    at = data.draw(st.integers(0, len(payload) - 1))
    changed = bytearray(payload)
    changed[at] ^= bit
    assert not verify_sync(KEYS, records, [memoryview(changed)], MARK)[0]
    assert not verify_sync(KEYS, records, [memoryview(payload + b"x")], MARK)[0]
    # Bytes 35 and 40 to 43 (codec, bytes before it) are for whoever decodes, not for the proof.
    proven = [*range(35), *range(36, 40), *range(44, 64)]
    raw = bytearray(records.tobytes())
    raw[data.draw(st.sampled_from(proven))] ^= bit
    damaged = np.frombuffer(bytes(raw), records.dtype)
    assert not verify_sync(KEYS, damaged, [memoryview(payload)], MARK)[0]
