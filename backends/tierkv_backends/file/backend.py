"""`FileBackend`: one file per block, written under a temporary name and renamed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiofiles
import aiofiles.os
import numpy as np
from numpy.typing import NDArray

from tierkv.backend import (
    Backend,
    BackendContext,
    BlockBatch,
    Inspection,
    Outcomes,
    Usage,
    Verification,
    finish,
)
from tierkv.blocks import Keys, Outcome
from tierkv.errors import CapacityError, ConfigError, StoreError
from tierkv.record import RECORD_BYTES
from tierkv.urls import TierURL, parse_size
from tierkv_backends.file import names
from tierkv_backends.file.directory import (
    Block,
    Directory,
    Foreign,
    drop_foreign_sync,
    no_room,
    on_disk,
)
from tierkv_backends.file.inspection import inspect_root_sync
from tierkv_backends.file.names import Key
from tierkv_backends.file.verify import verify_store

log = logging.getLogger(__name__)

THREADS: Final = 8
"""Files in flight: enough to hide a shared file system's round trips, few enough to be polite."""

DEFAULT_SHARE: Final = 0.8
"""Capacity where none is given: this share of what is free."""

RETIRE_SHARE: Final = 64
"""Room is made by 1/64 of the capacity at a time: asking is a round trip to the other side."""

SCAN_KEYS: Final = 4096
_T = TypeVar("_T")


class FileBackend(Backend):
    """One file per block. See `tierkv_backends.file.names` for what lies where.

    The quota counts what this namespace and rank hold, in whole 4 KiB clusters, and directories of
    other namespaces in the same root that nobody holds; those go first when room is needed.
    Files that somebody deletes are a miss, and forgotten.
    """

    scheme = "file"

    def __init__(self, root: Path, capacity_bytes: int | None = None) -> None:
        self._root = root
        self._asked_bytes = capacity_bytes
        self._capacity_bytes = 0
        self._context: BackendContext | None = None
        self._directory: Directory | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._blocks: dict[Key, Block] = {}  # least recently used first
        self._payload_bytes = 0
        self._physical_bytes = 0  # blocks, foreign directories, and what writes have reserved
        self._foreign: list[Foreign] = []
        self._folders: set[Path] = set()  # known to exist
        self._turns: dict[Key, asyncio.Future[None]] = {}
        self._retiring: set[Key] = set()
        self._making_room = asyncio.Lock()
        self._serial = itertools.count()
        self._counters: Counter[str] = Counter()

    @classmethod
    def from_url(cls, url: TierURL) -> FileBackend:
        """Options: `capacity`, bytes on disk at most (default: 0.8 of what is free)."""
        options = url.take(["capacity"])
        if url.host or not url.path:
            raise ConfigError(
                f"tier URL {url.text!r}: no absolute path; write it like file:///mnt/kv"
            )
        text = options.get("capacity")
        what = f"tier URL {url.text!r}: capacity"
        return cls(Path(url.path), None if text is None else parse_size(text, what))

    # Opening and closing. ----------------------------------------------------------------------

    async def open(self, context: BackendContext) -> None:
        """Lock the directory and list it. Blocks beyond the quota go, the oldest first."""
        try:
            await self._take_over(context)
        except BaseException:
            await self.close()
            raise

    async def _take_over(self, context: BackendContext) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "tierkv-file")
        self._context = context
        directory = self._directory = Directory(self._root, context)
        self._blocks = await self._thread(directory.open_sync)
        default_bytes, disk_bytes = await self._thread(directory.capacity_sync, DEFAULT_SHARE)
        self._capacity_bytes = self._checked_capacity(context, default_bytes, disk_bytes)
        self._foreign = await self._thread(directory.foreign_sync)
        self._payload_bytes = sum(block.nbytes for block in self._blocks.values())
        self._physical_bytes = sum(on_disk(block.nbytes) for block in self._blocks.values())
        self._physical_bytes += sum(foreign.nbytes for foreign in self._foreign)
        await self._fit_quota()

    def _checked_capacity(
        self, context: BackendContext, default_bytes: int, disk_bytes: int
    ) -> int:
        capacity = self._asked_bytes
        if capacity is None:
            log.info("file tier %s: capacity %d bytes, 0.8 of free", self._root, default_bytes)
            return default_bytes
        least = 2 * max(map(on_disk, context.block_bytes))
        if capacity < least:
            raise CapacityError(
                f"file tier {self._root}: capacity {capacity} is too small; "
                f"two of the largest blocks take {least} bytes"
            )
        if capacity > disk_bytes:
            raise CapacityError(
                f"file tier {self._root}: capacity {capacity} exceeds the file system's "
                f"{disk_bytes} bytes"
            )
        return capacity

    async def _fit_quota(self) -> None:
        """At open nothing is promised yet, so nobody needs to be asked."""
        while self._physical_bytes > self._capacity_bytes and (self._foreign or self._blocks):
            if self._foreign:
                await self._drop_foreign()
            else:
                await self.delete(
                    Keys.of(self._oldest(self._physical_bytes - self._capacity_bytes))
                )

    async def close(self) -> None:
        """Wait for the threads, then give the lock back."""
        pool, self._pool = self._pool, None
        directory, self._directory = self._directory, None
        try:
            if pool is not None:
                await finish(asyncio.to_thread(pool.shutdown))
        finally:  # cancelled or not
            if directory is not None:
                await finish(asyncio.to_thread(directory.release_sync))
            self._forget_all()

    def _forget_all(self) -> None:
        self._physical_bytes -= sum(on_disk(block.nbytes) for block in self._blocks.values())
        self._payload_bytes = 0
        self._blocks.clear()
        self._folders.clear()

    # Threads. ----------------------------------------------------------------------------------

    def _open_pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            raise StoreError(f"file tier {self._root} is not open")
        return self._pool

    def _open_blocks(self) -> Path:
        if self._directory is None:
            raise StoreError(f"file tier {self._root} is not open")
        return self._directory.blocks

    async def _thread(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run something that blocks; waits for it even when cancelled."""
        loop = asyncio.get_running_loop()
        return await finish(loop.run_in_executor(self._open_pool(), partial(work, *args)))

    async def _each(self, items: Iterable[_T], one: Callable[[_T], Awaitable[None]]) -> None:
        """`one(item)` for all, THREADS at a time.

        When cancelled, starts no more of them and waits for those that have begun, because their
        threads work in the caller's buffers.
        """
        todo = iter(list(items))
        stopped = False

        async def worker() -> None:
            for item in todo:
                if stopped:
                    return
                await one(item)

        task = asyncio.gather(*(worker() for _ in range(THREADS)), return_exceptions=True)
        try:
            ended = await asyncio.shield(task)
        except asyncio.CancelledError:
            stopped = True
            await finish(task)
            raise
        for error in ended:
            if error is not None:
                raise error

    @contextlib.asynccontextmanager
    async def _alone_with(self, key: Key) -> AsyncIterator[None]:
        """Writes and deletes of one key take turns: an unlink never hits a newer file."""
        while key in self._turns:
            await asyncio.wait([self._turns[key]])
        turn = self._turns[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._turns[key]
            turn.set_result(None)

    # Writing. ----------------------------------------------------------------------------------

    async def write(self, batch: BlockBatch) -> Outcomes:
        """DONE; DECLINED without room (quota or disk), or where a `clear` came between."""
        folder = self._open_blocks()
        keys = list(batch.keys)
        out = np.full(len(batch), Outcome.DONE, np.uint8)
        self._retiring.difference_update(keys)  # wanted again: these stay
        reserved: dict[int, int] = {}

        full: list[int] = []

        async def one(i: int) -> None:
            async with self._alone_with(keys[i]):
                if keys[i] in self._blocks:  # another call was faster
                    return
                try:
                    await self._write_file(folder, keys[i], batch, i)
                except OSError as exc:
                    out[i] = self._write_failed(exc, keys[i])
                    if no_room(exc):
                        full.append(i)
                    return
                if folder == self._open_blocks():
                    out[i] = Outcome.DONE
                    self._publish(keys[i], int(batch.nbytes[i]))
                    del reserved[i]  # the block's own from now on
                else:
                    out[i] = Outcome.DECLINED

        try:
            for i, key in enumerate(keys):
                if self._touch(key):
                    continue
                cost = on_disk(int(batch.nbytes[i]))
                if await self._reserve(cost):
                    reserved[i] = cost
                else:
                    out[i] = Outcome.DECLINED
            await self._each(list(reserved), one)
            if full and await self._give_up_for(sum(reserved[i] for i in full)):
                await self._each([full.pop() for _ in range(len(full))], one)
        finally:
            self._physical_bytes -= sum(reserved.values())
        return out

    async def _write_file(self, folder: Path, key: Key, batch: BlockBatch, i: int) -> None:
        """Record and payload under a temporary name in the same folder, then the rename."""
        pool = self._open_pool()
        final = folder / names.path_of(key)
        temporary = final.with_name(f"{final.stem}.{next(self._serial)}{names.TEMPORARY}")
        if final.parent not in self._folders:
            await self._thread(_make_folder_sync, final.parent)
            self._folders.add(final.parent)
        try:
            async with aiofiles.open(temporary, "wb", executor=pool) as file:
                await file.writelines([batch.records[i].tobytes(), batch.payload(i)])
            await aiofiles.os.replace(temporary, final, executor=pool)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                await aiofiles.os.unlink(temporary, executor=pool)
            raise
        self._counters["bytes_written"] += RECORD_BYTES + int(batch.nbytes[i])

    def _write_failed(self, exc: OSError, key: Key) -> Outcome:
        if isinstance(exc, FileNotFoundError):  # a clear, or somebody removed the folder
            self._folders.clear()
            self._counters["writes_without_folder"] += 1
            return Outcome.DECLINED
        if no_room(exc):
            self._counters["writes_disk_full"] += 1
            return Outcome.DECLINED
        self._counters["write_errors"] += 1
        log.warning("file tier %s: cannot write %s: %s", self._root, names.path_of(key), exc)
        return Outcome.FAILED

    def _publish(self, key: Key, nbytes: int) -> None:
        self._blocks[key] = Block(nbytes)
        self._payload_bytes += nbytes

    # Making room. ------------------------------------------------------------------------------

    async def _reserve(self, nbytes: int) -> bool:
        """Count `nbytes` into the quota, giving up old blocks where it is full."""
        if nbytes > self._capacity_bytes:
            return False
        async with self._making_room:  # held while we ask; only writes come here, never reads
            while self._physical_bytes + nbytes > self._capacity_bytes:
                if not await self._give_up(nbytes):
                    return False
            self._physical_bytes += nbytes
        return True

    async def _give_up_for(self, nbytes: int) -> bool:
        """The disk is fuller than the quota knows (others write to it too): give up that much."""
        async with self._making_room:
            return await self._give_up(nbytes)

    async def _give_up(self, nbytes: int) -> bool:
        """Free at least `nbytes`, if nobody wants the blocks again meanwhile; False: none left."""
        if self._foreign:
            await self._drop_foreign()
            return True
        least = max(nbytes, self._capacity_bytes // RETIRE_SHARE)
        victims = self._oldest(least)
        if not victims or self._context is None:
            return False
        self._retiring.update(victims)
        try:
            await self._context.retire(Keys.of(victims))
            gone = [key for key in victims if key in self._retiring]
        finally:
            self._retiring.difference_update(victims)
        await self.delete(Keys.of(gone))
        self._counters["blocks_evicted"] += len(gone)
        return True

    def _oldest(self, nbytes: int) -> list[Key]:
        """The least recently used blocks that take `nbytes` on disk together, if there are such."""
        keys: list[Key] = []
        for key, block in self._blocks.items():
            if nbytes <= 0:
                break
            keys.append(key)
            nbytes -= on_disk(block.nbytes)
        return keys

    async def _drop_foreign(self) -> None:
        foreign = self._foreign.pop(0)
        try:
            await self._thread(drop_foreign_sync, foreign)
        except OSError as exc:  # what is left of it stays on disk, uncounted until the next open
            log.warning("file tier: cannot remove %s: %s", foreign.path, exc)
        self._physical_bytes -= foreign.nbytes

    # Reading. ----------------------------------------------------------------------------------

    async def read(self, batch: BlockBatch) -> Outcomes:
        """DONE; MISSING where the file is gone or short; FAILED where the disk says so."""
        folder = self._open_blocks()
        keys = list(batch.keys)
        out = np.full(len(batch), Outcome.MISSING, np.uint8)

        async def one(i: int) -> None:
            block = self._blocks.get(keys[i])
            if block is not None and block.nbytes == batch.nbytes[i]:
                out[i] = await self._read_file(folder, keys[i], block, batch, i)

        await self._each([i for i, key in enumerate(keys) if key in self._blocks], one)
        return out

    async def _read_file(
        self, folder: Path, key: Key, block: Block, batch: BlockBatch, i: int
    ) -> Outcome:
        record = bytearray(RECORD_BYTES)
        path = folder / names.path_of(key)
        try:
            async with aiofiles.open(path, "rb", executor=self._open_pool()) as file:
                got = await file.readinto(record) or 0
                got += await file.readinto(batch.payload(i)) or 0
        except FileNotFoundError:
            self._counters["files_vanished"] += 1
            self._forget(key, block)
            return Outcome.MISSING
        except OSError as exc:
            self._counters["read_errors"] += 1
            log.warning("file tier %s: cannot read %s: %s", self._root, names.path_of(key), exc)
            return Outcome.FAILED
        if got != RECORD_BYTES + block.nbytes:
            self._counters["files_short"] += 1
            await self._remove(key, block)
            return Outcome.MISSING
        batch.records[i] = np.frombuffer(record, batch.records.dtype)[0]
        self._touch(key)
        self._counters["bytes_read"] += got
        return Outcome.DONE

    # Everything else. --------------------------------------------------------------------------

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """From memory: what this owner published and did not find missing."""
        return np.fromiter((key in self._blocks for key in keys), np.bool_, len(keys))

    async def lengths(self, keys: Keys) -> NDArray[np.int64]:
        """`tierkv.backend.SupportsLengths`."""
        none = Block(0)
        return np.fromiter((self._blocks.get(key, none).nbytes for key in keys), np.int64)

    async def delete(self, keys: Keys) -> None:
        """Unlink. A file that is already gone is fine; one that cannot go keeps its quota."""

        async def one(key: Key) -> None:
            block = self._blocks.get(key)
            if block is not None:
                await self._remove(key, block)

        await self._each(keys, one)

    async def _remove(self, key: Key, block: Block) -> None:
        """Forget and unlink one block, unless it has been replaced by a newer one."""
        pool, path = self._open_pool(), self._open_blocks() / names.path_of(key)
        async with self._alone_with(key):
            if self._blocks.get(key) is not block:
                return
            self._forget(key, block)
            try:
                await aiofiles.os.unlink(path, executor=pool)
            except FileNotFoundError:
                self._counters["files_vanished"] += 1
            except OSError as exc:
                self._physical_bytes += on_disk(block.nbytes)
                log.warning("file tier: cannot remove %s: %s", path, exc)

    def _touch(self, key: Key) -> bool:
        """Whether the key is there; if so it is the most recently used now."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._blocks[key] = block
        return block is not None

    def _forget(self, key: Key, block: Block) -> None:
        if self._blocks.get(key) is block:
            del self._blocks[key]
            self._payload_bytes -= block.nbytes
            self._physical_bytes -= on_disk(block.nbytes)

    async def clear(self) -> None:
        """Switch to a fresh folder for good, then delete the old. Writes begun before decline."""
        old = self._open_blocks()
        assert self._directory is not None
        new = self._directory.blocks = self._directory.next_blocks()
        self._forget_all()
        try:
            await self._thread(self._directory.clear_sync, old, new)
        except OSError as exc:
            raise StoreError(f"file tier {self._root}: cannot clear: {exc}") from exc

    async def scan(self) -> AsyncIterator[Keys]:
        """What is published, as it was at the call."""
        keys = iter(list(self._blocks))
        while part := list(itertools.islice(keys, SCAN_KEYS)):
            yield Keys.of(part)

    async def usage(self) -> Usage:
        """Physical bytes are whole clusters; other namespaces' that nobody holds are included."""
        return Usage(
            blocks=len(self._blocks),
            payload_bytes=self._payload_bytes,
            physical_bytes=self._physical_bytes,
            capacity_bytes=self._capacity_bytes,
            modes={"io": "threads", "direct": "no"},
            counters=dict(self._counters),
        )

    async def verify(self, progress: Callable[[int, int], None]) -> Verification:
        """`tierkv.backend.SupportsVerify`: read and prove every block of every owner."""
        return await verify_store(self._root, progress)

    async def inspect(self) -> Inspection:
        """`tierkv.backend.SupportsInspect`: a root in use can be looked into as well."""
        asked = (self._root, self._asked_bytes, DEFAULT_SHARE)
        return await finish(asyncio.to_thread(inspect_root_sync, *asked))


def _make_folder_sync(folder: Path) -> None:
    """Make the folders of a group and a prefix, not the one above: a clear takes that away."""
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
