"""Pages ↔ slots: copies batches of blocks between an engine's tensors and the arena.

At construction the pages of every group are compiled into the fewest **byte runs** per block:
stretches of bytes that lie next to each other in every block. A batch is then one indexed copy
per (group, run), whatever the number of blocks. Padding between runs is never read or written.

The order of a group's bytes in its slot is the order of their addresses: first by allocation (in
the order the tensors were given), then by address. `Pages.signature` says it in words, so that
a namespace can cover it.

Tensors may live on any device; the arena is host memory. On a CPU no copy outlives the call. On
an accelerator the copies are those of the current stream, and the call waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.blocks import ARENA_ALIGN
from tierkv.errors import LayoutError
from tierkv.layout import Layout

STAGING_BYTES: Final = 16 << 20
"""Blocks are staged in batches of about this many bytes, so that a large move does not double its
size in host memory. 4 to 64 MiB measured the same; it only has to hold many small blocks."""

_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
# Bytes per word of an indexed copy. torch copies row by row in elements: 1.8 GB/s with bytes,
# 10 GB/s with 8-byte words on two cores.


def arena_tensor(arena: memoryview) -> torch.Tensor:
    """uint8[len(arena)], a torch tensor over the same writable bytes (no copy).

    The tensor keeps the memoryview alive: drop it before closing what the view belongs to.
    """
    return torch.from_numpy(np.frombuffer(arena, np.uint8))


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes that are neighbors in every block: block b's start at `start + b * stride`."""

    storage: torch.UntypedStorage
    start: int
    stride: int
    nbytes: int
    blocks: int

    def touches(self, other: _Run) -> bool:
        """Whether `other` begins where this one ends, in every block."""
        return (
            self.storage is other.storage
            and self.stride == other.stride
            and self.blocks == other.blocks
            and self.start + self.nbytes == other.start
        )


class _GroupPages:
    """The compiled pages of one group."""

    __slots__ = ("block_bytes", "blocks", "device", "views", "word", "word_bytes")

    def __init__(self, runs: Sequence[_Run], device: torch.device) -> None:
        self.device = device
        self.block_bytes = sum(r.nbytes for r in runs)
        self.blocks = min(r.blocks for r in runs)
        parts = [n for r in runs for n in (r.start, r.stride, r.nbytes)]
        divisor = math.gcd(*parts, 8)
        self.word_bytes, self.word = next(w for w in _WORDS if w[0] == divisor)
        self.views: list[tuple[torch.Tensor, slice]] = []
        first = 0
        for run in runs:
            words = run.nbytes // self.word_bytes
            view = torch.empty(0, dtype=self.word, device=device).set_(
                run.storage,
                run.start // self.word_bytes,
                (run.blocks, words),
                (run.stride // self.word_bytes, 1),
            )
            self.views.append((view, slice(first, first + words)))
            first += words

    def collect(self, block_ids: torch.Tensor) -> torch.Tensor:
        """word[n, words per block]: the bytes of these blocks in slot order, on the host."""
        shape = (len(block_ids), self.block_bytes // self.word_bytes)
        staged = torch.empty(shape, dtype=self.word, device=self.device)
        ids = block_ids.to(self.device)
        for view, columns in self.views:
            staged[:, columns] = torch.index_select(view, 0, ids)
        return staged.cpu()

    def spread(self, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Write rows of slot bytes into the pages of these blocks."""
        ids, there = block_ids.to(self.device), staged.to(self.device)
        for view, columns in self.views:
            view.index_copy_(0, ids, there[:, columns])

    def windows(self, arena: torch.Tensor) -> NDArray[Any]:
        """word[starts, words per block] over the arena: one (overlapping) row per legal offset."""
        starts = (arena.numel() - self.block_bytes) // ARENA_ALIGN + 1
        words = arena.numpy()[: arena.numel() // self.word_bytes * self.word_bytes]
        typed = words.view(np.dtype(f"i{self.word_bytes}" if self.word_bytes > 1 else "u1"))
        return np.lib.stride_tricks.as_strided(
            typed,
            (max(starts, 0), self.block_bytes // self.word_bytes),
            (ARENA_ALIGN, self.word_bytes),
        )


class Pages:
    """Where the pages of every group lie, compiled; copies batches to and from the arena.

    tensors: for each reusable group of `layout`, by name, the tensors that hold its pages. Dim 0
        of each is the block id; any shape, dtype and strides behind it. Several groups may
        overlay one allocation, as engines do. Scratch groups may be left out.

    Raises `LayoutError` where a group's tensors hold another number of bytes per block than its
    `block_bytes` (both numbers are named), where two pages share bytes, or for unknown names.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._groups: dict[int, _GroupPages] = {}
        self._signature: dict[str, Any] = {}
        for name in tensors:
            layout.index_of(name)
        for index, group in enumerate(layout.groups):
            given = tensors.get(group.name, ())
            if isinstance(given, torch.Tensor) or any(
                not isinstance(t, torch.Tensor) for t in given
            ):
                raise LayoutError(f"group {group.name!r}: write a list of torch tensors")
            if not given:
                if group.reusable:
                    raise LayoutError(f"group {group.name!r}: no tensor holds its pages")
                continue
            pages = _compile(group.name, given)
            if pages.block_bytes != group.block_bytes:
                raise LayoutError(
                    f"group {group.name!r}: its tensors hold {pages.block_bytes} bytes per block, "
                    f"but the layout says block_bytes {group.block_bytes}"
                )
            self._groups[index] = pages
            self._signature[group.name] = [_order(t) for t in given]

    @property
    def signature(self) -> dict[str, Any]:
        """What decides the order of bytes in a slot, JSON-able; equal where slots are exchangeable.

        Per group and tensor: dtype, page shape, and the order of its dimensions in memory.
        """
        return self._signature

    @property
    def runs(self) -> tuple[int, ...]:
        """Byte runs per block, one entry a group that has tensors."""
        return tuple(len(g.views) for g in self._groups.values())

    def gather(
        self,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        arena: torch.Tensor,
        offsets: NDArray[np.int64],
    ) -> None:
        """Copy the pages of n blocks into their slots.

        groups: uint16[n]; block_ids: int32[n]; offsets: int64[n] bytes into `arena`, multiples of
        `ARENA_ALIGN`, no slot twice; arena: uint8, contiguous, host. Returns when the bytes are in
        the arena. `ValueError` for a block id or offset that is out of range: nothing of that
        group is copied then.
        """
        for pages, rows in self._parts(groups, block_ids, arena, offsets):
            windows = pages.windows(arena)
            staged = pages.collect(torch.from_numpy(block_ids[rows].astype(np.int64)))
            windows[offsets[rows] // ARENA_ALIGN] = staged.numpy()

    def scatter(
        self,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        arena: torch.Tensor,
        offsets: NDArray[np.int64],
    ) -> None:
        """Copy n slots into the pages of their blocks; the reverse of `gather`.

        Same arguments and errors; no block id of a group twice. Bytes of the pages that belong to
        no tensor of the group stay as they are.
        """
        for pages, rows in self._parts(groups, block_ids, arena, offsets):
            windows = torch.from_numpy(pages.windows(arena))
            staged = torch.index_select(windows, 0, torch.from_numpy(offsets[rows] // ARENA_ALIGN))
            pages.spread(torch.from_numpy(block_ids[rows].astype(np.int64)), staged)

    def _parts(
        self,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        arena: torch.Tensor,
        offsets: NDArray[np.int64],
    ) -> Iterator[tuple[_GroupPages, NDArray[np.intp]]]:
        """The rows of the batch by group, checked, in staging-sized parts."""
        for index in np.unique(groups).tolist():
            pages = self._groups.get(index)
            if pages is None:
                raise ValueError(f"group {index} has no pages here")
            rows = np.flatnonzero(groups == index)
            _check(pages, block_ids[rows], offsets[rows], arena.numel())
            step = max(1, STAGING_BYTES // pages.block_bytes)
            for first in range(0, len(rows), step):
                yield pages, rows[first : first + step]


def _check(
    pages: _GroupPages, block_ids: NDArray[np.int32], offsets: NDArray[np.int64], arena_bytes: int
) -> None:
    """Refuse what would read or write outside the pages or the arena."""
    low, high = int(block_ids.min()), int(block_ids.max())
    if low < 0 or high >= pages.blocks:
        raise ValueError(f"block ids {low}..{high} are outside 0..{pages.blocks - 1}")
    low, high = int(offsets.min()), int(offsets.max())
    if low < 0 or high + pages.block_bytes > arena_bytes or np.any(offsets % ARENA_ALIGN):
        raise ValueError(
            f"slots at {low}..{high} of {pages.block_bytes} bytes: offsets must be multiples of "
            f"{ARENA_ALIGN} inside an arena of {arena_bytes} bytes"
        )


def _compile(name: str, tensors: Sequence[torch.Tensor]) -> _GroupPages:
    """The fewest runs that cover the tensors' pages, in slot order."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise LayoutError(f"group {name!r}: its tensors are on {sorted(map(str, devices))}")
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
    found: list[tuple[int, int, _Run]] = []
    for tensor in tensors:
        raw = tensor.untyped_storage()
        order, storage = storages.setdefault(raw.data_ptr(), (len(storages), raw))
        found += [(order, r.start, r) for r in _runs_of(name, tensor, storage)]
    found.sort(key=lambda item: item[:2])
    runs: list[_Run] = []
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
            runs[-1] = _Run(last.storage, last.start, last.stride, nbytes, last.blocks)
        else:
            runs.append(run)
    if not runs:
        raise LayoutError(f"group {name!r}: its tensors are empty")
    return _GroupPages(runs, devices.pop())


def _runs_of(name: str, tensor: torch.Tensor, storage: torch.UntypedStorage) -> list[_Run]:
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
    return [_Run(storage, start, stride, nbytes, blocks) for start in starts]


def _order(tensor: torch.Tensor) -> dict[str, Any]:
    """One tensor's part of the signature; free of what depends on the number of blocks."""
    strides = tensor.stride()
    ranked = sorted(range(1, tensor.dim()), key=lambda d: (-strides[d], d))
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "page": list(tensor.shape[1:]),
        "order": [d - 1 for d in ranked if tensor.shape[d] > 1],
    }
