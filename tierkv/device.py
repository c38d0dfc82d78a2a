"""Pages ↔ slots: copies batches of blocks between an engine's tensors and one contiguous extent.

At construction the pages of every group are compiled into the fewest **byte runs** per block:
stretches of bytes that lie next to each other in every block. Runs of one allocation that are
equally long and equally far apart, such as the layers of an engine, form a **comb**. A batch is
then one indexed copy per (group, comb), whatever the number of blocks and layers. Padding between
runs is never read or written.

The order of a group's bytes in its slot is the order of their addresses: first by allocation (in
the order the tensors were given), then by address. `Pages.signature` says it in words, so that
a namespace can cover it.

Tensors may live on any device. `pack` and `unpack` copy between pages and an extent on the same
device, on the current stream, and wait for nothing: `tierkv.copier` puts them in order. `gather`
and `scatter` copy between pages and an arena in host memory, and have copied when they return.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.blocks import ARENA_ALIGN
from tierkv.errors import LayoutError
from tierkv.layout import Layout
from tierkv.runs import GroupPages, compile_group

STAGING_BYTES: Final = 1 << 20
"""Blocks that go through staging in host memory go in batches of about this many bytes: they stay
in a cache between their two copies (bench/device.py)."""

SHORT_RUN_BYTES: Final = 256 << 10
"""Of blocks without strips (`tierkv.runs`). Slots that lie alone are copied one by one, in some
50 µs each beside the copy, where they are longer than this (bench/device.py); shorter ones go
through staging, many in a call."""


def arena_tensor(arena: memoryview) -> torch.Tensor:
    """uint8[len(arena)], a torch tensor over the same writable bytes (no copy).

    The tensor keeps the memoryview alive: drop it before closing what the view belongs to.
    """
    return torch.from_numpy(np.frombuffer(arena, np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Blocks of one group that fit into one staging buffer, in the order of their slots.

    In staging, block i lies at `i * slot`, so that neighbors in the arena are neighbors there.

    group: index in the layout. slot, payload: bytes per block with and without what its slot is
    rounded up by. block_ids: int64[n]. offsets: int64[n], ascending. rows: intp[n], where they
    stood in the batch.
    """

    group: int
    slot: int
    payload: int
    block_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    rows: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of staging."""
        return len(self) * self.slot

    @property
    def payload_bytes(self) -> int:
        """Bytes of the blocks themselves."""
        return len(self) * self.payload

    def take(self, first: int, end: int) -> Part:
        """Blocks [first, end)."""
        ids, at = self.block_ids[first:end], self.offsets[first:end]
        return Part(self.group, self.slot, self.payload, ids, at, self.rows[first:end])

    def payloads(self, extent: torch.Tensor) -> torch.Tensor:
        """uint8[n, payload]: the blocks in their staging, a view."""
        at = extent.storage_offset()
        return extent.as_strided((len(self), self.payload), (self.slot, 1), at)

    def runs(self) -> list[tuple[int, int]]:
        """[first, end) of blocks whose slots lie side by side."""
        bounds = np.flatnonzero(np.diff(self.offsets) != self.slot) + 1
        return list(zip([0, *bounds.tolist()], [*bounds.tolist(), len(self)], strict=True))

    def extents(self, cuts: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """The fewest (offset in staging, offset in the arena, bytes), none across a cut.

        cuts: int64, ascending. The last block of an extent is without what its slot is rounded
        up by.
        """
        found = []
        for first, end in self.runs():
            start = int(self.offsets[first])
            stop = start + (end - first - 1) * self.slot + self.payload
            inside = cuts[np.searchsorted(cuts, start, "right") : np.searchsorted(cuts, stop)]
            edges = [start, *inside.tolist(), stop]
            shift = first * self.slot - start
            found += [(a + shift, a, b - a) for a, b in itertools.pairwise(edges)]
        return found


class Pages:
    """Where the pages of every group lie, compiled; copies batches to and from the arena.

    tensors: for each reusable group of `layout`, by name, the tensors that hold its pages. Dim 0
        of each is the block id; any shape, dtype and strides behind it. Several groups may
        overlay one allocation, as engines do. Scratch groups may be left out.

    Raises `LayoutError` where a group's tensors hold another number of bytes per block than its
    `block_bytes` (both numbers are named), where two pages share bytes, or for unknown names.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._groups: dict[int, GroupPages] = {}
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
            pages = compile_group(group.name, given)
            if pages.block_bytes != group.block_bytes:
                raise LayoutError(
                    f"group {group.name!r}: its tensors hold {pages.block_bytes} bytes per block, "
                    f"but the layout says block_bytes {group.block_bytes}"
                )
            self._groups[index] = pages
            if pages.device != self._groups[min(self._groups)].device:
                raise LayoutError(
                    f"group {group.name!r}: its tensors are on {pages.device}, those before on "
                    f"{self._groups[min(self._groups)].device}; all must be on one device"
                )
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
        return tuple(g.runs for g in self._groups.values())

    @property
    def launches(self) -> tuple[int, ...]:
        """Indexed copies per batch, one entry a group that has tensors."""
        return tuple(len(g.combs) for g in self._groups.values())

    @property
    def largest_slot(self) -> int:
        """Bytes of the largest group's slot."""
        return max((g.slot for g in self._groups.values()), default=0)

    @property
    def device(self) -> torch.device:
        """Where the tensors are, all of them."""
        return next((g.device for g in self._groups.values()), torch.device("cpu"))

    def parts(
        self,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        arena_bytes: int,
        staging_bytes: int = 0,
    ) -> list[Part]:
        """The batch by group, checked, in parts of at most `staging_bytes`, or of one block.

        groups: uint16[n]; block_ids: int32[n]; offsets: int64[n] bytes into an arena of
        `arena_bytes`, multiples of `ARENA_ALIGN`, no slot twice; staging_bytes: 0 for no bound.
        `ValueError` for a group without pages and for a block id or an offset out of range.
        """
        found = []
        for index in np.unique(groups).tolist():
            pages = self._groups.get(index)
            if pages is None:
                raise ValueError(f"group {index} has no pages here")
            rows = np.flatnonzero(groups == index)
            rows = rows[np.argsort(offsets[rows], kind="stable")]
            ids, at = block_ids[rows].astype(np.int64), offsets[rows]
            _check(pages, ids, at, arena_bytes)
            step = max(1, staging_bytes // pages.slot) if staging_bytes else len(rows)
            whole = Part(index, pages.slot, pages.block_bytes, ids, at, rows)
            found += [whole.take(n, n + step) for n in range(0, len(rows), step)]
        return found

    def pack(self, part: Part, extent: torch.Tensor) -> None:
        """Copy the pages of a part's blocks into `extent`, block i at byte `i * part.slot`.

        extent: uint8[>= part.nbytes], contiguous, aligned to 8 bytes, on the pages' device. Bytes
        between the blocks stay as they are. Runs on the current stream and does not wait for it.
        """
        pages = self._groups[part.group]
        pages.collect(part.block_ids, pages.rows(extent, part.slot, len(part)))

    def unpack(self, part: Part, extent: torch.Tensor) -> None:
        """Copy `extent` into the pages of a part's blocks; the reverse of `pack`.

        No block id twice. Bytes of the pages that belong to no tensor of the group stay.
        """
        pages = self._groups[part.group]
        pages.spread(part.block_ids, pages.rows(extent, part.slot, len(part)))

    def gather(
        self,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        arena: torch.Tensor,
        offsets: NDArray[np.int64],
    ) -> None:
        """Copy the pages of n blocks into their slots.

        Arguments as for `parts`; arena: uint8, contiguous, host. Returns when the bytes are in
        the arena; those between the blocks stay as they are. `ValueError`: nothing was copied.
        """
        for part, pages, inside in self._in_host(groups, block_ids, arena, offsets):
            if pages.strips is not None:
                pages.to_slots(part.block_ids, arena.numpy(), part.offsets)
            elif inside:
                rows = pages.rows(arena[int(part.offsets[0]) :], part.slot, len(part))
                pages.collect(part.block_ids, rows)
            else:
                shape = (len(part), pages.block_bytes // pages.word_bytes)
                staged = torch.empty(shape, dtype=pages.word, device=pages.device)
                pages.collect(part.block_ids, staged)
                # Not index_put_: it checks the windows for overlap, which these do.
                pages.windows(arena).numpy()[part.offsets // ARENA_ALIGN] = staged.cpu().numpy()

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
        for part, pages, inside in self._in_host(groups, block_ids, arena, offsets):
            if pages.strips is not None:
                pages.from_slots(part.block_ids, arena.numpy(), part.offsets)
                continue
            if inside:
                rows = pages.rows(arena[int(part.offsets[0]) :], part.slot, len(part))
            else:
                rows = pages.pick(arena, part.offsets).to(pages.device)
            pages.spread(part.block_ids, rows)

    def _in_host(
        self,
        groups: NDArray[np.uint16],
        block_ids: NDArray[np.int32],
        arena: torch.Tensor,
        offsets: NDArray[np.int64],
    ) -> Iterator[tuple[Part, GroupPages, bool]]:
        """Parts for host memory; with True where one can be copied in place, as rows of slots."""
        for whole in self.parts(groups, block_ids, offsets, arena.numel()):
            pages, runs = self._groups[whole.group], whole.runs()
            if pages.strips is not None:
                yield whole, pages, False
            elif pages.device.type == "cpu" and whole.payload_bytes >= SHORT_RUN_BYTES * len(runs):
                for first, end in runs:
                    yield whole.take(first, end), pages, True
            else:
                step = max(1, STAGING_BYTES // whole.slot)
                for first in range(0, len(whole), step):
                    yield whole.take(first, first + step), pages, False


def _check(
    pages: GroupPages, block_ids: NDArray[np.int64], offsets: NDArray[np.int64], arena_bytes: int
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


def _order(tensor: torch.Tensor) -> dict[str, Any]:
    """One tensor's part of the signature; free of what depends on the number of blocks."""
    strides = tensor.stride()
    ranked = sorted(range(1, tensor.dim()), key=lambda d: (-strides[d], d))
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "page": list(tensor.shape[1:]),
        "order": [d - 1 for d in ranked if tensor.shape[d] > 1],
    }
