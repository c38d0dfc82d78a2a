"""tierkv keeps the KV cache of LLM inference alive after it leaves the GPU.

A tour of the files, in the order that they are best read. Arrows point down only.

What things are (plain data, no decisions)::

    errors      the error tree, drawn
    layout      a model's groups of layers: kind, block size, bytes; unit and alignment
    blocks      batches as columns: keys, moves, outcomes, events
    urls        nvme:///mnt/kv?capacity=20GiB, parsed once

Deciding (pure: no I/O, no await, so it runs inside an engine's scheduler)::

    reach       which blocks a hit needs, and so which are worth keeping: the heart
    hashing     token ids to a chain of block hashes
    namespace   a fingerprint of everything that decides what the bytes mean
    boundary    the policies by name: auto, dense, end, …
    index       where each block is; stock: seen along one prompt; slots: where it lies in the arena
    policy      what to evict
    planner     what is known + what is asked = a plan
    ledger      acts on plans; with room, books, flights and holdings the only writer of residency
    plan        the same rules on one imagined prompt, for people; presets: known models
    leases      who holds slots, for how long and what for, for people

Moving (asyncio: on the caller's loop, or in a keeper process beside an engine)::

    storage     the port through which deciding and moving meet; local: on the caller's own loop
    mover       runs moves (running): deadlines, cancellation; tier: proof and retirement
    record      64 bytes beside every block that prove it; multilinear: a checksum for GPUs
    codec       LZ4 where it pays, if it is asked for
    pinned      the arena of slots, in shared memory
    iosched     loads before saves, bytes in flight bounded; health: when a tier is left alone
    backend     the interface behind a storage tier; registry finds one by URL scheme
    keeper      the process that owns an engine's tiers, and its client

The doors::

    device      pages to slots and back (torch); device_sums: the checksum there; jobs: in a thread
    copier      staging and what is ordered after what, in the queues and marks of streams; runs
                and host: the memory on both sides; registration: pinned; completions: the ends
    opening     `tierkv.open`; cache: lookup, save, load, flush, rotate; answers: what they return
    connectors  the same inside an engine: vLLM
    testing     the kit that every backend passes, yours too
    cli         the command `tierkv`; demo: what it shows first

Importing `tierkv` imports none of these: a name is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.answers import Flushed as Flushed
    from tierkv.answers import Loaded as Loaded
    from tierkv.answers import PrefixHit as PrefixHit
    from tierkv.answers import Saved as Saved
    from tierkv.blocks import Keys as Keys
    from tierkv.blocks import Outcome as Outcome
    from tierkv.cache import Cache as Cache
    from tierkv.device import Pages as Pages
    from tierkv.errors import BackendNotFoundError as BackendNotFoundError
    from tierkv.errors import CacheClosedError as CacheClosedError
    from tierkv.errors import CapacityError as CapacityError
    from tierkv.errors import ConfigError as ConfigError
    from tierkv.errors import DeadlineError as DeadlineError
    from tierkv.errors import KeeperError as KeeperError
    from tierkv.errors import LayoutError as LayoutError
    from tierkv.errors import StoreBusyError as StoreBusyError
    from tierkv.errors import StoreError as StoreError
    from tierkv.errors import StoreUnusableError as StoreUnusableError
    from tierkv.errors import TierKVError as TierKVError
    from tierkv.hashing import Extras as Extras
    from tierkv.hashing import HashChain as HashChain
    from tierkv.layout import Group as Group
    from tierkv.layout import GroupKind as GroupKind
    from tierkv.layout import Layout as Layout
    from tierkv.namespace import Namespace as Namespace
    from tierkv.opening import open as open
    from tierkv.reach import Policy as Policy

_HOMES = {
    "answers": ("Flushed", "Loaded", "PrefixHit", "Saved"),
    "blocks": ("Keys", "Outcome"),
    "cache": ("Cache",),
    "device": ("Pages",),
    "errors": (
        "BackendNotFoundError",
        "CacheClosedError",
        "CapacityError",
        "ConfigError",
        "DeadlineError",
        "KeeperError",
        "LayoutError",
        "StoreBusyError",
        "StoreError",
        "StoreUnusableError",
        "TierKVError",
    ),
    "hashing": ("Extras", "HashChain"),
    "layout": ("Group", "GroupKind", "Layout"),
    "namespace": ("Namespace",),
    "opening": ("open",),
    "reach": ("Policy",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tierkv")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    value = getattr(import_module(f"tierkv.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
