"""The I/O scheduler: bounded, loads first, fair within a class, and nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.iosched import Admission, Grant, IOScheduler, Lane

LOAD, SAVE = Lane.LOAD, Lane.SAVE


def make(read: int = 100, write: int = 100, queue: int = 1000) -> IOScheduler:
    return IOScheduler(
        read_bytes_in_flight=read, write_bytes_in_flight=write, write_queue_bytes=queue
    )


class Client:
    """One request: a task that enters a grant and stays inside until told to leave."""

    def __init__(self, sched: IOScheduler, lane: Lane, nbytes: int) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self.grant: Grant = sched.grant(lane, nbytes)
        self.admission: Admission | None = None
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.grant as self.admission:
            if self.admission is Admission.GRANTED:
                await self.leave.wait()

    @property
    def inside(self) -> bool:
        return self.admission is Admission.GRANTED and not self.task.done()


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.mark.every_loop
async def test_no_save_starts_while_a_load_waits() -> None:
    sched = make()
    first = Client(sched, LOAD, 100)
    await turns()
    waiting_load = Client(sched, LOAD, 50)
    await turns()
    save = Client(sched, SAVE, 10)
    await turns()
    assert first.inside
    assert not waiting_load.inside
    assert not save.inside
    first.leave.set()
    await turns()
    assert waiting_load.inside
    assert save.inside
    for client in (waiting_load, save):
        client.leave.set()
    await turns()
    assert not any(sched.stats().values())


async def test_a_save_that_ends_does_not_let_another_pass_a_waiting_load() -> None:
    sched = make(read=10, write=10)
    load, save = Client(sched, LOAD, 10), Client(sched, SAVE, 10)
    await turns()
    waiting_load, waiting_save = Client(sched, LOAD, 10), Client(sched, SAVE, 10)
    await turns()
    save.leave.set()
    await turns()
    assert not waiting_save.inside
    load.leave.set()
    await turns()
    assert waiting_load.inside
    assert waiting_save.inside
    waiting_load.leave.set()
    waiting_save.leave.set()
    await turns()


async def test_requests_of_one_class_start_in_the_order_they_came() -> None:
    sched = make(write=100)
    clients = [Client(sched, SAVE, n) for n in (60, 60, 10, 30)]
    await turns()
    # The third would fit, but must not overtake the second.
    assert [c.inside for c in clients] == [True, False, False, False]
    clients[0].leave.set()
    await turns()
    assert [c.inside for c in clients] == [False, True, True, True]
    for client in clients:
        client.leave.set()
    await turns()


async def test_a_request_above_the_bound_runs_alone() -> None:
    sched = make(read=100)
    small = Client(sched, LOAD, 10)
    huge = Client(sched, LOAD, 1000)
    await turns()
    assert not huge.inside
    small.leave.set()
    await turns()
    assert huge.inside
    after = Client(sched, LOAD, 1)
    await turns()
    assert not after.inside
    huge.leave.set()
    await turns()
    assert after.inside
    after.leave.set()
    await turns()


async def test_saves_beyond_the_queue_are_throttled_at_once_and_loads_never() -> None:
    sched = make(read=10, write=10, queue=25)
    clients = [Client(sched, SAVE, 10) for _ in range(5)]
    loads = [Client(sched, LOAD, 10) for _ in range(50)]
    await turns()
    answers = [c.admission for c in clients]
    assert answers == [Admission.GRANTED, None, None, Admission.THROTTLED, Admission.THROTTLED]
    assert all(c.admission is not Admission.THROTTLED for c in loads)
    for client in clients + loads:
        client.task.cancel()
    await turns()
    assert not any(sched.stats().values())


async def test_a_waiter_cancelled_as_it_is_granted_gives_its_turn_to_the_next() -> None:
    sched = make(read=10)
    first, second, third = (Client(sched, LOAD, 10) for _ in range(3))
    await turns()
    first.grant.release()  # grants the second, whose task has not run yet
    second.task.cancel()
    await turns()
    assert second.task.cancelled()
    assert not second.inside
    assert third.inside
    first.leave.set()
    third.leave.set()
    await turns()
    assert not any(sched.stats().values())


async def test_a_cancelled_load_lets_waiting_saves_go() -> None:
    sched = make(read=10)
    running, waiting = Client(sched, LOAD, 10), Client(sched, LOAD, 10)
    await turns()
    save = Client(sched, SAVE, 10)
    await turns()
    assert not save.inside
    waiting.task.cancel()
    await turns()
    assert save.inside
    running.leave.set()
    save.leave.set()
    await turns()


async def test_releasing_twice_gives_back_once() -> None:
    sched = make(read=10)
    client = Client(sched, LOAD, 10)
    await turns()
    client.grant.release()
    client.grant.release()
    assert sched.stats()["load_bytes_in_flight"] == 0
    client.leave.set()
    await turns()
    assert sched.stats()["load_bytes_in_flight"] == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.integers(1, 15)),
        st.tuples(st.just("save"), st.integers(1, 15)),
        st.tuples(st.sampled_from(["cancel", "leave", "release"]), st.integers(0, 30)),
        st.tuples(st.just("turn"), st.integers(1, 3)),
    ),
    max_size=60,
)


@given(STEPS)
@settings(deadline=None, max_examples=150)
def test_whatever_the_order_bounds_hold_and_nothing_leaks(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_history(steps))


async def _history(steps: list[tuple[str, int]]) -> None:
    sched = make(read=10, write=10, queue=20)
    clients: list[Client] = []
    acts: dict[str, Callable[[Client], object]] = {
        "cancel": lambda c: c.task.cancel(),
        "leave": lambda c: c.leave.set(),
        "release": lambda c: c.grant.release(),
    }
    for word, number in steps:
        if word == "turn":
            await turns(number)
        elif word in acts:
            if clients:
                acts[word](clients[number % len(clients)])
        else:
            clients.append(Client(sched, Lane(word), number))
        for lane in Lane:
            held = [c.nbytes for c in clients if c.lane is lane and c.grant.held]
            stats = sched.stats()
            assert sum(held) <= stats[f"{lane.value}_bytes_in_flight"]
            assert len(held) <= 1 or sum(held) <= 10
        assert sched.stats()["save_bytes_waiting"] <= 20
    await turns(10)
    for client in clients:
        client.leave.set()
        client.task.cancel()
    await asyncio.gather(*(c.task for c in clients), return_exceptions=True)
    await turns()
    assert not any(sched.stats().values())
