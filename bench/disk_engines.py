"""The engines that `bench.disk_tier` runs side by side, each behind the same few methods.

An engine moves blocks between slots of one arena and a directory, a *job* at a time. Jobs run side
by side, up to a bound that is the same for every engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest import mock

import aiofiles
import aiofiles.os
import numpy as np

from tierkv import record
from tierkv.blocks import (
    HASH_BYTES,
    Appraise,
    Keys,
    MoveDone,
    MoveKind,
    Outcome,
    Retire,
    planned_move,
)
from tierkv.index import Index
from tierkv.keeper import KeeperClient
from tierkv.local import LocalStorage
from tierkv.pinned import Arena
from tierkv.storage import StorageConfig, StoragePort

_TRIES: Final = 20
"""How often a save that found no room is offered."""


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks of one set to be moved together. first: slot of the first. hashes: 32 bytes each."""

    save: bool
    set_number: int
    first: int
    hashes: bytes

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.hashes) // HASH_BYTES


def split(hashes: bytes) -> list[bytes]:
    """One hash per block."""
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


@dataclass(frozen=True, slots=True)
class Setup:
    """What every engine is given.

    directory: its own, empty. arena: slot i starts at ``i * block_bytes``. jobs: how many run side
    by side at most. blocks: of one set. sets: how many sets of blocks fit on disk before old ones
    must go.
    """

    directory: Path
    arena: Arena
    block_bytes: int
    blocks: int
    jobs: int
    sets: int = 4


class Engine(ABC):
    """One way to keep blocks on a disk."""

    name: ClassVar[str]
    buffered: ClassVar[bool] = False
    """Whether what it wrote lies in the page cache until it is synced."""
    beside_load: ClassVar[bool] = False
    """Whether ``--gil-load both`` measures it beside the spinning thread as well."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @property
    def room_bytes(self) -> int:
        """What it may fill before it uses space again."""
        return self.setup.sets * self.setup.blocks * self.setup.block_bytes

    @abstractmethod
    async def open(self) -> None:
        """Get ready to move."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything but the files."""

    @abstractmethod
    async def move(self, job: Job) -> None:
        """Carry a job out; raises where a block was not moved."""

    @abstractmethod
    async def find(self, hashes: bytes) -> int:
        """How many of these blocks are there, as the engine would answer a lookup."""

    def stored(self, hashes: bytes) -> None:
        """A set is in place: whoever looks blocks up learns of it. Not timed."""
        return  # most ask the file system

    def forget(self, hashes: bytes) -> None:
        """Make room: blocks of an earlier set are not needed any more. Not timed."""
        return  # tierkv makes room itself, inside the clock; raw writes over them

    def measured(self) -> AbstractContextManager[Any]:
        """Around everything that is measured."""
        return nullcontext()

    def cpu_s(self) -> float:
        """CPU seconds of everything that works for the engine, monotonic."""
        return time.process_time()

    def modes(self) -> dict[str, str]:
        """Paths in force, in words."""
        return {}


class PortEngine(Engine):
    """tierkv through its storage port, from the arena: checksums, health, deadlines and all."""

    name = "tierkv"
    beside_load = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._waiting: dict[int, asyncio.Future[np.ndarray[Any, Any]]] = {}
        self._next_id = 1
        self.declined = 0
        self._index = Index(1)
        self._port: StoragePort

    @property
    def _segment_bytes(self) -> int:
        set_bytes = self.setup.blocks * self.setup.block_bytes
        if set_bytes >= 128 << 20:
            return 256 << 20  # what users get
        return 64 << 20 if set_bytes >= 16 << 20 else 4 << 20

    @property
    def room_bytes(self) -> int:
        return super().room_bytes + 8 * self._segment_bytes

    @property
    def _config(self) -> StorageConfig:
        s = self.setup
        segment, capacity = self._segment_bytes, self.room_bytes
        return StorageConfig(
            url=f"nvme://{s.directory}?capacity={capacity}&segment={segment}",
            namespace=self.name.encode().ljust(32, b"\0"),
            namespace_text=f"bench {self.name}",
            arena_bytes=len(s.arena),
            block_bytes=(s.block_bytes,),
        )

    async def open(self) -> None:
        self._local = await LocalStorage.open(self._config, self.setup.arena)
        self._listen(self._local)

    def _listen(self, port: StoragePort) -> None:
        self._port = port
        port.on_event(self._pump)

    async def close(self) -> None:
        await self._local.aclose()

    async def move(self, job: Job) -> None:
        for _ in range(_TRIES):
            outcomes = set((await self._submit(job)).tolist())
            if outcomes == {Outcome.DONE}:
                return
            if not outcomes <= {Outcome.DONE, Outcome.DECLINED}:
                break
            self.declined += 1  # no room yet: offered again, on the clock, as `flush` does
        raise RuntimeError(f"{self.name}: {outcomes}")

    def _submit(self, job: Job) -> asyncio.Future[np.ndarray[Any, Any]]:
        move_id, self._next_id = self._next_id, self._next_id + 1
        keys = Keys(np.zeros(job.count, np.uint16), job.hashes)
        slots = np.arange(job.first, job.first + job.count, dtype=np.int64)
        done = asyncio.get_running_loop().create_future()
        self._waiting[move_id] = done
        self._port.submit(
            planned_move(
                move_id,
                MoveKind.SAVE if job.save else MoveKind.LOAD,
                keys,
                offsets=slots * self.setup.block_bytes,
                from_tier=np.full(0 if job.save else job.count, True),
            )
        )
        self._pump()
        return done

    def stored(self, hashes: bytes) -> None:
        self._index.add_all(Keys(np.zeros(len(hashes) // HASH_BYTES, np.uint16), hashes))

    def _pump(self) -> None:
        for event in self._port.poll():
            if isinstance(event, MoveDone):
                self._waiting.pop(event.move_id).set_result(event.outcomes)
            elif isinstance(event, Retire):
                self._port.agree(event.retire_id)
            elif isinstance(event, Appraise):
                self._port.appraised(event.question_id, np.zeros(len(event.keys), np.bool_))

    async def find(self, hashes: bytes) -> int:
        keys = Keys(np.zeros(len(hashes) // HASH_BYTES, np.uint16), hashes)
        return int((self._index.find_all(keys) >= 0).sum())

    @property
    def pid(self) -> int:
        """The process that has the files open."""
        return os.getpid()

    def modes(self) -> dict[str, str]:
        prefix = "tier_mode_"
        stats = self._port.stats()
        told = {k[len(prefix) :]: str(v) for k, v in stats.items() if k.startswith(prefix)}
        direct = direct_files(self.pid, self.setup.directory)
        return told | {"direct": direct, "declined_jobs": str(self.declined)}


class NoSumEngine(PortEngine):
    """The same without reading any payload for its checksum: what the proof costs."""

    name = "tierkv-nosum"
    beside_load = False

    def measured(self) -> AbstractContextManager[Any]:
        return mock.patch.object(
            record, "_xxh3", lambda payloads, _: np.zeros(len(payloads), np.uint64)
        )


class KeeperEngine(PortEngine):
    """tierkv with its storage half in a process of its own."""

    name = "tierkv-keeper"

    async def open(self) -> None:
        self._client = KeeperClient(self._config, self.setup.arena)
        await asyncio.to_thread(self._client.wait_open, 30)
        self._listen(self._client)

    async def close(self) -> None:
        self._client.on_event(None)
        await asyncio.to_thread(self._client.close)

    @property
    def pid(self) -> int:
        return self._client.pid

    def cpu_s(self) -> float:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        keeper_ns = sum(int((t / "schedstat").read_text().split()[0]) for t in tasks)
        return time.process_time() + keeper_ns / 1e9


class ThreadedEngine(Engine):
    """Base of engines whose jobs block: as many threads as jobs."""

    async def open(self) -> None:
        self._pool = ThreadPoolExecutor(self.setup.jobs)
        await self._in_thread(self.open_sync)

    async def close(self) -> None:
        await self._in_thread(self.close_sync)
        self._pool.shutdown()

    async def move(self, job: Job) -> None:
        await self._in_thread(self.move_sync, job)

    async def _in_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def open_sync(self) -> None:
        """`open`, in a thread."""

    def close_sync(self) -> None:
        """`close`, in a thread."""

    @abstractmethod
    def move_sync(self, job: Job) -> None:
        """`move`, in a thread."""


class RawEngine(ThreadedEngine):
    """The device's limit: 16 MiB vectored direct I/O on one preallocated file, and nothing else.

    A vector per block, as `nvme` needs. Blocks lie where their slot says; sets take turns in as
    much of the file as the other engines may fill, so that nothing is read from a small hot area.
    """

    name = "raw"
    call_bytes: ClassVar[int] = 8 << 20

    def open_sync(self) -> None:
        path = self.setup.directory / "raw"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        self._set_bytes = self.setup.blocks * self.setup.block_bytes
        os.posix_fallocate(self._fd, 0, self._set_bytes * self.setup.sets)

    def close_sync(self) -> None:
        os.close(self._fd)

    def move_sync(self, job: Job) -> None:
        size, arena = self.setup.block_bytes, self.setup.arena.view
        start = job.set_number % self.setup.sets * self._set_bytes
        call = os.pwritev if job.save else os.preadv
        step = max(self.call_bytes // size, 1)
        last = job.first + job.count
        for at in range(job.first, last, step):
            blocks = range(at, min(at + step, last))
            vector = [arena[i * size : (i + 1) * size] for i in blocks]
            if call(self._fd, vector, start + at * size) != len(blocks) * size:
                raise RuntimeError("raw: a short transfer")

    async def find(self, hashes: bytes) -> int:
        return 0

    def modes(self) -> dict[str, str]:
        return {"direct": direct_of(self._fd)}


class RawSmallEngine(RawEngine):
    """The same in calls of 2 MiB, as a second yardstick."""

    name = "raw-2m"
    call_bytes = 2 << 20


class FilesEngine(ThreadedEngine):
    """A file per block: open, write, rename; open, read. Through the page cache."""

    name = "files"
    buffered = True

    def move_sync(self, job: Job) -> None:
        size, arena = self.setup.block_bytes, self.setup.arena.view
        for i, name in enumerate(split(job.hashes)):
            payload = arena[(job.first + i) * size : (job.first + i + 1) * size]
            path = self._path(name)
            if job.save:
                path.parent.mkdir(exist_ok=True)
                temporary = path.with_suffix(".tmp")
                with open(temporary, "wb", buffering=0) as file:
                    moved = file.write(payload)
                temporary.replace(path)
            else:
                with open(path, "rb", buffering=0) as file:
                    moved = file.readinto(payload)
            if moved != size:
                raise RuntimeError("files: a short transfer")

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self.setup.directory / text[:2] / text

    async def find(self, hashes: bytes) -> int:
        names = split(hashes)
        return await asyncio.to_thread(lambda: sum(self._path(n).exists() for n in names))

    def forget(self, hashes: bytes) -> None:
        for name in split(hashes):
            self._path(name).unlink(missing_ok=True)

    def modes(self) -> dict[str, str]:
        return {"direct": "no"}


class AiofilesEngine(FilesEngine):
    """The same with aiofiles, the blocks of a job one after the other."""

    name = "aiofiles"

    async def move(self, job: Job) -> None:
        size, arena = self.setup.block_bytes, self.setup.arena.view
        for i, name in enumerate(split(job.hashes)):
            payload = arena[(job.first + i) * size : (job.first + i + 1) * size]
            path = self._path(name)
            if job.save:
                await aiofiles.os.makedirs(path.parent, exist_ok=True)
                temporary = path.with_suffix(".tmp")
                async with aiofiles.open(temporary, "wb", buffering=0) as file:
                    moved = await file.write(payload)
                await aiofiles.os.replace(temporary, path)
            else:
                async with aiofiles.open(path, "rb", buffering=0) as file:
                    moved = await file.readinto(payload)
            if moved != size:
                raise RuntimeError("aiofiles: a short transfer")


def direct_of(fd: int) -> str:
    """Whether O_DIRECT is set on a descriptor, as the kernel tells."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    return "yes" if flags & os.O_DIRECT else "no"


def direct_files(pid: int, directory: Path) -> str:
    """The same for what a process has open below `directory`: yes, no, some, or none open."""
    seen = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target, info = link.readlink(), (link.parent.parent / "fdinfo" / link.name).read_text()
        except OSError:  # closed meanwhile
            continue
        if target.suffix != ".tkv" or directory not in target.parents:
            continue
        flags = next(int(s.split()[1], 8) for s in info.splitlines() if s.startswith("flags:"))
        seen.add(bool(flags & os.O_DIRECT))
    return "some" if len(seen) > 1 else {True: "yes", False: "no"}[seen.pop()] if seen else "none"


ENGINES: Final[dict[str, type[Engine]]] = {
    engine.name: engine
    for engine in (
        PortEngine,
        NoSumEngine,
        KeeperEngine,
        FilesEngine,
        AiofilesEngine,
        RawEngine,
        RawSmallEngine,
    )
}
