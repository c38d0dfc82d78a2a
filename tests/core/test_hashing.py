"""Block hashes: fixed for ever, the same in every process, different for whatever differs."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tierkv
from tierkv import hashing
from tierkv.hashing import Extras, HashChain, chain

PROMPT = list(range(1, 65))
GOLDEN = {
    "plain": "cabf6f65e943a57618e387a698114c82eec708862ef1116890832bde79910508",
    "adapter": "c0ce4a155122c88a7939396194cd163cd4d13fc74dca0e7f80a11a894538df10",
    "salt": "7701bee6250f7b7f7efe496a6c484ca6f432851a35d0657a202139f2c628cd6a",
    "image": "4d2611ec015d4c488bc99bdec7c9658095507f03ac19c78cea27f992d82fecdb",
}
VARIANTS = {
    "plain": Extras(),
    "adapter": Extras(adapter="X"),
    "salt": Extras(salt="X"),
    "image": Extras(images=((0, b"X"),)),
}


def last(extras: Extras = hashing.NO_EXTRAS, tokens: list[int] = PROMPT, unit: int = 16) -> str:
    return chain(tokens, unit, extras=extras).hashes[-1].hex()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors_do_not_change(name: str) -> None:
    assert last(VARIANTS[name]) == GOLDEN[name]


def test_the_first_hash_is_what_the_module_says() -> None:
    data = hashing.ROOT + b"".join(t.to_bytes(4, "little") for t in PROMPT[:16])
    assert chain(PROMPT, 16).hashes[0] == hashlib.sha256(data).digest()
    second = chain(PROMPT, 16).hashes[0] + b"".join(t.to_bytes(4, "little") for t in PROMPT[16:32])
    assert chain(PROMPT, 16).hashes[1] == hashlib.sha256(second).digest()


CHILD = """
import os
from tierkv.hashing import Extras, chain

def answer():
    extras = Extras(adapter="a", salt="s", images=((3, b"i"), (20, b"j")))
    return b"".join(chain(range(1, 65), 4, extras=extras).hashes).hex()

if FORK:
    answer()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
print(answer(), flush=True)
"""


def in_a_fresh_process(seed: str | None, *, forked: bool = False) -> str:
    """The hashes of one prompt as a new interpreter, or a child that it forks, sees them."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        env["PYTHONHASHSEED"] = seed
    code = CHILD.replace("FORK", str(forked))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.data())
@settings(deadline=None)
def test_a_chain_extended_in_pieces_equals_one_made_at_once(
    tokens: list[int], unit: int, data: st.DataObject
) -> None:
    extras = Extras(salt="s", images=((5, b"i"), (11, b"j")))
    pieces = HashChain(unit, extras=extras)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    for low, high in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        pieces.extend(tokens[low:high])
    whole = chain(np.array(tokens, dtype=np.uint32), unit, extras=extras)
    assert pieces.hashes == whole.hashes
    assert pieces.tokens == whole.tokens == len(tokens)
    assert len(whole.hashes) == len(tokens) // unit


@given(st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=12), st.integers(0, 11))
@settings(deadline=None)
def test_a_changed_token_changes_its_unit_and_all_after_it(tokens: list[int], at: int) -> None:
    other = list(tokens)
    other[at] ^= 1
    ours, theirs = chain(tokens, 4).hashes, chain(other, 4).hashes
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    assert same == [unit < at // 4 for unit in range(3)]


def test_an_image_changes_only_the_units_from_its_position_on() -> None:
    plain = chain(PROMPT, 16).hashes
    first = chain(PROMPT, 16, extras=Extras(images=((35, b"cat"),))).hashes
    second = chain(PROMPT, 16, extras=Extras(images=((35, b"dog"),))).hashes
    assert first[:2] == second[:2] == plain[:2]
    assert len({plain[2], first[2], second[2]}) == 3
    assert len({plain[3], first[3], second[3]}) == 3


def test_where_an_image_stands_within_a_unit_matters_and_their_order_of_writing_does_not() -> None:
    assert last(Extras(images=((1, b"i"),))) != last(Extras(images=((2, b"i"),)))
    both = ((1, b"i"), (40, b"j"))
    assert last(Extras(images=both)) == last(Extras(images=both[::-1]))


def test_another_root_gives_another_chain() -> None:
    assert chain(PROMPT, 16, root=bytes(32)).hashes[0] != chain(PROMPT, 16).hashes[0]


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70, 1.5])
def test_an_id_that_does_not_fit_is_named_with_its_position(wrong: int) -> None:
    made = chain([1, 2, 3], 2)
    with pytest.raises(ValueError, match=rf"token id {re.escape(repr(wrong))} at position 4 "):
        made.extend([7, wrong, 9])
    assert made.tokens == 3, "a refused call must take nothing"
    made.extend([4])
    assert made.hashes == chain([1, 2, 3, 4], 2).hashes


def test_an_id_of_another_width_is_refused_in_an_array_too() -> None:
    with pytest.raises(ValueError, match="position 1 "):
        chain(np.array([1, 2**33], dtype=np.uint64), 1)
    with pytest.raises(ValueError, match="position 0 "):
        chain(np.array([-5], dtype=np.int32), 1)
    with pytest.raises(ValueError, match="2 dimensions"):
        chain(np.ones((2, 2), dtype=np.int64), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("unit", "root", "says"), [(0, hashing.ROOT, "unit"), (1, b"x", "root")])
def test_a_chain_that_cannot_be_is_refused(unit: int, root: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HashChain(unit, root=root)


def test_an_image_before_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="position -1"):
        Extras(images=((-1, b"x"),))


def builtin_hash_calls() -> list[str]:
    """Lines of the package that call the built-in `hash`, whose answers differ by process."""
    found = []
    for path in sorted(Path(tierkv.__file__).parent.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"(?<![\w.])hash\(", line.split("#")[0]):
                found.append(f"{path.name}:{number}: {line.strip()}")
    return found
