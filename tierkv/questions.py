"""Questions of a backend to the side that decides: which of these blocks are worth writing again.

Nothing is withdrawn by a question and nothing hangs on its answer but space, so one that is not
answered in time is answered here, with none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

ANSWER_S: Final = 2.0
"""How long an answer is waited for: an engine answers between two of its steps."""


class Questions:
    """What was asked and not answered yet; used on one event loop.

    A side that lets a question run out is not asked again before it has answered one, so one that
    knows no questions costs `ANSWER_S` once.
    """

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[NDArray[np.bool_]]] = {}
        self.deaf = False

    def __len__(self) -> int:
        return len(self._asked)

    async def ask(self, question_id: int, n: int, send: Callable[[], None]) -> NDArray[np.bool_]:
        """bool[n]: what `take` is given for the question that `send` sends, or all false."""
        none = np.zeros(n, np.bool_)
        asked = self._asked[question_id] = asyncio.get_running_loop().create_future()
        send()
        try:
            async with asyncio.timeout(ANSWER_S):
                worth = await asked
        except TimeoutError:
            self.deaf = True
            return none
        finally:
            del self._asked[question_id]
        return worth if len(worth) == n else none

    def take(self, question_id: int, worth: NDArray[np.bool_]) -> None:
        """An answer came. One that nobody waits for says only that somebody answers."""
        self.deaf = False
        asked = self._asked.get(question_id)
        if asked is not None and not asked.done():
            asked.set_result(worth)

    def end_all(self) -> None:
        """Nobody will answer these: none is worth it."""
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(np.zeros(0, np.bool_))
