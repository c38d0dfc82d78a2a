"""What a process says that it did, where a SIGKILL does not reach, and what follows from it."""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierkv.blocks import Keys
from tierkv.testing.batches import Key, make_key, make_payload

BLOCK_BYTES = (4096, 700, 20)
VARIANTS = 2

_HEAD = struct.Struct("<Q")


@functools.cache
def key_of(number: int) -> Key:
    """Block `number`. Numbers of one kind have one size."""
    return make_key(number, number % len(BLOCK_BYTES))


def size_of(number: int) -> int:
    return BLOCK_BYTES[number % len(BLOCK_BYTES)]


@functools.cache
def payload_of(number: int, variant: int) -> bytes:
    return make_payload(key_of(number), size_of(number), variant)


class Journal:
    """Lines in memory that parent and children share: ``letter variant number number …``.

    o: is about to be saved. a: was acknowledged as saved. r: was announced to be given up.
    d: is about to be deleted. c: everything is about to be forgotten. C: it was, or these were.
    """

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.blank()

    def blank(self) -> None:
        """Begin anew, for the next child."""
        self._numbers: dict[bytes, int] = {}
        self._history = History()
        self._read = _HEAD.size
        self._memory[: _HEAD.size] = _HEAD.pack(0)

    def note(self, letter: str, numbers: Iterable[int] = (), variant: int = 0) -> None:
        """One line. Whole or not there at all, whenever the process is killed."""
        line = " ".join([letter, str(variant), *map(str, numbers)]).encode() + b"\n"
        (used,) = _HEAD.unpack_from(self._memory)
        start = _HEAD.size + used
        self._memory[start : start + len(line)] = line
        self._memory[: _HEAD.size] = _HEAD.pack(used + len(line))

    def offer(self, numbers: Iterable[int], variant: int) -> None:
        numbers = list(numbers)
        self._numbers |= {key_of(n)[1]: n for n in numbers}
        self.note("o", numbers, variant)

    def retired(self, keys: Keys) -> None:
        self.note("r", [self._numbers[block_hash] for _, block_hash in keys])

    def read(self) -> History:
        """What follows from all lines so far. It grows when it is read again."""
        (used,) = _HEAD.unpack_from(self._memory)
        history, start = self._history, self._read
        self._read = _HEAD.size + used
        for line in self._memory[start : self._read].decode().splitlines():
            letter, variant, *rest = line.split()
            numbers = list(map(int, rest))
            if letter == "o":  # by another process, perhaps
                self._numbers |= {key_of(n)[1]: n for n in numbers}
            history.take(letter, int(variant), numbers)
        return history


@dataclass(slots=True)
class History:
    """may: every payload a block may have. must: blocks that have to be served.

    never: blocks that must not come back.
    """

    may: dict[int, set[bytes]] = field(default_factory=dict)
    must: set[int] = field(default_factory=set)
    never: set[int] = field(default_factory=set)

    def take(self, letter: str, variant: int, numbers: list[int]) -> None:
        if letter == "o":
            for number in numbers:
                self.may.setdefault(number, set()).add(payload_of(number, variant))
            self.never -= set(numbers)
        elif letter == "a":
            self.must |= set(numbers)
        elif letter in "rd":
            self.must -= set(numbers)
        elif letter == "c":
            self.must.clear()
        elif letter == "C":
            self.never |= set(numbers) or self.may.keys()

    def wrong(self, number: int, data: bytes) -> str:
        """What is wrong with serving `data`; nothing if empty."""
        if number in self.never:
            return f"block {number} came back after a clear"
        if data not in self.may.get(number, set()):
            return f"block {number} has other bytes than were ever saved"
        return ""
