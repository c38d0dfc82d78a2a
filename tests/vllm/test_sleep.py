"""Sleep and wake: the connector's part of it, which is the engine's own order to forget.

A CPU has no memory to unmap, and its worker ignores the rest with a warning; what the scheduler
does around it is the same on every platform.
"""

from __future__ import annotations

from pathlib import Path

from engines import ROUND, References, engine
from stub import request
from test_engine import same
from test_life import at_rest, cached
from test_restart import nvme
from test_sides import ids
from test_streams import Later

from tierkv.streams import Queue

TINY = "tinyllama"


def test_an_engine_that_slept_forgets_every_tier_and_answers_as_before(
    store: Path, references: References
) -> None:
    with engine(TINY, extra=nvme(store)) as ours:
        first = ours.ask(ROUND)
        ours.settle()
        ours.core.sleep(level=1)
        assert ours.core.is_scheduler_paused()
        ours.settle()  # asleep, it goes on stepping until the keeper has the order to forget
        assert ours.core.wake_up()
        assert ours.counters["rotations"] == 1
        again = ours.ask(ROUND)
        assert [a.cached_tokens for a in again] == [0] * len(ROUND)
        ours.settle()
        assert ours.llm.reset_prefix_cache()
        assert cached(ours, ROUND[0]) == 480  # what was computed since then is kept
        at_rest(ours)
    assert same(first, references[TINY][0])
    assert same(again, references[TINY][0])


def test_an_engine_that_was_only_paused_forgets_nothing(store: Path) -> None:
    with engine(TINY, extra=nvme(store)) as ours:
        ours.ask(ROUND[:1])
        ours.settle()
        ours.core.sleep(level=0)
        assert ours.core.wake_up(["scheduling"])
        assert ours.llm.reset_prefix_cache()
        assert cached(ours, ROUND[0]) == 480
        at_rest(ours)


def test_steps_of_a_sleeping_engine_touch_no_page_and_launch_nothing_on_the_device() -> None:
    """Its pages are unmapped, and it steps on: for the order to forget, and for what ends late."""
    stub = Later()
    stub.compute(request("a1", 100), (ids(1, 7),))
    stub.device.finish()
    while stub.scheduler.pending():
        stub.step()
    stub.scheduler.rotate()
    assert stub.scheduler.pending()
    metadata, _ = stub.step()
    assert [command[0] for command in metadata.commands] == ["rotate"]
    assert stub.storage.epochs == [1]
    assert not stub.scheduler.pending()
    assert not any(stub.device.step(queue) for queue in Queue)
