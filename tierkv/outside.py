"""Looking into a store, and mending it, from outside: optional Protocols behind the command line.

All of these are called on a backend that is made from a URL but not open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptBlock:
    """One block that `SupportsVerify.verify` could not prove.

    namespace: the directory, prefix or name it was found under. group, hash_hex: its key.
    where: file and byte offset, or what the backend calls a place. reason: in words.
    """

    namespace: str
    group: int
    hash_hex: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What `verify` did not read, or `evict` did not give up, though it belongs to the store.

    directory: the directory or prefix that it lies in. reason: in words, with the file where it
    is only one.
    """

    directory: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What reading a whole store showed.

    blocks, payload_bytes: what was read and either proven or found `corrupt`. skipped: what was
    not read, so that nothing is known of it. A store is sound where both are empty.
    """

    blocks: int
    payload_bytes: int
    corrupt: tuple[CorruptBlock, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@runtime_checkable
class SupportsVerify(Protocol):
    """The store behind a URL can be read from outside, by `tierkv verify`."""

    async def verify(self, progress: Callable[[int, int], None]) -> Verification:
        """Read every published block of every namespace and prove it. Changes nothing.

        Called on a backend that is made from a URL but not open. `progress(done, total)` counts
        payload bytes and is called on the loop. What cannot be read is listed in `skipped`. Raises
        `StoreError` where there is no store of this kind. Cancellation leaves nothing behind.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHoldings:
    """Blocks of one group in a part of a store, and their payload."""

    group: int
    blocks: int
    payload_bytes: int


class BlockPlace(NamedTuple):
    """One block as a listing shows it. nbytes: payload. where: as in `CorruptBlock`."""

    group: int
    hash_hex: str
    nbytes: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePart:
    """What one owner, a namespace on one rank, has in a store, as read from outside.

    directory: directory or prefix that it lies in. namespace: the readable form; namespace_hex:
        the digest, "" where nothing that can be read says it.
    owner: who has it open right now, in words; "" for nobody. owner_pid: where those words tell.
    groups: by number. blocks: as the next open would find them after a kill: what a running owner
        has forgotten in memory only is still counted.
    physical_bytes: what the quota counts, which is payload, padding_bytes (after blocks),
        dead_bytes (blocks that count no more, tables, what cannot be read) and unused_bytes
        (allocated, free to write to) together.
    oldest_use_s, newest_use_s: Unix time of the last use of what was used least and most
        recently, as the file system tells it; None where there is no block.
    problem: why nothing of it could be read, in words; then only `physical_bytes` is known.
    listing: every block, made one by one while it is iterated.
    """

    directory: str
    namespace: str
    namespace_hex: str
    rank: int = 0
    data_parallel_rank: int = 0
    owner: str = ""
    owner_pid: int | None = None
    groups: tuple[GroupHoldings, ...] = ()
    physical_bytes: int
    padding_bytes: int = 0
    dead_bytes: int = 0
    unused_bytes: int = 0
    oldest_use_s: float | None = None
    newest_use_s: float | None = None
    problem: str = ""
    listing: Iterable[BlockPlace] = ()

    @property
    def blocks(self) -> int:
        """Blocks of all groups."""
        return sum(group.blocks for group in self.groups)

    @property
    def payload_bytes(self) -> int:
        """Their payload."""
        return sum(group.payload_bytes for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A whole store, read from outside.

    capacity_bytes: the quota that the URL gives, or that an open of it would take now.
    free_bytes: of the file system, for this user. unreadable: parts that could not be read whole.
    """

    parts: tuple[StorePart, ...]
    capacity_bytes: int
    free_bytes: int
    unreadable: tuple[Skipped, ...] = ()


@runtime_checkable
class SupportsInspect(Protocol):
    """The store behind a URL can be looked into from outside, by `tierkv ls` and `tierkv du`."""

    async def inspect(self) -> Inspection:
        """What every namespace and rank holds, also while its owner runs. Changes nothing.

        Called on a backend that is made from a URL but not open. Reads indexes, no payload. Raises
        `StoreError` where there is no store of this kind. Cancellation leaves nothing behind.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """What one owner's directory gave up, in physical bytes."""

    directory: str
    namespace: str
    freed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """What `SupportsEvict.evict` did.

    physical_bytes: of the whole store, afterwards. left_bytes: of what was to shrink, which is
    the namespace that was named, or all. skipped: what was asked for and stays, because its owner
    runs.
    """

    physical_bytes: int
    left_bytes: int
    evicted: tuple[Evicted, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@runtime_checkable
class SupportsEvict(Protocol):
    """Blocks in the store behind a URL can be given up from outside, by `tierkv evict`."""

    async def evict(
        self, progress: Callable[[int, int], None], *, namespace: bytes | None, keep_bytes: int
    ) -> Eviction:
        """Give up the coldest blocks until what is left takes at most `keep_bytes` physical bytes.

        Called on a backend that is made from a URL but not open. namespace: only what is of this
        one goes, and only that is measured against `keep_bytes`; None: the whole store. A
        directory whose owner runs counts, but is never touched. `progress(freed, wanted)` counts
        physical bytes and is called on the loop. Raises `StoreError` where there is no store of
        this kind. After a cancellation or a kill what was given up is gone, and the rest is whole.
        """
        ...
