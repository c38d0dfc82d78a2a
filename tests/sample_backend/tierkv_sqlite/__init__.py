"""``sqlite:///some/dir``: blocks in one SQLite file per namespace and rank.

An example of a backend that lives outside tierkv. Everything SQLite does happens in one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import Backend, BackendContext, BlockBatch, Outcomes, Usage, finish
from tierkv.blocks import Keys, Outcome
from tierkv.errors import ConfigError, StoreBusyError, StoreError, StoreUnusableError
from tierkv.record import RECORD_DTYPE
from tierkv.urls import TierURL

_T = TypeVar("_T")
_WHERE = "WHERE grp = ? AND hash = ?"


class SqliteBackend(Backend):
    """A table of (group, hash, record, payload), and the keys of it in memory."""

    scheme = "sqlite"

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._thread: ThreadPoolExecutor | None = None
        self._db: sqlite3.Connection | None = None
        self._nbytes: dict[tuple[int, bytes], int] = {}

    @classmethod
    def from_url(cls, url: TierURL) -> SqliteBackend:
        """No options."""
        url.take([])
        if not url.path:
            raise ConfigError(f"tier URL {url.text!r}: write it like sqlite:///some/dir")
        return cls(pathlib.Path(url.path))

    async def _do(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `work` in the thread; when cancelled, wait for it all the same."""
        db, thread = self._db, self._thread
        if db is None or thread is None:
            raise StoreError(f"sqlite tier {self._directory} is not open")
        return await finish(asyncio.get_running_loop().run_in_executor(thread, work, db))

    async def open(self, context: BackendContext) -> None:
        """One database per owner; SQLite's own lock keeps it to one."""
        name = f"{context.namespace.hex()}-{context.rank}-{context.data_parallel_rank}.db"
        self._thread = ThreadPoolExecutor(1, "tierkv-sqlite")

        def connect() -> None:  # keeps it where `close` finds it, should `open` be cancelled
            self._db = _open_sync(self._directory / name)

        try:
            await finish(asyncio.get_running_loop().run_in_executor(self._thread, connect))
        except sqlite3.OperationalError as exc:
            error = StoreBusyError if "locked" in str(exc) else StoreUnusableError
            raise error(f"sqlite tier {self._directory / name}: {exc}") from exc
        self._nbytes = await self._do(_list_sync)

    async def close(self) -> None:
        """Close the database in its thread, then end the thread."""
        if self._db is not None:
            await self._do(sqlite3.Connection.close)
            self._db = None
        if self._thread is not None:
            await finish(asyncio.to_thread(self._thread.shutdown))
            self._thread = None
        self._nbytes = {}

    async def write(self, batch: BlockBatch) -> Outcomes:
        """All of a batch in one transaction."""

        def insert(db: sqlite3.Connection) -> list[tuple[tuple[int, bytes], int]]:
            rows = [
                (g, h, batch.records[i].tobytes(), bytes(batch.payload(i)))
                for i, (g, h) in enumerate(batch.keys)
                if (g, h) not in self._nbytes
            ]
            with db:
                db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", rows)
            new = [((g, h), len(payload)) for g, h, _, payload in rows]
            self._nbytes.update(new)  # in the one thread, so that no other write comes between
            return new

        await self._do(insert)
        return np.full(len(batch), Outcome.DONE, np.uint8)

    async def read(self, batch: BlockBatch) -> Outcomes:
        """MISSING where the row or its length is not what is asked."""

        def select(db: sqlite3.Connection) -> Outcomes:
            out = np.full(len(batch), Outcome.MISSING, np.uint8)
            for i, key in enumerate(batch.keys):
                row = db.execute(f"SELECT record, payload FROM blocks {_WHERE}", key).fetchone()
                if row is not None and len(row[1]) == batch.nbytes[i]:
                    batch.records[i] = np.frombuffer(row[0], RECORD_DTYPE)[0]
                    batch.payload(i)[:] = row[1]
                    out[i] = Outcome.DONE
            return out

        return await self._do(select)

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """From memory."""
        return np.fromiter((key in self._nbytes for key in keys), np.bool_, len(keys))

    async def lengths(self, keys: Keys) -> NDArray[np.int64]:
        """From memory; with it, tierkv can store blocks compressed."""
        return np.fromiter((self._nbytes.get(key, 0) for key in keys), np.int64, len(keys))

    async def delete(self, keys: Keys) -> None:
        """One transaction."""

        def remove(db: sqlite3.Connection) -> None:
            with db:
                db.executemany(f"DELETE FROM blocks {_WHERE}", keys)
            for key in keys:
                self._nbytes.pop(key, None)

        await self._do(remove)

    async def clear(self) -> None:
        """One transaction."""

        def remove(db: sqlite3.Connection) -> None:
            with db:
                db.execute("DELETE FROM blocks")
            self._nbytes.clear()

        await self._do(remove)

    async def scan(self) -> AsyncIterator[Keys]:
        """One batch."""
        yield Keys.of(list(self._nbytes))

    async def usage(self) -> Usage:
        """No quota."""
        payload_bytes = sum(self._nbytes.values())
        return Usage(
            blocks=len(self._nbytes),
            payload_bytes=payload_bytes,
            physical_bytes=payload_bytes,
            capacity_bytes=0,
            modes={"io": "sqlite"},
        )


def _open_sync(path: pathlib.Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=0)
    with contextlib.ExitStack() as undo:
        undo.callback(db.close)
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # a kill loses nothing; the record proves the rest
        with db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS blocks (grp INTEGER, hash BLOB, record BLOB, "
                "payload BLOB, PRIMARY KEY (grp, hash))"
            )
            db.execute("BEGIN EXCLUSIVE")
        undo.pop_all()
    return db


def _list_sync(db: sqlite3.Connection) -> dict[tuple[int, bytes], int]:
    rows = db.execute("SELECT grp, hash, length(payload) FROM blocks")
    return {(group, block_hash): nbytes for group, block_hash, nbytes in rows}
