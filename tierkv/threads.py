"""Work in threads whose buffers belong to somebody: it is waited for, whoever is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def finish(work: Awaitable[_T]) -> _T:
    """Await `work` to its end even when cancelled, and only then let the cancellation out.

    For what works in a caller's buffers from a thread: `await finish(asyncio.to_thread(copy))`.
    A plain await would return at once and leave the thread writing. However often it is
    cancelled, it waits; an exception of `work` is raised in place of the cancellation.
    """
    result, cancelled = await finished(work)
    if cancelled:
        raise asyncio.CancelledError
    return result


async def finished(work: Awaitable[_T]) -> tuple[_T, bool]:
    """`finish` for who has something to note first: the result, and whether to raise then."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    cancelled = False
    while not task.done():
        waiter = loop.create_future()
        task.add_done_callback(partial(_wake, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


def _wake(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def in_thread(
    pool: Executor, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> asyncio.Future[_T]:
    """`run_in_executor` with fewer futures in between.

    Like there, cancelling the future does not stop the thread: await it through `finish`. If the
    pool is shut down before the function began, the future is cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def work() -> None:
        try:
            end: Callable[[], None] = partial(_set_result, future, function(*args, **kwargs))
        except BaseException as exc:  # noqa: BLE001 - it goes to whoever awaits the future
            end = partial(_set_exception, future, exc)
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(end)

    def ended(submitted: Future[None]) -> None:
        if submitted.cancelled():
            future.cancel()

    pool.submit(work).add_done_callback(ended)
    return future


def _set_result(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[_T], exc: BaseException) -> None:
    if not future.done():
        future.set_exception(exc)
