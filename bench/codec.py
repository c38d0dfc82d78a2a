"""What the codec saves and costs, and what the checksums cost.

``python -m bench.codec --out bench/results/codec.json`` makes blocks of several kinds and runs
everything on one thread, in interleaved rounds; values are medians, CPU time of that thread.

The first table, one row a kind and block size:

ratio: bytes stored per byte, 1.0 where it does not pay (`tierkv.codec`). codec: what the sample
    chose. lz4, lz4_shuffle: the ratio of each, whether it pays or not.
encode, decode: CPU seconds per GB of blocks, by what was chosen; by the shorter one where nothing
    was.
choose: CPU seconds per GB for the sample, which is all that it costs where it does not pay.

The second, one row a block size: GB/s of XXH3-64, of MULTILINEAR by numpy and by torch, of torch
over a whole batch at once instead of tiles, of a GPU where there is one (its own time, blocks that
lie on it), and of a plain copy.

The kinds are made, not recorded: Gaussian numbers with a scale of their own per channel, as keys
and values have, in BF16, FP16 and FP8; the same with the last half of each block empty; numbers
that repeat from token to token; noise and zeros. No engine was run for them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from tierkv import codec, device_sums, multilinear
from tierkv.backend import BlockBatch
from tierkv.blocks import Keys
from tierkv.record import Codec, blank

BLOCK_BYTES = (64 << 10, 1 << 20)
CHANNELS = 1024
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
KINDS = (*DTYPES, "bf16_half_empty", "bf16_repeating", "noise", "zeros")
SAMPLES = dict[tuple[int, str], list[float]]


def make_data(kind: str, nbytes: int, block_bytes: int) -> memoryview:
    """`nbytes` of blocks of one kind, block after block, writable."""
    rng = torch.Generator().manual_seed(0)
    if kind in ("noise", "zeros"):
        data = torch.zeros(nbytes, dtype=torch.uint8)
        if kind == "noise":
            data.random_(0, 256, generator=rng)
        return memoryview(data.numpy())
    dtype = DTYPES[kind.split("_")[0]]
    tokens = nbytes // dtype.itemsize // CHANNELS
    scales = torch.randn(CHANNELS, generator=rng).exp()
    numbers = torch.randn(tokens, CHANNELS, generator=rng) * scales
    if kind.endswith("repeating"):
        numbers = numbers[:1].expand_as(numbers)
    data = numbers.to(dtype).view(torch.uint8).reshape(-1, block_bytes).contiguous()
    if kind.endswith("half_empty"):
        data[:, block_bytes // 2 :] = 0
    return memoryview(data.reshape(-1).numpy())


def blocks_of(data: memoryview, block_bytes: int) -> BlockBatch:
    """A batch over `data`."""
    n = data.nbytes // block_bytes
    keys = Keys(np.zeros(n, np.uint16), np.random.default_rng(0).bytes(32 * n))
    offsets = np.arange(n, dtype=np.int64) * block_bytes
    return BlockBatch(keys, blank(n), data, offsets, np.full(n, block_bytes, np.int64))


def cpu_s(act: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    act()
    return time.thread_time() - start


def median_s(rounds: int, acts: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of what each gives, in interleaved rounds after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for r in range(rounds + 1):
        for name, act in acts.items():
            seconds = act()
            times[name] += [seconds] if r else []
    return {name: statistics.median(values) for name, values in times.items()}


def codec_row(kind: str, block_bytes: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """What one kind gives."""
    batch = blocks_of(make_data(kind, nbytes, block_bytes), block_bytes)
    payloads, gb = batch.payloads(), nbytes / 1e9
    encoded = {c: [codec.encode_sync(c, p) for p in payloads] for c in Codec if c}
    ratios = {c: sum(map(len, parts)) / nbytes for c, parts in encoded.items()}
    chosen = Codec(int(codec.choose_sync(batch)[0]))
    used = chosen or min(ratios, key=lambda c: (ratios[c], c))
    stored = nbytes
    if chosen:
        sizes = [len(data) for data in encoded[chosen]]
        stored = sum(n if codec.pays(block_bytes, n) else block_bytes for n in sizes)
    into = memoryview(bytearray(block_bytes))

    def decode() -> None:
        for data in encoded[used]:
            assert codec.decode_sync(used, data, into)

    acts: dict[str, Callable[[], float]] = {
        "choose": lambda: cpu_s(lambda: codec.choose_sync(batch)),
        "encode": lambda: cpu_s(lambda: [codec.encode_sync(used, p) for p in payloads]),
        "decode": lambda: cpu_s(decode),
    }
    costs = {name: s / gb for name, s in median_s(rounds, acts).items()}
    return {
        "kind": kind,
        "block_bytes": block_bytes,
        "codec": chosen.name.lower(),
        "ratio": stored / nbytes,
        "lz4_ratio": ratios[Codec.LZ4],
        "lz4_shuffle_ratio": ratios[Codec.LZ4_SHUFFLE2],
        **{f"{name}_cpu_s_per_gb": s for name, s in costs.items()},
    }


def sums_row(block_bytes: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """GB/s of every way to sum or copy blocks of one size."""
    data = make_data("noise", nbytes, block_bytes)
    batch = blocks_of(data, block_bytes)
    payloads, seeds = batch.payloads(), np.zeros(len(batch), np.uint64)
    rows = torch.from_numpy(np.frombuffer(data, np.uint8)).reshape(len(batch), -1)
    copy = torch.empty_like(rows)

    def whole() -> None:
        tile, device_sums.TILE_BYTES["cpu"] = device_sums.TILE_BYTES["cpu"], nbytes
        try:
            device_sums.checksums(rows, seeds)
        finally:
            device_sums.TILE_BYTES["cpu"] = tile

    acts: dict[str, Callable[[], object]] = {
        "xxh3": lambda: [xxhash.xxh3_64_intdigest(p, 0) for p in payloads],
        "numpy": lambda: multilinear.checksums(payloads, seeds),
        "torch": lambda: device_sums.checksums(rows, seeds),
        "torch_whole": whole,
        "memcpy": lambda: copy.copy_(rows),
    }
    timed = {name: _timed(act) for name, act in acts.items()}
    if torch.cuda.is_available():
        there = rows.cuda()
        timed["cuda"] = lambda: _cuda_s(lambda: device_sums.checksums(there, seeds))
        timed["cuda_copy"] = lambda: _cuda_s(there.clone)
    rates = {name: nbytes / 1e9 / s for name, s in median_s(rounds, timed).items()}
    return {"block_bytes": block_bytes, "gb_per_s": rates}


def _timed(act: Callable[[], object]) -> Callable[[], float]:
    return lambda: cpu_s(act)


def _cuda_s(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(mib: int, rounds: int) -> dict[str, Any]:
    """Both tables."""
    torch.set_num_threads(1)
    nbytes = mib << 20
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "mib": mib,
        "rounds": rounds,
        "device": device,
        "codec": [codec_row(k, n, nbytes, rounds) for n in BLOCK_BYTES for k in KINDS],
        "checksums": [sums_row(n, nbytes, rounds) for n in BLOCK_BYTES],
    }


def show(report: dict[str, Any]) -> None:
    """Both tables, for people."""
    print(
        "block     kind             stored as      ratio    lz4  shuffled  encode  decode  choose"
    )
    for r in report["codec"]:
        costs = [r[f"{name}_cpu_s_per_gb"] for name in ("encode", "decode", "choose")]
        ratios = f"{r['ratio']:5.2f}  {r['lz4_ratio']:5.2f}  {r['lz4_shuffle_ratio']:8.2f}"
        times = "".join(f"  {s:6.3f}" for s in costs)
        size = f"{r['block_bytes'] >> 10:4d} KiB"
        print(f"{size}  {r['kind']:15s}  {r['codec']:12s}  {ratios}{times}")
    print("\ncosts in CPU seconds per GB of blocks; checksums in GB/s of one thread:\n")
    names = list(report["checksums"][0]["gb_per_s"])
    print("block   " + "".join(f"{name:>13s}" for name in names))
    for r in report["checksums"]:
        rates = "".join(f"{r['gb_per_s'].get(name, math.nan):13.2f}" for name in names)
        print(f"{r['block_bytes'] >> 10:4d} KiB{rates}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.codec", description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=32, help="MiB per kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    report = measure(args.mib, args.rounds)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
    else:
        show(report)


if __name__ == "__main__":
    main()
