"""The checksum of `tierkv.multilinear` in torch: made where the blocks are, by CPU or GPU.

The same function bit for bit, so a block that is sealed here is verified by the keeper without
torch, and the other way round. A batch costs five launches per level of its tree, two levels for
blocks of up to 8 MiB, and as many again for every further `TILE_BYTES` of a large one.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.multilinear import (
    CHUNK_CHARS,
    LANES,
    LAST_CHARS,
    LEVELS,
    as_char,
    level_keys,
)

TILE_BYTES: Final = {"cpu": 512 << 10, "cuda": 8 << 20}
"""Payload per product: it takes four times as much memory for a moment. On a CPU that has to stay
in a cache (four times as fast as a whole batch, bench/codec.py); a GPU wants few launches, and an
engine leaves little of its memory."""


def checksums(blocks: torch.Tensor, seeds: NDArray[np.uint64]) -> torch.Tensor:
    """int64[n] on the device of `blocks`: their checksums, to be viewed as uint64.

    blocks: [n, ...], each row contiguous, any dtype, on any device; row i is the payload of block
        i. Rows may be any number of bytes above 0; rows that are a whole number of 8 KiB chunks and
        lie one behind the other save one copy.
    seeds: uint64[n], `tierkv.record.seeds` of their keys.

    On an accelerator it runs on the current stream and does not wait for it. `ValueError` for
    rows that are not contiguous or not as many as the seeds.
    """
    if not blocks[:1].is_contiguous() or len(blocks) != len(seeds):
        raise ValueError(
            f"blocks of shape {tuple(blocks.shape)} and strides {blocks.stride()} for "
            f"{len(seeds)} seeds; write one contiguous row a seed"
        )
    n, nbytes = len(blocks), blocks[:1].numel() * blocks.element_size()
    if not n:
        return torch.empty(0, dtype=torch.int64, device=blocks.device)
    rows = blocks.reshape(n, -1).view(torch.uint8)
    if rows.storage_offset() % 4 or rows.stride(0) % 4:
        rows = rows.clone()  # words are read in place only where they are aligned
    if nbytes % 4:
        rows = _padded(rows, 4)
    top, level = _level(rows.view(torch.int32), 0), 1
    while top.shape[1] > 1:
        top, level = _level(top.reshape(n, -1), level), level + 1
    length = torch.full((n, 1), as_char(nbytes), dtype=torch.int32, device=blocks.device)
    seed = torch.from_numpy(np.ascontiguousarray(seeds, "<u8").view("<i4").reshape(n, 2))
    last = torch.cat([top[:, 0], length, seed.to(blocks.device)], dim=1)
    return _product(last, LEVELS).view(torch.int64).reshape(n)


def _level(chars: torch.Tensor, level: int) -> torch.Tensor:
    """int32[n, chunks, LANES] of int32[n, characters], a tile at a time."""
    n, given = chars.shape
    width = min(max(given, 1), CHUNK_CHARS)  # zeros behind them would add nothing
    flat = _padded(chars, width).reshape(-1, width)
    step = max(1, TILE_BYTES.get(flat.device.type, TILE_BYTES["cuda"]) // (4 * width))
    parts = [_product(flat[at : at + step], level) for at in range(0, len(flat), step)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.reshape(n, -1, LANES)


def _product(chars: torch.Tensor, level: int) -> torch.Tensor:
    """int32[m, LANES] of int32[m, characters]. int64 wraps modulo 2^64, as the hash wants it."""
    first, others = _keys(level, chars.device)
    sums = (chars[:, None, :] * others[:, : chars.shape[1]]).sum(-1).add_(first)
    return (sums >> 32).to(torch.int32)


def _padded(rows: torch.Tensor, unit: int) -> torch.Tensor:
    """Rows filled up with zeros to a multiple of `unit`; the same tensor where they are."""
    given = rows.shape[1]
    wanted = max(1, -(-given // unit)) * unit
    if wanted == given:
        return rows
    out = torch.zeros((len(rows), wanted), dtype=rows.dtype, device=rows.device)
    out[:, :given] = rows
    return out


@functools.cache
def _keys(level: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of a level on a device: 64 KiB in all, copied there once."""
    first, others = level_keys(level)
    return (torch.tensor(first, device=device), torch.tensor(others, device=device))


assert LAST_CHARS == LANES + 3  # `checksums` puts the last characters together as the twin does
