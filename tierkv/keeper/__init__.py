"""The keeper: a child process beside an engine's worker that owns its storage tier.

An engine's worker is a busy Python process: a thread that reads a disk there waits for the GIL
after every call, and falls to a fraction of the disk's speed (`bench/gil.py`). So the storage half
runs in a process of its own, over the same arena (`tierkv.pinned`), and the two speak in batches
(`tierkv.keeper.wire`).
"""

from __future__ import annotations

from tierkv.keeper.client import KeeperClient

__all__ = ["KeeperClient"]
