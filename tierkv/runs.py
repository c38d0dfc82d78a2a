"""Byte runs: the fewest stretches of memory that hold every block of a group, and copies of them.

`tierkv.device` says what a run and a comb are. Nothing here knows slots from other memory: a copy
is between pages and rows of words, one row a block, wherever these lie on the same device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tierkv.blocks import ARENA_ALIGN, slot_bytes
from tierkv.errors import LayoutError

_WORDS: Final = (
    (16, torch.complex128),
    (8, torch.int64),
    (4, torch.int32),
    (2, torch.int16),
    (1, torch.uint8),
)
# Bytes per word of an indexed copy, which torch counts in elements. Nothing is computed with them.

_SERIAL_WORDS: Final = 32768
"""Of one call on a CPU: at::internal::GRAIN_SIZE, the most that torch copies in the caller's own
thread. Where cores are busy, as beside an engine, a copy shared among threads waits for the slowest
of them again and again: 20 times slower than alone (bench/device.py)."""


STRIP_BYTES: Final = 16 << 10
"""From this many bytes of a block on, one call of numpy for them takes little beside the copy: some
0.5 µs (bench/device.py). It reads and writes where the bytes lie, without a buffer in between, and
lets go of the interpreter's lock meanwhile."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are neighbors in every block: block b's start at `start + b * stride`."""

    storage: torch.UntypedStorage
    start: int
    stride: int
    nbytes: int
    blocks: int

    def split(self, nbytes: int) -> list[Run]:
        """The same bytes in runs of at most `nbytes`."""
        return [
            Run(
                self.storage, self.start + n, self.stride, min(nbytes, self.nbytes - n), self.blocks
            )
            for n in range(0, self.nbytes, nbytes)
        ]

    def touches(self, other: Run) -> bool:
        """Whether `other` begins where this one ends, in every block."""
        return (
            self.storage is other.storage
            and self.stride == other.stride
            and self.blocks == other.blocks
            and self.start + self.nbytes == other.start
        )


@dataclass(frozen=True, slots=True)
class Comb:
    """Runs of one allocation that are equally long and equally far apart, as one view.

    view: word[blocks, teeth, words], or word[blocks, words] where there is one tooth. A third
    dimension makes a CPU's indexed copy several times slower, so it is there only if needed.
    first: of its words in the slot.
    """

    view: torch.Tensor
    first: int

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The comb's words in rows of slots: word[n, words per slot] → like `view`, a view."""
        shape = (len(rows), *self.view.shape[1:])
        strides = (rows.stride(0), self.view.shape[-1], 1)
        at = rows.storage_offset() + self.first
        return rows.as_strided(shape, strides if len(shape) == 3 else (strides[0], 1), at)


class GroupPages:
    """The compiled pages of one group.

    strips: on a CPU, the pages of each comb as uint8[blocks, bytes] or uint8[blocks, teeth, bytes];
        None on other devices, and where combs are too short for a copy of their own a block.
    """

    __slots__ = (
        "block_bytes",
        "blocks",
        "combs",
        "device",
        "runs",
        "slot",
        "strips",
        "word",
        "word_bytes",
    )

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.device = device
        self.strips = _strips(runs) if device.type == "cpu" else None
        self.runs = len(runs)
        self.block_bytes = sum(r.nbytes for r in runs)
        self.slot = slot_bytes(self.block_bytes)
        self.blocks = min(r.blocks for r in runs)
        # The base too: words of 16 bytes are read with instructions that want them aligned.
        parts = [n for r in runs for n in (r.storage.data_ptr(), r.start, r.stride, r.nbytes)]
        divisor = math.gcd(*parts, 16)
        self.word_bytes, self.word = next(w for w in _WORDS if w[0] == divisor)
        self.combs: list[Comb] = []
        first = 0
        if device.type == "cpu":
            runs = [short for run in runs for short in run.split(_SERIAL_WORDS * self.word_bytes)]
        while runs:
            teeth = _teeth(runs)
            if device.type == "cpu":
                teeth = min(teeth, _SERIAL_WORDS * self.word_bytes // runs[0].nbytes)
            self.combs.append(self._comb(runs[:teeth], first))
            first += teeth * runs[0].nbytes // self.word_bytes
            runs = runs[teeth:]

    def _comb(self, runs: Sequence[Run], first: int) -> Comb:
        words = [n // self.word_bytes for n in (runs[0].start, runs[0].stride, runs[0].nbytes)]
        shape, strides = [runs[0].blocks, words[2]], [words[1], 1]
        if len(runs) > 1:
            shape.insert(1, len(runs))
            strides.insert(1, (runs[1].start - runs[0].start) // self.word_bytes)
        view = torch.empty(0, dtype=self.word, device=self.device)
        view.set_(runs[0].storage, words[0], tuple(shape), tuple(strides))
        return Comb(view, first)

    def rows(self, extent: torch.Tensor, stride: int, count: int) -> torch.Tensor:
        """word[count, words per block] over uint8 memory, `stride` bytes apart."""
        typed = extent[: extent.numel() // self.word_bytes * self.word_bytes].view(self.word)
        shape = (count, self.block_bytes // self.word_bytes)
        return typed.as_strided(shape, (stride // self.word_bytes, 1), typed.storage_offset())

    def collect(self, block_ids: NDArray[np.int64], rows: torch.Tensor) -> None:
        """Fill rows with these blocks' bytes in slot order."""
        ids = self._upload(block_ids)
        for comb in self.combs:
            there = comb.of(rows)
            for part in self._calls(comb, len(ids)):
                torch.index_select(comb.view, 0, ids[part], out=there[part])

    def spread(self, block_ids: NDArray[np.int64], rows: torch.Tensor) -> None:
        """Write rows of slot bytes into the pages of these blocks."""
        ids = self._upload(block_ids)
        for comb in self.combs:
            there = comb.of(rows)
            for part in self._calls(comb, len(ids)):
                comb.view.index_copy_(0, ids[part], there[part])

    def to_slots(
        self, block_ids: NDArray[np.int64], slots: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> None:
        """Copy these blocks into their slots, a call a block and strip. Needs strips."""
        for strip, first in self._strips_at():
            shape, nbytes = strip.shape[1:], strip[0].size
            for block, at in zip(block_ids.tolist(), (offsets + first).tolist(), strict=True):
                slots[at : at + nbytes].reshape(shape)[...] = strip[block]

    def from_slots(
        self, block_ids: NDArray[np.int64], slots: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> None:
        """Copy slots into the pages of these blocks; the reverse of `to_slots`."""
        for strip, first in self._strips_at():
            shape, nbytes = strip.shape[1:], strip[0].size
            for block, at in zip(block_ids.tolist(), (offsets + first).tolist(), strict=True):
                strip[block] = slots[at : at + nbytes].reshape(shape)

    def _strips_at(self) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """Each strip, and its first byte in the slot."""
        assert self.strips is not None
        first = 0
        for strip in self.strips:
            yield strip, first
            first += strip[0].size

    def _calls(self, comb: Comb, count: int) -> list[slice]:
        """The blocks of each call: on a GPU all of them."""
        return _serial(count, comb.view[0].numel() if self.device.type == "cpu" else 0)

    def _upload(self, block_ids: NDArray[np.int64]) -> torch.Tensor:
        ids = torch.from_numpy(block_ids)
        if self.device.type == "cpu":
            return ids
        # Pinned, or the copy would wait for the host; torch keeps the memory until it has ended.
        return ids.pin_memory().to(self.device, non_blocking=True)

    def windows(self, arena: torch.Tensor) -> torch.Tensor:
        """word[starts, words per block] over the arena: one (overlapping) row per legal offset."""
        starts = (arena.numel() - self.block_bytes) // ARENA_ALIGN + 1
        return self.rows(arena, ARENA_ALIGN, max(starts, 0))

    def pick(self, arena: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        """word[n, words per block]: a copy of these slots, in host memory."""
        windows, at = self.windows(arena), torch.from_numpy(offsets // ARENA_ALIGN)
        rows = torch.empty((len(at), windows.shape[1]), dtype=self.word)
        for part in _serial(len(at), windows.shape[1]):
            torch.index_select(windows, 0, at[part], out=rows[part])
        return rows


def _serial(count: int, words: int) -> list[slice]:
    """Rows of `words` in calls that torch runs in the caller's thread; all at once for 0 words."""
    step = max(1, _SERIAL_WORDS // words) if words else max(1, count)
    return [slice(n, n + step) for n in range(0, count, step)]


def _strips(runs: Sequence[Run]) -> list[NDArray[np.uint8]] | None:
    """The pages of a CPU's runs, a comb an array; None where one holds less than `STRIP_BYTES`."""
    found = []
    while runs:
        teeth, run = _teeth(runs), runs[0]
        if teeth * run.nbytes < STRIP_BYTES:
            return None
        memory = torch.empty(0, dtype=torch.uint8)
        memory.set_(run.storage, run.start, (run.storage.nbytes() - run.start,), (1,))
        shape, strides = [run.blocks, run.nbytes], [run.stride, 1]
        if teeth > 1:
            shape.insert(1, teeth)
            strides.insert(1, runs[1].start - run.start)
        found.append(as_strided(memory.numpy(), shape, strides))
        runs = runs[teeth:]
    return found


def _teeth(runs: Sequence[Run]) -> int:
    """How many runs from the front are one comb."""
    first, teeth = runs[0], 1
    for run in runs[1:]:
        same = (
            run.storage is first.storage
            and (run.stride, run.nbytes, run.blocks) == (first.stride, first.nbytes, first.blocks)
            and run.start - first.start == teeth * (runs[1].start - first.start)
        )
        if not same:
            break
        teeth += 1
    return teeth


def compile_group(name: str, tensors: Sequence[torch.Tensor]) -> GroupPages:
    """The fewest runs that cover the tensors' pages, in slot order."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise LayoutError(f"group {name!r}: its tensors are on {sorted(map(str, devices))}")
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
    found: list[tuple[int, int, Run]] = []
    for tensor in tensors:
        raw = tensor.untyped_storage()
        order, storage = storages.setdefault(raw.data_ptr(), (len(storages), raw))
        found += [(order, r.start, r) for r in _runs_of(name, tensor, storage)]
    found.sort(key=lambda item: item[:2])
    runs: list[Run] = []
    for _, _, run in found:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.storage is run.storage
            and run.start < last.start + last.nbytes
        ):
            raise LayoutError(f"group {name!r}: two of its pages share bytes")
        if last is not None and last.touches(run):
            nbytes = last.nbytes + run.nbytes
            runs[-1] = Run(last.storage, last.start, last.stride, nbytes, last.blocks)
        else:
            runs.append(run)
    if not runs:
        raise LayoutError(f"group {name!r}: its tensors are empty")
    return GroupPages(runs, devices.pop())


def _runs_of(name: str, tensor: torch.Tensor, storage: torch.UntypedStorage) -> list[Run]:
    """The runs of one tensor's page: its innermost dense part, repeated over the other dims."""
    if tensor.dim() < 1 or tensor.numel() == 0:
        return []
    item = tensor.element_size()
    dims = sorted(
        (stride * item, size)
        for stride, size in zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
        if size > 1
    )
    nbytes = item
    starts = [int(tensor.storage_offset()) * item]
    for stride, size in dims:
        if len(starts) == 1 and stride == nbytes:
            nbytes *= size
        else:
            starts = [start + i * stride for i in range(size) for start in starts]
    stride = tensor.stride(0) * item
    blocks = tensor.shape[0]
    if blocks > 1 and stride < nbytes:
        raise LayoutError(
            f"group {name!r}: blocks are {stride} bytes apart but hold {nbytes} bytes in a row; "
            "dim 0 of each tensor must be the block id"
        )
    return [Run(storage, start, stride, nbytes, blocks) for start in starts]
