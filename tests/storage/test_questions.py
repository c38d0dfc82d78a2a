"""A backend asks what is worth writing again: the answer comes, or none is worth it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tierkv import questions
from tierkv.backend import BackendContext, BlockBatch, Outcomes
from tierkv.blocks import Appraise, MoveKind, Outcome
from tierkv.testing import make_key
from tierkv_backends.memory import MemoryBackend

DONE = Outcome.DONE
SAVE = MoveKind.SAVE


class Curious(MemoryBackend):
    """Asks about every batch before it writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[bool]] = []

    async def open(self, context: BackendContext) -> None:
        assert context.worth is not None
        self._worth = context.worth
        await super().open(context)

    async def write(self, batch: BlockBatch) -> Outcomes:
        self.told.append((await self._worth(batch.keys)).tolist())
        return await super().write(batch)


def mask(*worth: bool) -> NDArray[np.bool_]:
    return np.array(worth, np.bool_)


async def test_the_answer_reaches_the_backend(open_desk: Any) -> None:
    backend = Curious()
    desk = await open_desk(backend)
    move = desk.submit(SAVE, [1, 2, 3])
    question = await desk.event(Appraise)
    assert list(question.keys) == [make_key(n, n % 2) for n in (1, 2, 3)]
    assert desk.mover.stats()["questions_waiting"] == 1
    desk.mover.appraised(question.question_id + 99, mask(True, True, True))
    desk.mover.appraised(question.question_id, mask(True, False, True))
    assert await desk.done(move) == [DONE] * 3
    assert backend.told == [[True, False, True]]
    assert desk.mover.stats()["questions_waiting"] == 0


async def test_an_answer_of_another_length_is_none(open_desk: Any) -> None:
    backend = Curious()
    desk = await open_desk(backend)
    move = desk.submit(SAVE, [1, 2])
    question = await desk.event(Appraise)
    desk.mover.appraised(question.question_id, mask(True))
    assert await desk.done(move) == [DONE] * 2
    assert backend.told == [[False, False]]


async def test_a_rotation_answers_with_none(open_desk: Any) -> None:
    backend = Curious()
    desk = await open_desk(backend)
    move = desk.submit(SAVE, [1])
    await desk.event(Appraise)
    desk.mover.rotate(1)
    assert await desk.done(move) == [Outcome.DECLINED]
    assert not any(any(worth) for worth in backend.told)
    assert desk.mover.stats()["questions_waiting"] == 0


async def test_a_close_answers_with_none_and_nobody_asks_while_it_lasts(open_desk: Any) -> None:
    backend = Curious()
    desk = await open_desk(backend)
    move = desk.submit(SAVE, [1])
    await desk.event(Appraise)
    assert await desk.mover.close()
    assert await desk.done(move) == [DONE]
    assert backend.told == [[False]]


async def test_a_side_that_never_answers_is_waited_for_once_and_asked_again_when_it_speaks(
    open_desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.0)
    backend = Curious()
    desk = await open_desk(backend)
    first = desk.submit(SAVE, [1])
    question = await desk.event(Appraise)
    assert await desk.done(first) == [DONE]
    assert await desk.run(SAVE, [2]) == [DONE]
    assert not [e for e in desk.events if isinstance(e, Appraise)]
    desk.mover.appraised(question.question_id, mask(True))
    monkeypatch.setattr(questions, "ANSWER_S", 60.0)
    third = desk.submit(SAVE, [3])
    question = await desk.event(Appraise)
    desk.mover.appraised(question.question_id, mask(True))
    assert await desk.done(third) == [DONE]
    assert backend.told == [[False], [False], [True]]


async def test_a_cancelled_question_leaves_nothing_behind(open_desk: Any) -> None:
    backend = Curious()
    desk = await open_desk(backend, write_timeout_s=0.05)
    move = desk.submit(SAVE, [1])
    await desk.event(Appraise)
    assert await desk.done(move) == [Outcome.TIMED_OUT]
    while desk.mover.stats()["questions_waiting"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
