"""`tierkv.open`: words at the edge become a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tierkv.blocks import ARENA_ALIGN
from tierkv.cache import Cache
from tierkv.codec import parse_codec
from tierkv.errors import ConfigError
from tierkv.layout import Layout
from tierkv.namespace import Namespace
from tierkv.reach import AUTO, Policy
from tierkv.storage import StorageConfig
from tierkv.urls import parse_size


def open(
    url: str,
    *,
    layout: Layout | Mapping[str, Any] | str | Path,
    namespace: Namespace | str,
    pinned: str | int = "1GiB",
    policy: Policy | str = AUTO,
    isolation: Literal["thread", "process"] = "thread",
    rank: int = 0,
    data_parallel_rank: int = 0,
    read_timeout_s: float = 10.0,
    write_timeout_s: float = 30.0,
    codec: str = "none",
    device_checksums: bool = False,
) -> Cache:
    """A cache over pinned RAM and one storage tier; open it with ``async with``.

    url: the storage tier, ``nvme:///mnt/kv?capacity=20GiB``; "" for pinned RAM alone.
    layout: the groups; a `Layout`, its JSON form, or the path of a layout file.
    namespace: everything that decides what the bytes mean: a `Namespace`, or ``model@revision``
        where you vouch for the rest. Caches with different namespaces never share a block.
    pinned: bytes of RAM for the arena.
    policy: which boundaries are kept: ``auto``, ``dense``, ``end``, ``interval:4096``.
    isolation: ``process`` runs the storage half in a keeper process, for programs whose Python
        threads are busy.
    rank, data_parallel_rank: which process of a parallel engine this is; each has its own store.
    read_timeout_s, write_timeout_s: deadline of one load or save in the storage tier.
    codec: ``lz4`` stores blocks compressed where that saves an eighth. A store may hold both.
    device_checksums: sum a save's blocks where their pages are, so that changes on the way are seen
        too; but a CPU verifies these sums at a sixth of the usual rate (bench/codec.py).

    Raises `ConfigError` in one line for what cannot be; `StoreError` comes when it is opened.

    >>> async with tierkv.open(
    ...     "nvme:///tmp/kv?capacity=1GiB", pinned="64MiB", layout=layout, namespace="llama@rev1"
    ... ) as cache:
    ...     print(cache.stats()["tier_blocks"])
    0
    """
    if not isinstance(url, str):
        raise ConfigError(f'url is {url!r}; write a tier URL as a str, or "" for pinned RAM alone')
    _check_isolation(isolation, url)
    _check_ranks(rank=rank, data_parallel_rank=data_parallel_rank)
    _check_seconds(read_timeout_s=read_timeout_s, write_timeout_s=write_timeout_s)
    layout, sums = _layout(layout), _flag(device_checksums)
    namespace = _namespace(namespace, layout)
    config = StorageConfig(
        url=url,
        namespace=namespace.digest,
        namespace_text=namespace.text,
        arena_bytes=parse_size(pinned, "pinned") // ARENA_ALIGN * ARENA_ALIGN,
        block_bytes=layout.block_bytes,
        rank=rank,
        data_parallel_rank=data_parallel_rank,
        read_timeout_s=read_timeout_s,
        write_timeout_s=write_timeout_s,
        codec=parse_codec(codec, url, "codec"),
    )
    return Cache(layout, config, Policy.parse(policy), isolation=isolation, device_checksums=sums)


def _layout(given: object) -> Layout:
    if isinstance(given, Layout):
        return given
    if isinstance(given, str | Path):
        return Layout.from_file(given)
    if isinstance(given, Mapping):
        return Layout.from_dict(given)
    raise ConfigError(f"layout is {given!r}; write a Layout, its JSON form or the path of a file")


def _namespace(given: object, layout: Layout) -> Namespace:
    if isinstance(given, Namespace):
        return given
    if isinstance(given, str):
        return Namespace.of_text(given, layout)
    raise ConfigError(f"namespace is {given!r}; write a Namespace, or model@revision as a str")


def _check_isolation(isolation: object, url: str) -> None:
    if isolation not in ("thread", "process"):
        raise ConfigError(f"isolation {isolation!r}: write thread or process")
    if isolation == "process" and not url:
        raise ConfigError('isolation "process" has nothing to isolate: there is no storage tier')


def _flag(given: object) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"device_checksums is {given!r}; write True or False")
    return given


def _check_ranks(**ranks: object) -> None:
    for name, given in ranks.items():
        # A bool is an int to Python, and names a directory like one.
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ConfigError(f"{name} is {given!r}; write an int, 0 or more")


def _check_seconds(**durations: object) -> None:
    for name, given in durations.items():
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or not 0 < float(given) < math.inf:  # type: ignore[arg-type]  # a number
            raise ConfigError(f"{name} is {given!r}; write seconds, a number above 0")
