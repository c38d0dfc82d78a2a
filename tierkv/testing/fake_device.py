"""A device whose queues run when a test says so, in whatever order it says.

Nothing that is queued happens by itself. `step` runs the next piece of one queue, unless the
queue holds for a mark that is not done; `finish` runs everything, always preferring the queue that
comes first in a given order. So a rule of ordering that is missing shows up as wrong bytes under
some order, every time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from tierkv.streams import CpuDevice, Mark, Queue

_PATIENCE_S: Final = 30.0
"""A thread that waits longer for a mark waits for a queue that its test has forgotten."""


class FakeMark:
    """A place in a queue: done once the queue has run that far."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._passed = threading.Event()

    def pass_it(self) -> None:
        """The queue has run that far."""
        self._passed.set()

    def done(self) -> bool:
        """Whether its queue has run that far."""
        return self._passed.is_set()

    def wait(self) -> None:
        """Block until a test, in another thread, has run the queue; `RuntimeError` after 30 s."""
        if not self._passed.wait(_PATIENCE_S):
            raise RuntimeError(f"a thread waits for {self.queue}, which only a test runs")


Piece = Callable[[], None] | FakeMark
"""Work, or a mark to pass."""


class FakeDevice(CpuDevice):
    """Host memory with an accelerator's queues; staging is two buffers of `staging_bytes`."""

    def __init__(self, staging_bytes: int) -> None:
        super().__init__(staging_bytes)
        self._queues: dict[Queue, deque[Piece | tuple[FakeMark]]] = {q: deque() for q in Queue}
        self.direct = False

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Queue it."""
        self._queues[queue].append(work)

    def record(self, queue: Queue) -> Mark:
        """Done once the queue has run everything that it holds by now: at once if that is none."""
        mark = FakeMark(queue)
        if self._queues[queue]:
            self._queues[queue].append(mark)
        else:
            mark.pass_it()
        return mark

    def hold(self, queue: Queue, mark: Mark) -> None:
        """The queue stops here until `mark` is done."""
        assert isinstance(mark, FakeMark)
        self._queues[queue].append((mark,))

    def step(self, queue: Queue) -> bool:
        """Run the next work of a queue, and pass the marks behind it.

        False where nothing could be done: the queue is empty, or holds.
        """
        pieces, worked, went_on = self._queues[queue], False, False
        while pieces:
            match pieces[0]:
                case FakeMark() as mark:
                    mark.pass_it()
                case (FakeMark() as mark,):
                    if worked or not mark.done():
                        break
                case work:
                    if worked:
                        break
                    work()
                    worked = True
            pieces.popleft()
            went_on = True
        return went_on

    def holds_work(self, queue: Queue) -> bool:
        """Whether a mark ends this queue: something was launched on it as a whole."""
        pieces = self._queues[queue]
        return bool(pieces) and isinstance(pieces[-1], FakeMark)

    def idle(self) -> bool:
        """Whether nothing is queued."""
        return not any(self._queues.values())

    def finish(
        self, order: Sequence[Queue] = tuple(Queue), after_each: Callable[[], None] = lambda: None
    ) -> None:
        """Run everything; at each turn the first queue in `order` that can run.

        after_each: called after every piece of work. `RuntimeError` where all queues hold.
        """
        while any(self.step(queue) for queue in order):
            after_each()
        if not self.idle():
            stuck = [q.value for q in Queue if self._queues[q]]
            raise RuntimeError(f"the queues {stuck} hold for each other")
