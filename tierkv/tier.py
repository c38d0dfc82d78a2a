"""One backend with proof around it: seals what goes in, verifies what comes out.

Here, and nowhere else, an exception that nobody foresaw becomes an answer: it is counted, logged
with tier and cause, and the blocks concerned are FAILED.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierkv import record
from tierkv.backend import (
    Backend,
    BackendContext,
    BlockBatch,
    Outcomes,
    SupportsInlineProof,
    SupportsLengths,
    finish,
    in_thread,
)
from tierkv.blocks import Keys, Outcome
from tierkv.codec import Coder, parse_codec
from tierkv.errors import ConfigError, StoreUnusableError
from tierkv.storage import StorageConfig

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_D = TypeVar("_D")


class Tier:
    """A backend as the mover uses it. Everything but `open` ends with an answer, never an error.

    When a call ends, cancelled or not, nothing touches the arena on its behalf any more (as far
    as the backend keeps its contract).
    """

    def __init__(self, backend: Backend, config: StorageConfig) -> None:
        self.name = backend.scheme
        self.count: Counter[str] = Counter()
        self.usage: dict[str, Any] = {}
        self._backend = backend
        self._inline = backend if isinstance(backend, SupportsInlineProof) else None
        self._config = config
        self._mark = record.namespace_mark(config.namespace)
        self._pool = ThreadPoolExecutor(config.io_threads, thread_name_prefix="tierkv-sum")
        self._codec = parse_codec(config.codec, config.url, "codec")
        self._coder = Coder(backend, self._mark, self._start, config.io_threads, self.count)

    async def open(
        self,
        retire: Callable[[Keys], Awaitable[None]],
        worth: Callable[[Keys], Awaitable[NDArray[np.bool_]]] | None = None,
        *,
        clear: bool,
    ) -> Keys:
        """Open the backend, `clear` it if asked, and list what it holds.

        Raises `ConfigError` or `StoreError` in one line; then everything is closed again.
        """
        config = self._config
        context = BackendContext(
            namespace=config.namespace,
            namespace_text=config.namespace_text,
            rank=config.rank,
            data_parallel_rank=config.data_parallel_rank,
            block_bytes=config.block_bytes,
            retire=retire,
            worth=worth,
        )
        try:
            self._check_codec()
            await self._backend.open(context)
            if clear:
                await self._backend.clear()
            return Keys.concat([part async for part in self._backend.scan()])
        except OSError as exc:
            await self.close()
            raise StoreUnusableError(f"tier {config.url!r}: {exc}") from exc
        except BaseException:
            await self.close()
            raise

    def _check_codec(self) -> None:
        if self._codec != "none" and not isinstance(self._backend, SupportsLengths):
            raise ConfigError(
                f"tier {self._config.url!r}: codec {self._codec!r} needs a backend that knows the "
                f"lengths of its blocks, and {self.name} does not; write codec none"
            )

    async def close(self) -> bool:
        """Close the backend; whether that went well."""
        try:
            ended = await self.supervised(self._backend.close(), "close", Outcome.FAILED)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
        return ended is not Outcome.FAILED

    async def save(self, batch: BlockBatch) -> Outcomes:
        """Seal and store a batch; fills `batch.records`."""
        return await self._per_block(self._save(batch), len(batch), "save")

    async def load(self, batch: BlockBatch) -> Outcomes:
        """Read and verify a batch. CORRUPT blocks are forgotten by the backend, and logged."""
        return await self._per_block(self._load(batch), len(batch), "load")

    async def delete(self, keys: Keys) -> bool:
        """Forget `keys`; whether the backend did."""
        return await self.supervised(self._backend.delete(keys), "delete", Outcome.FAILED) is None

    async def clear(self) -> bool:
        """Forget everything for good; whether the backend did."""
        return await self.supervised(self._backend.clear(), "clear", Outcome.FAILED) is None

    async def refresh_usage(self) -> None:
        """Ask the backend what it holds; the answer is `usage`, flat and JSON-able."""
        usage = await self.supervised(self._backend.usage(), "usage", None)
        if usage is not None:
            self.usage = {
                "tier_blocks": int(usage.blocks),
                "tier_payload_bytes": int(usage.payload_bytes),
                "tier_physical_bytes": int(usage.physical_bytes),
                "tier_capacity_bytes": int(usage.capacity_bytes),
                "tier_mode_codec": self._codec,
                **{f"tier_mode_{k}": v for k, v in usage.modes.items()},
                **{f"tier_{k}": int(v) for k, v in usage.counters.items()},
                **{f"tier_{k}": float(v) for k, v in usage.ratios.items()},
            }

    async def supervised(self, call: Awaitable[_T], doing: str, otherwise: _D) -> _T | _D:
        """Await `call`; where it raises what nobody foresaw, count, log, and give `otherwise`."""
        try:
            return await call
        except Exception as exc:  # noqa: BLE001 - the one supervisor; counted and logged
            self.count["unforeseen_errors"] += 1
            _log.exception("tier %s: %s failed: %s", self.name, doing, exc)
            return otherwise

    async def _per_block(self, call: Awaitable[Outcomes], n: int, doing: str) -> Outcomes:
        outcomes = await self.supervised(call, f"{doing} of {n} blocks", None)
        if outcomes is not None and len(outcomes) == n:
            return outcomes
        if outcomes is not None:
            self.count["unforeseen_errors"] += 1
            _log.error("tier %s: %d outcomes for %d blocks", self.name, len(outcomes), n)
        return np.full(n, Outcome.FAILED, np.uint8)

    async def _save(self, batch: BlockBatch) -> Outcomes:
        if self._codec != "none":
            return await self._coder.save(batch)
        if self._inline is not None:
            return await self._inline.write_sealing(batch, self._seal_sync)
        await self._in_thread(self._seal_sync, batch)
        return await self._backend.write(batch)

    def _seal_sync(self, batch: BlockBatch) -> None:
        made = record.made_in(batch.records)
        batch.records[:] = record.seal_sync(batch.keys, batch.payloads(), self._mark, made=made)

    async def _read(self, batch: BlockBatch) -> Outcomes:
        """Outcomes of a read in which every DONE is proven."""
        if self._inline is not None:
            proof = _Proof(self._mark)
            outcomes = np.array(await self._inline.read_proving(batch, proof.check_sync), np.uint8)
            if proof.good == np.count_nonzero(outcomes == Outcome.DONE):
                return outcomes
            self.count["unforeseen_errors"] += 1
            _log.error("tier %s: blocks were read and not proven; checked now", self.name)
        else:
            outcomes = np.array(await self._backend.read(batch), np.uint8)
        read = np.flatnonzero(outcomes == Outcome.DONE)
        if len(read):
            good = await self._in_thread(_Proof(self._mark).check_sync, batch.take(read))
            outcomes[read[~good]] = Outcome.CORRUPT
        return outcomes

    async def _load(self, batch: BlockBatch) -> Outcomes:
        outcomes = await self._read(batch)
        missing = np.flatnonzero(outcomes == Outcome.MISSING)
        if len(missing):
            outcomes[missing] = await self._load_encoded(batch.take(missing))
        bad = np.flatnonzero(outcomes == Outcome.CORRUPT)
        if len(bad):
            await self._forget_corrupt(batch.keys.take(bad))
        return outcomes

    async def _load_encoded(self, batch: BlockBatch) -> Outcomes:
        """What was not there at its full length may be there encoded, whatever the codec is now."""
        return await self._per_block(
            self._coder.load(batch), len(batch), f"load of {len(batch)} blocks that may be encoded"
        )

    async def _forget_corrupt(self, keys: Keys) -> None:
        group, block_hash = next(iter(keys))
        more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
        _log.warning(
            "tier %s: block %d:%s%s failed verification; forgotten",
            self.name,
            group,
            block_hash.hex(),
            more,
        )
        await self.delete(keys)

    async def _in_thread(self, func: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `func` in the pool. If cancelled, waits until `func` has let go of its buffers."""
        return await finish(in_thread(self._pool, func, *args, **kwargs))

    def _start(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return in_thread(self._pool, work)


class _Proof:
    """Verifies blocks in whatever threads ask. good: how many were right so far."""

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._lock = threading.Lock()
        self.good = 0

    def check_sync(self, batch: BlockBatch) -> NDArray[np.bool_]:
        """See `tierkv.backend.Prove`."""
        good = record.verify_sync(batch.keys, batch.records, batch.payloads(), self._mark)
        with self._lock:
            self.good += int(good.sum())
        return good
