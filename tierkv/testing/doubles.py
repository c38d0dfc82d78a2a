"""Backends that misbehave on order, wrapped around one that does not."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import AsyncIterator, Callable

import numpy as np
from numpy.typing import NDArray

from tierkv.backend import (
    Backend,
    BackendContext,
    BlockBatch,
    Outcomes,
    SupportsLengths,
    Usage,
)
from tierkv.blocks import Keys, Outcome
from tierkv.errors import ConfigError
from tierkv.testing.batches import Key, make_batch
from tierkv.urls import TierURL


class _Wrapper(Backend):
    """Passes everything on to `inner`."""

    scheme = "wrapper"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @classmethod
    def from_url(cls, url: TierURL) -> Backend:
        """Refused: these wrap an instance."""
        raise ConfigError(f"{url.text!r}: {cls.__name__} wraps a backend, it has no URL")

    async def open(self, context: BackendContext) -> None:
        """As `inner`."""
        await self.inner.open(context)

    async def close(self) -> None:
        """As `inner`."""
        await self.inner.close()

    async def write(self, batch: BlockBatch) -> Outcomes:
        """As `inner`."""
        return await self.inner.write(batch)

    async def read(self, batch: BlockBatch) -> Outcomes:
        """As `inner`."""
        return await self.inner.read(batch)

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """As `inner`."""
        return await self.inner.contains(keys)

    async def delete(self, keys: Keys) -> None:
        """As `inner`."""
        await self.inner.delete(keys)

    async def clear(self) -> None:
        """As `inner`."""
        await self.inner.clear()

    def scan(self) -> AsyncIterator[Keys]:
        """As `inner`."""
        return self.inner.scan()

    async def usage(self) -> Usage:
        """As `inner`."""
        return await self.inner.usage()

    async def lengths(self, keys: Keys) -> NDArray[np.int64]:
        """As `inner`; nothing where it does not know."""
        if isinstance(self.inner, SupportsLengths):
            return await self.inner.lengths(keys)
        return np.zeros(len(keys), np.int64)


class Op(enum.StrEnum):
    """Calls that can be made to misbehave."""

    OPEN = "open"
    WRITE = "write"
    READ = "read"
    CONTAINS = "contains"
    DELETE = "delete"
    CLEAR = "clear"
    CLOSE = "close"


class Lie(enum.StrEnum):
    """What can be wrong with rows that say DONE."""

    FLIP_BIT = "flip_bit"
    """One bit of the payload is not what it was: on the way in (write) or out (read)."""
    SHORT = "short"
    """The second half of the payload never arrived: zeros (write), or left as it was (read)."""
    DROP = "drop"
    """Nothing was done at all."""


def _every_key(key: Key) -> bool:
    return True


@dataclasses.dataclass(eq=False)
class Fault:
    """One order to misbehave.

    op: which call. how: an exception to raise, an `Outcome` for the matching rows instead of doing
        them, or a `Lie`.
    nth: only the n-th call of this op counted from when the fault was set, 1 being the next;
        None: every call. times: how often at most; None: until `heal`.
    where: which keys; the others of a batch are done as ever. An exception hits the whole call if
        any key matches.
    """

    op: Op
    how: BaseException | Outcome | Lie
    nth: int | None = None
    times: int | None = None
    where: Callable[[Key], bool] = _every_key
    calls: int = 0
    hits: int = 0

    def strikes(self) -> bool:
        """Count a call; whether this one is hit."""
        self.calls += 1
        if self.nth is not None and self.calls != self.nth:
            return False
        return self.times is None or self.hits < self.times


class FaultyBackend(_Wrapper):
    """Does what `inner` does, except where a `Fault` says otherwise.

    ::

        faulty = FaultyBackend(inner)
        faulty.fail("read", OSError(errno.EIO, "disk"), nth=2)      # the second read raises
        faulty.fail("write", Outcome.DECLINED, where=lambda key: key[0] == 1)
        fault = faulty.fail("read", Lie.FLIP_BIT, times=1)          # DONE, and wrong
        faulty.heal()
        assert fault.hits == 1

    Where several faults strike one call, the first that was set wins.
    """

    scheme = "faulty"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.faults: list[Fault] = []
        self.calls = dict.fromkeys(Op, 0)

    def fail(
        self,
        op: Op | str,
        how: BaseException | Outcome | Lie,
        *,
        nth: int | None = None,
        times: int | None = None,
        where: Callable[[Key], bool] = _every_key,
    ) -> Fault:
        """Set a fault (fields as in `Fault`) and return it, so that its `hits` can be asked."""
        op = Op(op)
        if op not in (Op.WRITE, Op.READ) and not isinstance(how, BaseException):
            raise ValueError(f"{op} has no rows: give an exception to raise")
        fault = Fault(op, how, nth, times, where)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget every fault."""
        self.faults.clear()

    def _struck(self, op: Op, keys: Keys | None = None) -> tuple[Fault, NDArray[np.bool_]] | None:
        """The fault that hits this call and its rows; raises where the fault is an exception."""
        self.calls[op] += 1
        struck = None
        for fault in self.faults:
            if fault.op is op and fault.strikes() and struck is None:
                rows = np.array([fault.where(key) for key in keys or ()], np.bool_)
                if keys is None or rows.any():
                    struck = fault, rows
        if struck is None:
            return None
        struck[0].hits += 1
        if isinstance(struck[0].how, BaseException):
            raise struck[0].how
        return struck

    async def open(self, context: BackendContext) -> None:
        """As `inner`, or the exception."""
        self._struck(Op.OPEN)
        await self.inner.open(context)

    async def close(self) -> None:
        """As `inner`, or the exception (and `inner` stays open)."""
        self._struck(Op.CLOSE)
        await self.inner.close()

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """As `inner`, or the exception."""
        self._struck(Op.CONTAINS, keys)
        return await self.inner.contains(keys)

    async def delete(self, keys: Keys) -> None:
        """As `inner`, or the exception."""
        self._struck(Op.DELETE, keys)
        await self.inner.delete(keys)

    async def clear(self) -> None:
        """As `inner`, or the exception."""
        self._struck(Op.CLEAR)
        await self.inner.clear()

    async def write(self, batch: BlockBatch) -> Outcomes:
        """As `inner`; rows that are hit are refused, dropped or damaged on the way."""
        struck = self._struck(Op.WRITE, batch.keys)
        if struck is None:
            return await self.inner.write(batch)
        fault, rows = struck
        out = np.full(len(batch), Outcome.DONE, np.uint8)
        passed = ~rows
        if isinstance(fault.how, Outcome):
            out[rows] = fault.how
        elif fault.how is not Lie.DROP:
            batch = _damaged_copy(batch, rows, fault.how)
            passed = np.ones(len(batch), np.bool_)
        picked = np.flatnonzero(passed)
        out[picked] = await self.inner.write(batch.take(picked))
        return out

    async def read(self, batch: BlockBatch) -> Outcomes:
        """As `inner`; rows that are hit are refused, or say DONE over bytes that are wrong."""
        struck = self._struck(Op.READ, batch.keys)
        if struck is None:
            return await self.inner.read(batch)
        fault, rows = struck
        if isinstance(fault.how, Outcome) or fault.how is Lie.DROP:
            answer = Outcome.DONE if fault.how is Lie.DROP else fault.how
            out = np.full(len(batch), answer, np.uint8)
            picked = np.flatnonzero(~rows)
            part = batch.take(picked)
            out[picked] = await self.inner.read(part)
            batch.records[picked] = part.records
            return out
        before = {int(i): bytes(batch.payload(int(i))) for i in np.flatnonzero(rows)}
        out = await self.inner.read(batch)
        for i, old in before.items():
            if out[i] == Outcome.DONE:
                _damage(batch.payload(i), fault.how, old)
        return out


def _damage(payload: memoryview, how: object, old: bytes) -> None:
    half = len(payload) // 2
    if how is Lie.FLIP_BIT:
        payload[half] ^= 0x10
    else:
        payload[half:] = old[half:]


def _damaged_copy(batch: BlockBatch, rows: NDArray[np.bool_], how: object) -> BlockBatch:
    """The same batch over an arena of its own (the caller's is not ours to change)."""
    copy = make_batch({key: bytes(batch.payload(i)) for i, key in enumerate(batch.keys)})
    copy.records[:] = batch.records
    for i in np.flatnonzero(rows):
        payload = copy.payload(int(i))
        _damage(payload, how, bytes(len(payload)))
    return copy


class SlowBackend(_Wrapper):
    """Holds calls at its door until released: no sleeping, a test decides what happens when.

    ::

        slow = SlowBackend(inner)
        slow.hold("read")
        task = asyncio.create_task(slow.read(batch))
        await slow.held("read")            # the call has arrived and hangs
        slow.release("read")

    stubborn: as a backend whose thread hangs in the kernel does, a held call does not end when it
    is cancelled; it waits for its release, does its work in the caller's buffers, and only then
    lets the cancellation out.
    """

    scheme = "slow"

    def __init__(self, inner: Backend, *, stubborn: bool = False) -> None:
        super().__init__(inner)
        self.stubborn = stubborn
        self._gates: dict[Op, asyncio.Event] = {}
        self._waiting = dict.fromkeys(Op, 0)
        self._arrived = asyncio.Condition()

    def hold(self, op: Op | str) -> None:
        """From now on calls of `op` hang."""
        self._gates.setdefault(Op(op), asyncio.Event())

    def release(self, op: Op | str) -> None:
        """Let held calls of `op` go on, and hold no more of them."""
        gate = self._gates.pop(Op(op), None)
        if gate is not None:
            gate.set()

    async def held(self, op: Op | str, n: int = 1) -> None:
        """Return once n calls of `op` hang."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._waiting[Op(op)] >= n)

    async def _pass(self, op: Op) -> bool:
        """Wait for the gate; whether the call was cancelled meanwhile (stubborn only)."""
        gate = self._gates.get(op)
        if gate is None:
            return False
        self._waiting[op] += 1
        cancelled = False
        try:
            async with self._arrived:
                self._arrived.notify_all()
            while not gate.is_set():
                try:
                    await gate.wait()
                except asyncio.CancelledError:
                    if not self.stubborn:
                        raise
                    cancelled = True
        finally:
            self._waiting[op] -= 1
        return cancelled

    async def open(self, context: BackendContext) -> None:
        """As `inner`, when released."""
        if await self._pass(Op.OPEN):
            raise asyncio.CancelledError
        await self.inner.open(context)

    async def close(self) -> None:
        """As `inner`, when released."""
        cancelled = await self._pass(Op.CLOSE)
        await self.inner.close()
        if cancelled:
            raise asyncio.CancelledError

    async def write(self, batch: BlockBatch) -> Outcomes:
        """As `inner`, when released."""
        cancelled = await self._pass(Op.WRITE)
        outcomes = await self.inner.write(batch)
        if cancelled:
            raise asyncio.CancelledError
        return outcomes

    async def read(self, batch: BlockBatch) -> Outcomes:
        """As `inner`, when released."""
        cancelled = await self._pass(Op.READ)
        outcomes = await self.inner.read(batch)
        if cancelled:
            raise asyncio.CancelledError
        return outcomes

    async def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """As `inner`, when released."""
        if await self._pass(Op.CONTAINS):
            raise asyncio.CancelledError
        return await self.inner.contains(keys)

    async def delete(self, keys: Keys) -> None:
        """As `inner`, when released."""
        if await self._pass(Op.DELETE):
            raise asyncio.CancelledError
        await self.inner.delete(keys)

    async def clear(self) -> None:
        """As `inner`, when released."""
        if await self._pass(Op.CLEAR):
            raise asyncio.CancelledError
        await self.inner.clear()
