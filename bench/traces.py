"""Traces of prompts as block ids: read from a file, or made up with branches.

One request a line: ``{"input_length": tokens, "hash_ids": [one id per block of tokens]}``, where
equal ids mean equal prefixes. The last id of a request may stand for a block that is not whole; it
says nothing that can be shared.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

NAME = "shared/data/traces/mooncake_conversation.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: one per whole block. tokens: the prompt's length, what the trace hides included."""

    ids: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """block_tokens: tokens that one id stands for."""

    name: str
    block_tokens: int
    prompts: tuple[Prompt, ...]

    def known_tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt as it is replayed: its whole blocks, and one token if more follows.

        The trace does not say what a block holds that is not whole, so no later prompt can be seen
        to share it: as far as anybody can tell, the prompt ends with its last whole block.
        """
        return min(prompt.tokens, len(prompt.ids) * self.block_tokens + 1)


class Names(Sequence[bytes]):
    """The chain of unit hashes of a prompt, made when asked for.

    A unit is named by its place and by the id of the block that holds its last token: equal ids
    mean equal prefixes, so equal names do too.
    """

    def __init__(self, prompt: Prompt, block_tokens: int, unit: int) -> None:
        self._ids, self._block, self._unit = prompt.ids, block_tokens, unit
        self._count = len(prompt.ids) * block_tokens // unit

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        ids, block, unit = self._ids, self._block, self._unit
        if isinstance(at, slice):
            return [
                (ids[((i + 1) * unit - 1) // block] << 64 | i).to_bytes(32, "little")
                for i in range(*at.indices(self._count))
            ]
        if not 0 <= at < self._count:
            raise IndexError(at)
        return (ids[((at + 1) * unit - 1) // block] << 64 | at).to_bytes(32, "little")


def find_trace() -> Path | None:
    """The public trace that lies beside or above this repository, if it is there."""
    here = Path(__file__).resolve().parent.parent
    places = (place / NAME for place in (here, *here.parents))
    return next((p for p in places if p.exists()), None)


def read_trace(path: Path, *, block_tokens: int = 0, limit: int = 0) -> Trace:
    """Read a trace. block_tokens 0: worked out from the lengths; limit 0: all of it.

    Raises `ValueError` where no block size fits, or a line is not a request.
    """
    requests: list[dict[str, Any]] = []
    with path.open() as lines:
        for line in lines:
            if line.strip():
                requests.append(json.loads(line))
            if limit and len(requests) == limit:
                break
    if not requests or not all({"input_length", "hash_ids"} <= r.keys() for r in requests):
        raise ValueError(f"{path}: every line must have input_length and hash_ids")
    block = block_tokens or _block_tokens(
        [(r["input_length"], len(r["hash_ids"])) for r in requests]
    )
    if not block:
        raise ValueError(f"{path}: no block size fits its lengths; write --block-tokens")
    numbers: dict[Any, int] = {}
    prompts = []
    for r in requests:
        whole = r["hash_ids"][: r["input_length"] // block]
        ids = tuple(numbers.setdefault(i, len(numbers)) for i in whole)
        prompts.append(Prompt(ids, r["input_length"]))
    return Trace(path.stem, block, tuple(prompts))


def _block_tokens(sizes: list[tuple[int, int]]) -> int:
    """The block size at which every length has as many blocks as it has ids, or 0."""
    sizes = [(n, k) for n, k in sizes if k]
    for partial in (1, 0):  # with an id for the block that is not whole, or without
        low = max(-(-n // k) if partial else n // (k + 1) + 1 for n, k in sizes)
        high = min(((n - 1) // (k - 1) if k > 1 else n) if partial else n // k for n, k in sizes)
        if low <= high:
            power = 1 << high.bit_length() - 1
            return power if power >= low else low
    return 0


def synthetic_trace(*, seed: int = 1, prompts: int = 2000, block_tokens: int = 256) -> Trace:
    """Conversations that grow, are retried and branch, over a few shared beginnings.

    Every junction is a multiple of `block_tokens`. Of ten prompts about five continue one, three
    leave one somewhere, and two begin with nothing but a shared beginning.
    """
    rng = random.Random(seed)
    fresh = iter(range(1 << 40))
    roots = [tuple(_some(fresh, rng.randint(2, 24))) for _ in range(8)]
    known: list[tuple[int, ...]] = []
    made = []
    for _ in range(prompts):
        kind = rng.random() if known else 1.0
        if kind < 0.5:
            ids = known.pop(rng.randrange(max(0, len(known) - 64), len(known)))
        elif kind < 0.8:
            whole = known[rng.randrange(max(0, len(known) - 256), len(known))]
            ids = whole[: rng.randint(1, len(whole))]
        else:
            ids = rng.choice(roots)
        ids += tuple(_some(fresh, min(400, 1 + int(rng.expovariate(1 / 24)))))
        known.append(ids)
        made.append(Prompt(ids, len(ids) * block_tokens + rng.randrange(1, block_tokens)))
    return Trace("synthetic", block_tokens, tuple(made))


def _some(fresh: Iterator[int], count: int) -> list[int]:
    return [next(fresh) for _ in range(count)]
