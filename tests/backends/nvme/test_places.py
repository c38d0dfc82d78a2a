"""The map from fingerprints to places, and the table over it, against a dict."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.blocks import Keys
from tierkv_backends.nvme import places, table
from tierkv_backends.nvme.format import ROW_DTYPE
from tierkv_backends.nvme.places import PlaceMap
from tierkv_backends.nvme.table import Segment, Table

# Few distinct homes: chains grow long, and wrap around the end of the columns.
PRINTS = st.integers(0, 5).map(lambda n: n * 1023) | st.integers(0, 1 << 63)
STEPS = st.lists(st.tuples(st.booleans(), st.sets(PRINTS, max_size=40)), max_size=12)


def prints_of(some: set[int]) -> NDArray[np.uint64]:
    return np.array(sorted(some), np.uint64)


@settings(deadline=None)
@given(STEPS, st.sampled_from([0, 30, 1000]))
def test_a_map_does_what_a_dict_does(steps: list[tuple[bool, set[int]]], recent: int) -> None:
    with mock.patch.object(places, "_RECENT", recent):
        check_against_a_dict(steps)


def check_against_a_dict(steps: list[tuple[bool, set[int]]]) -> None:
    ours, model, place = PlaceMap(), dict[int, int](), 0
    for put, some in steps:
        prints = prints_of(some)
        if put:
            wanted = np.arange(place, place + len(prints))
            before = ours.put(prints, wanted)
            assert before.tolist() == [model.get(p, -1) for p in sorted(some)]
            model.update(zip(sorted(some), wanted.tolist(), strict=True))
            place += len(prints)
        else:
            ours.remove(prints)
            for p in some:
                model.pop(p, None)
    everything = prints_of({p for _, some in steps for p in some})
    assert ours.find(everything).tolist() == [model.get(p, -1) for p in everything.tolist()]


def test_a_map_that_one_home_overflows_still_finds_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "_RECENT", 100)
    ours = PlaceMap()
    prints = np.arange(500, dtype=np.uint64) << np.uint64(32)
    ours.put(prints, np.arange(500))
    ours.remove(prints[::2])
    ours.put(prints[::4], np.arange(1000, 1125))
    found = ours.find(prints)
    assert found[::4].tolist() == list(range(1000, 1125))
    assert (found[2::4] == -1).all()
    assert found[1::2].tolist() == list(range(1, 500, 2))


def test_a_map_grows_and_shrinks_with_what_lives_in_it() -> None:
    ours, rng = PlaceMap(), np.random.default_rng(1)
    for round_number in range(20):
        prints = np.unique(rng.integers(0, 1 << 62, 3000, np.uint64))
        assert (ours.put(prints, np.arange(len(prints)) + round_number * 5000) == -1).all()
        assert (ours.find(prints) >= 0).all()
        ours.remove(prints)
        assert (ours.find(prints) == -1).all()
    assert len(ours._columns._place) <= 1 << 15


def rows_of(keys: Keys) -> NDArray[np.void]:
    rows = np.zeros(len(keys), ROW_DTYPE)
    rows["group"], rows["stored_bytes"] = keys.groups, 10
    return rows


def segment(number: int) -> Segment:
    return Segment(number=number, path=Path(f"{number}"), nbytes=1 << 20, alignment=512)


NAMES = st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=1)), max_size=20)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), NAMES), max_size=10))
def test_a_table_does_what_a_dict_does(steps: list[tuple[int, list[tuple[int, bytes]]]]) -> None:
    ours, model = Table(), dict[tuple[int, bytes], int]()
    for number in range(2):
        ours.add(segment(number))
    for what, names in steps:
        keys = Keys.of(names)
        if what == 2:
            ours.forget(keys)
            for key in keys:
                model.pop(key, None)
        else:
            ours.adopt(ours.segments[what], keys.hashes, rows_of(keys))
            model.update(dict.fromkeys(keys, what))
    for number in range(2):
        mine = [key for key, at in model.items() if at == number]
        assert sorted(ours.keys_of(ours.segments[number])) == sorted(mine)
        assert ours.segments[number].live_bytes == 10 * len(mine)
    assert len(ours) == len(model)
    assert sorted(key for keys in ours.scan() for key in keys) == sorted(model)
    ours.drop(ours.segments[0])
    assert len(ours) == sum(at == 1 for at in model.values())


def test_keys_with_the_same_fingerprint_are_never_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "fingerprints", lambda groups, _: np.zeros(len(groups), np.uint64))
    ours, one, two = Table(), Keys.of([(0, b"one")]), Keys.of([(0, b"two")])
    ours.add(segment(1))
    ours.publish(ours.segments[1], one.hashes, rows_of(one))
    assert ours.find(two).tolist() == [-1]
    ours.publish(ours.segments[1], two.hashes, rows_of(two))  # the later one stays
    assert (ours.find(two) >= 0).tolist() == [True]
    assert ours.find(one).tolist() == [-1]
    assert len(ours) == 1
