"""What a GPU makes of tierkv's copies, measured and drawn; dry, the same script on a CPU.

``make bench-gpu`` writes bench/results/gpu.json and gpu.png. ``python -m bench.gpu --dry`` runs
every part on this CPU with small sizes; its numbers mean nothing, and the JSON says ``dry``.

host_copies  rates of copies between device memory and the registered arena, each right beside a
             plain `cudaMemcpyAsync` (torch's `copy_` on `pin_memory`) of the same bytes. Goal: 0.9.
kernels      gathering and scattering pages, and summing them (`tierkv.device_sums`), against a copy
             within device memory, by payload.
shapes       saves and loads of 64 blocks a group, device to arena and back, every byte compared;
             what launching takes of the caller's thread, and for how long the engine's stream
             stands still before it may go on.
end_to_end   a prompt through `tierkv.open` and a storage tier: save, flush, load from the tier.
gds          `kvikio` alone, and the ``gds`` backend on the same directory; or why not.

It needs torch with CUDA, numpy, xxhash, uvloop, aiofiles, rich, typer and matplotlib, and two
wheels that a bare machine with torch may lack: ``msgspec`` and ``lz4`` (for the gds part also
``kvikio-cu13``, ``libkvikio-cu13``, ``rapids-logger`` and ``cuda-pathfinder``). Put wheels
into a folder and say ``make bench-gpu GPU_WHEELS=folder``; nothing is fetched. tierkv itself need
not be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierkv
from tierkv import device_sums, registry
from tierkv.backend import BackendContext, DeviceBatch, DeviceMemory, SupportsDeviceIO
from tierkv.blocks import Keys, Outcome, slot_bytes
from tierkv.copier import Copier
from tierkv.device import Pages
from tierkv.host import HostArena
from tierkv.layout import GroupKind, Layout
from tierkv.pinned import Arena
from tierkv.presets import load_preset
from tierkv.record import blank
from tierkv.streams import device_for

ROOT = Path(__file__).parents[1]
SHAPES = ("dsv4-flash", "llama3-70b")
GOAL = 0.9
FULL = {"copy_mib": 1024, "blocks": 64, "tokens": 4096, "rounds": 9}
DRY = {"copy_mib": 8, "blocks": 3, "tokens": 512, "rounds": 2}


class Bench:
    """A device, how much to move, and a clock that waits for the device."""

    def __init__(self, *, dry: bool, folder: Path) -> None:
        self.device = torch.device("cpu" if dry else "cuda:0")
        self.folder = folder
        size = DRY if dry else FULL
        self.nbytes, self.blocks = size["copy_mib"] << 20, size["blocks"]
        self.tokens, self.rounds = size["tokens"], size["rounds"]

    def sync(self) -> None:
        """Wait for everything on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, act: Callable[[], object]) -> float:
        """From launch to end."""
        self.sync()
        start = time.perf_counter()
        act()
        self.sync()
        return time.perf_counter() - start

    def beside(
        self, ours: Callable[[], object], plain: Callable[[], object], nbytes: int
    ) -> dict[str, float]:
        """Rates of both, in turns, and the median of their ratios."""
        pairs = [(self.seconds(plain), self.seconds(ours)) for _ in range(self.rounds + 1)][1:]
        return {
            "gb_per_s": rate(nbytes, [ours for _, ours in pairs]),
            "plain_gb_per_s": rate(nbytes, [plain for plain, _ in pairs]),
            "ratio": round(statistics.median(plain / ours for plain, ours in pairs), 3),
        }


def rate(nbytes: int, times: list[float]) -> float:
    """10^9 bytes per second, of the median time."""
    return round(nbytes / statistics.median(times) / 1e9, 3)


def host_copies(bench: Bench) -> dict[str, Any]:
    """Device ↔ arena against device ↔ torch's own pinned memory."""
    on_gpu = torch.zeros(bench.nbytes, dtype=torch.uint8, device=bench.device)
    plain = torch.zeros(bench.nbytes, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    with Arena.create(bench.nbytes, prefault=True) as arena:
        host = HostArena(arena, [bench.nbytes])
        start = time.perf_counter()
        host.register_sync(bench.device)
        took = time.perf_counter() - start
        memory = host.memory
        found: dict[str, Any] = {
            "register_s_per_gb": round(took / bench.nbytes * 1e9, 3),
            **host.stats(),
            "to_host": bench.beside(
                lambda: memory.copy_(on_gpu, non_blocking=True),
                lambda: plain.copy_(on_gpu, non_blocking=True),
                bench.nbytes,
            ),
            "to_device": bench.beside(
                lambda: on_gpu.copy_(memory, non_blocking=True),
                lambda: on_gpu.copy_(plain, non_blocking=True),
                bench.nbytes,
            ),
        }
        host.unregister_sync()
    return found


def pools(bench: Bench, layout: Layout, blocks: int) -> dict[str, list[torch.Tensor]]:
    """Pages as engines lay them out: several groups packed with padding; one group, by layer."""
    made = {}
    for group in layout.groups:
        if len(layout.groups) == 1:
            layers = 80
            shape = (layers, blocks, group.block_bytes // layers)
            noise = torch.randint(0, 256, shape, dtype=torch.uint8, device=bench.device)
            made[group.name] = [layer.clone() for layer in noise]  # each on its own, as in vLLM
        else:
            padded = group.padded_block_bytes or group.block_bytes
            noise = torch.randint(0, 256, (blocks, padded), dtype=torch.uint8, device=bench.device)
            made[group.name] = [noise[:, : group.block_bytes]]
    return made


def kernels(bench: Bench, layout: Layout) -> dict[str, Any]:
    """Gather and scatter of the first group's pages, against a copy within the device."""
    pages = Pages(layout, pools(bench, layout, 2 * bench.blocks))
    n, slot = bench.blocks, pages.largest_slot
    ids = np.random.default_rng(0).permutation(2 * n)[:n].astype(np.int32)
    offsets = np.arange(n, dtype=np.int64) * slot
    [part] = pages.parts(np.zeros(n, np.uint16), ids, offsets, n * slot)
    extent, other = (
        torch.zeros(n * slot, dtype=torch.uint8, device=bench.device) for _ in range(2)
    )

    seeds = np.zeros(n, np.uint64)

    def plain() -> None:
        other[: part.payload_bytes].copy_(extent[: part.payload_bytes])

    def sums() -> None:
        device_sums.checksums(part.payloads(extent), seeds)

    return {
        "launches": pages.launches[0],
        "gather": bench.beside(lambda: pages.pack(part, extent), plain, part.payload_bytes),
        "scatter": bench.beside(lambda: pages.unpack(part, extent), plain, part.payload_bytes),
        "checksums": bench.beside(sums, plain, part.payload_bytes),
    }


def stall_ms(bench: Bench, copier: Copier, launch: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds that a save takes of the caller's thread, and of its stream."""
    bench.sync()
    if bench.device.type == "cpu":
        start = time.perf_counter()
        copier.protect(launch())
        took = (time.perf_counter() - start) * 1e3
        return took, took
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    start = time.perf_counter()
    copier.protect(launch())
    took = (time.perf_counter() - start) * 1e3
    last.record()
    bench.sync()
    return took, first.elapsed_time(last)


def shape(bench: Bench, layout: Layout) -> dict[str, Any]:
    """Saves and loads of every group's blocks, device ↔ arena, compared byte by byte."""
    n, groups = bench.blocks, len(layout.groups)
    tensors = pools(bench, layout, 2 * n)
    pages = Pages(layout, tensors)
    of = np.repeat(np.arange(groups), n).astype(np.uint16)
    slots = np.array([slot_bytes(b) for b in layout.block_bytes])[of]
    offsets = np.cumsum(slots) - slots
    payload = int(np.array(layout.block_bytes)[of].sum())
    out, back = np.tile(np.arange(n), groups), np.tile(np.arange(n, 2 * n)[::-1], groups)
    with Arena.create(int(slots.sum()), prefault=True) as arena:
        host = HostArena(arena, layout.block_bytes)
        cuts = host.register_sync(bench.device)
        copier = Copier(host.memory, device_for(bench.device), cuts=cuts)

        def save() -> Any:
            ids = out.astype(np.int32)
            return copier.save(pages, of, ids, offsets, after=copier.mark())

        def load() -> Any:
            ids = back.astype(np.int32)
            return copier.load(pages, of, ids, offsets, after=copier.mark())

        saves = [bench.seconds(save) for _ in range(bench.rounds + 1)][1:]
        loads = [bench.seconds(load) for _ in range(bench.rounds + 1)][1:]
        stalls = [stall_ms(bench, copier, save) for _ in range(bench.rounds)]
        wrong = sum(
            not torch.equal(t[int(a)], t[int(b)])
            for g, group in enumerate(layout.groups)
            for t in tensors[group.name]
            for a, b in zip(out[of == g], back[of == g], strict=True)
        )
        copier.close()
        host.unregister_sync()
    return {
        "blocks": len(of),
        "bytes": payload,
        "wrong_pages": wrong,
        "save_gb_per_s": rate(payload, saves),
        "load_gb_per_s": rate(payload, loads),
        "caller_ms_per_save": round(statistics.median(c for c, _ in stalls), 3),
        "caller_ms_per_64_blocks": round(statistics.median(c for c, _ in stalls) * 64 / len(of), 3),
        "engine_stall_ms_per_save": round(statistics.median(s for _, s in stalls), 3),
    }


async def end_to_end(bench: Bench, name: str, scheme: str) -> dict[str, Any]:
    """One prompt through the API: saved, flushed, and loaded in a cache opened anew."""
    layout = load_preset(name)
    counts = [bench.tokens // g.block_tokens + 1 for g in layout.groups]
    rows = [
        n if g.kind is GroupKind.FULL else min(n, 64)
        for n, g in zip(counts, layout.groups, strict=True)
    ]
    pages = Pages(layout, pools(bench, layout, max(rows)))
    tables = {
        g.name: [i % r for i in range(n)]
        for g, n, r in zip(layout.groups, counts, rows, strict=True)
    }
    # Room for all of it in RAM, and twice that in the tier.
    need = sum(r * slot_bytes(g.block_bytes) for r, g in zip(rows, layout.groups, strict=True))
    url = f"{scheme}://{bench.folder}/{name}-{scheme}?capacity={(need >> 19) + 1024}MiB"
    open_cache = {
        "layout": layout,
        "namespace": f"{name}@bench",
        "pinned": f"{2 * need // 4096 * 4096}",
        "policy": "end",
    }
    tokens = np.random.default_rng(1).integers(0, 100_000, bench.tokens).tolist()
    async with tierkv.open(url, **open_cache) as cache:
        chain = cache.chain(tokens)
        start = time.perf_counter()
        saved = await cache.save(chain, pages, tables)
        pinned = time.perf_counter()
        await cache.flush(deadline_s=60)
        stored = time.perf_counter()
        stats = cache.stats()
    async with tierkv.open(url, **open_cache) as cache:
        hit = await cache.lookup([*tokens, 1])
        before = time.perf_counter()
        loaded = await cache.load(hit, pages, tables)
        took = time.perf_counter() - before
    return {
        "tier": scheme,
        "pinned": stats["pinned"],
        "hit_tokens": loaded.tokens,
        "save_to_ram_gb_per_s": rate(saved.nbytes, [pinned - start]),
        "save_to_tier_gb_per_s": rate(saved.nbytes, [stored - start]),
        "load_from_tier_gb_per_s": rate(loaded.nbytes, [took]),
    }


async def gds_rates(bench: Bench) -> dict[str, Any]:
    """The backend's device path against kvikio's own; or why there is none."""
    if "gds" not in registry.schemes():
        return {"available": False, "reason": "no backend is registered for scheme 'gds'"}
    backend = registry.make_backend(f"gds://{bench.folder}/gds?capacity=4GiB")
    block, n = 1 << 20, max(bench.nbytes >> 20, 4)

    async def retire(keys: Keys) -> None:
        """Nobody was promised anything."""

    context = BackendContext(
        namespace=bytes(32), namespace_text="bench", block_bytes=(block,), retire=retire
    )
    await backend.open(context)
    try:
        mode = {"modes": (await backend.usage()).modes}
        if bench.device.type != "cuda" or not isinstance(backend, SupportsDeviceIO):
            return {"available": False, "reason": "there is no GPU", **mode}
        import kvikio

        memory = torch.zeros(n * block, dtype=torch.uint8, device=bench.device)
        memory.random_()
        bench.sync()
        device = DeviceMemory(base=memory.data_ptr(), base_nbytes=n * block)
        keys = Keys.of([(0, i.to_bytes(32, "big")) for i in range(n)])
        at, sizes = np.arange(n, dtype=np.int64) * block, np.full(n, block, np.int64)
        batch = DeviceBatch(keys, blank(n), device, at, sizes)
        await backend.register_device(device)
        times = []
        for act in (backend.write_device, backend.read_device):
            start = time.perf_counter()
            outcomes = await act(batch)
            times.append(time.perf_counter() - start)
            if any(o is not Outcome.DONE for o in map(Outcome, outcomes)):
                raise RuntimeError(f"gds: {act.__name__} ended {outcomes}")
        await backend.unregister_device(device)
        with kvikio.CuFile(str(bench.folder / "raw"), "w+") as file:
            raw = [bench.seconds(lambda: file.pwrite(memory).get())]
            raw.append(bench.seconds(lambda: file.pread(memory).get()))
        return {
            "available": True,
            **mode,
            "write_gb_per_s": rate(n * block, times[:1]),
            "read_gb_per_s": rate(n * block, times[1:]),
            "raw_write_gb_per_s": rate(n * block, raw[:1]),
            "raw_read_gb_per_s": rate(n * block, raw[1:]),
        }
    finally:
        await backend.close()


def use_this_checkout(folder: Path) -> None:
    """Make the backends known where tierkv is not installed: entry points need a distribution."""
    try:
        importlib.metadata.distribution("tierkv")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        where = folder / "site"
        info = where / f"tierkv-{project['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: tierkv\nVersion: {project['version']}\n")
        lines = [f"{k} = {v}" for k, v in project["entry-points"]["tierkv.backends"].items()]
        (info / "entry_points.txt").write_text("\n".join(["[tierkv.backends]", *lines]))
        sys.path.append(str(where))


def machine(bench: Bench) -> dict[str, Any]:
    """What it ran on, without names of hosts."""
    gpu = None
    if bench.device.type == "cuda":
        gpu = torch.cuda.get_device_name(bench.device)
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpu": platform.machine(),
    }


def measure(bench: Bench, *, dry: bool) -> dict[str, Any]:
    """Every part, in the order of the module's docstring."""
    start = time.perf_counter()
    found: dict[str, Any] = {"dry": dry, "machine": machine(bench)}
    found["host_copies"] = host_copies(bench)
    found["kernels"] = {name: kernels(bench, load_preset(name)) for name in SHAPES}
    found["shapes"] = {name: shape(bench, load_preset(name)) for name in SHAPES}
    found["end_to_end"] = {name: asyncio.run(end_to_end(bench, name, "nvme")) for name in SHAPES}
    found["gds"] = asyncio.run(gds_rates(bench))
    found["seconds"] = round(time.perf_counter() - start, 1)
    copies = found["host_copies"]
    found["ok"] = not any(s["wrong_pages"] for s in found["shapes"].values()) and (
        dry or min(copies["to_host"]["ratio"], copies["to_device"]["ratio"]) >= GOAL
    )
    return found


def draw(path: Path, found: dict[str, Any]) -> None:
    """Rates of host copies and of the shapes beside the plain copy, one picture."""
    import matplotlib.pyplot as plt

    copies = found["host_copies"]
    bars = [
        ("plain copy\nto host", copies["to_host"]["plain_gb_per_s"], "#999999"),
        ("arena\nto host", copies["to_host"]["gb_per_s"], "#3b6ea8"),
        ("plain copy\nto device", copies["to_device"]["plain_gb_per_s"], "#999999"),
        ("arena\nto device", copies["to_device"]["gb_per_s"], "#3b6ea8"),
    ]
    for name, one in found["shapes"].items():
        bars.append((f"{name}\nsave", one["save_gb_per_s"], "#d1813a"))
        bars.append((f"{name}\nload", one["load_gb_per_s"], "#d1813a"))
    figure, axes = plt.subplots(figsize=(10, 5), dpi=150)
    try:
        names, heights, colors = zip(*bars, strict=True)
        axes.bar_label(axes.bar(names, heights, color=colors), fmt="%.1f", fontsize=8)
        axes.set_ylabel("GB/s between device and host memory")
        axes.tick_params(axis="x", labelsize=7)
        where = found["machine"]["gpu"] or "dry run on a CPU: the numbers mean nothing"
        axes.set_title(f"tierkv: pages and pinned memory ({where})", loc="left", fontsize=10)
        figure.tight_layout()
        figure.savefig(path)
    finally:
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Measure, print one JSON object, draw. Status 1 where a goal is missed or a byte is wrong."""
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="on this CPU, with small sizes")
    parser.add_argument("--dir", type=Path, help="where tiers are written (default: temporary)")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    parser.add_argument("--png", type=Path, help="draw the picture here")
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        print("bench.gpu: torch sees no GPU here; write --dry to try the script", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=args.dir or "/var/tmp", prefix="tierkv-gpu-") as made:
        folder = Path(made)
        use_this_checkout(folder)
        found = measure(Bench(dry=args.dry, folder=folder), dry=args.dry)
    text = json.dumps(found, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if args.png is not None:
        draw(args.png, found)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
