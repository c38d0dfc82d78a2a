"""How a loop learns that copies ended: in order, with their errors, and without polling."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tierkv.completions import Completions

pytestmark = pytest.mark.every_loop


class Gate:
    """A mark that a test opens."""

    def __init__(self, error: Exception | None = None) -> None:
        self.open, self.waited = threading.Event(), threading.Event()
        self.error = error

    def done(self) -> bool:
        return self.open.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def _never_blocked(blockbuster: None) -> None:
    """None of this blocks the loop."""


async def test_what_is_done_already_needs_no_thread() -> None:
    gate, before = Gate(), threading.active_count()
    gate.open.set()
    completions = Completions("test")
    await completions.wait(gate)
    assert threading.active_count() == before
    completions.close()


async def test_marks_that_end_are_told_and_those_behind_them_are_not() -> None:
    completions, gates = Completions("test"), [Gate() for _ in range(3)]
    tasks = [asyncio.ensure_future(completions.wait(g)) for g in gates]
    gates[0].open.set()
    await tasks[0]
    gates[1].open.set()
    await tasks[1]
    assert not tasks[2].done()
    gates[2].open.set()
    await tasks[2]
    completions.close()


async def test_a_hundred_copies_have_one_thread_and_few_wakes() -> None:
    completions, first = Completions("test"), Gate()
    before = threading.active_count()
    later = [Gate() for _ in range(100)]
    tasks = [asyncio.ensure_future(completions.wait(g)) for g in (first, *later)]
    await asyncio.sleep(0)
    assert threading.active_count() == before + 1
    for gate in (*later, first):  # the first holds all others back: they are told together
        gate.open.set()
    await asyncio.gather(*tasks)
    completions.close()


async def test_an_error_of_the_device_reaches_its_waiter_and_nobody_else() -> None:
    completions, bad, good = Completions("test"), Gate(RuntimeError("lost")), Gate()
    tasks = [asyncio.ensure_future(completions.wait(g)) for g in (bad, good)]
    await asyncio.sleep(0)
    bad.open.set()
    good.open.set()
    with pytest.raises(RuntimeError, match="lost"):
        await tasks[0]
    await tasks[1]
    completions.close()


async def test_a_waiter_that_goes_away_does_not_disturb_the_next() -> None:
    completions, gone, kept = Completions("test"), Gate(), Gate()
    task = asyncio.ensure_future(completions.wait(gone))
    other = asyncio.ensure_future(completions.wait(kept))
    await asyncio.sleep(0)
    task.cancel()
    gone.open.set()
    kept.open.set()
    await other
    with pytest.raises(asyncio.CancelledError):
        await task
    completions.close()


def test_a_loop_that_was_closed_ends_the_thread() -> None:
    completions, gate = Completions("test"), Gate()

    async def leave() -> None:
        task = asyncio.ensure_future(completions.wait(gate))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    [thread] = [t for t in threading.enumerate() if t.name == "test"]
    gate.open.set()
    thread.join(30)
    assert not thread.is_alive()
