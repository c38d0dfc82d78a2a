"""Kill a process that uses a backend at numbered system calls, and see what the next open serves.

The child (``python -m tierkv.testing.kills``) is small: it imports neither torch nor pytest. A
profile function counts the calls into C that can change a store, in every thread, and sends
SIGKILL right before the n-th. What the child was told is done it writes to a journal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from tierkv import registry
from tierkv.backend import Backend
from tierkv.blocks import Keys, Outcome
from tierkv.testing.batches import Key, load, make_blocks, make_context, save, sizes

BLOCK_BYTES: Final = (4096, 513, 70_000)
STEPS: Final = 8
CLEAR_AT: Final = 4
"""Before this step everything is cleared."""

_CHANGES_A_STORE: Final = {"posix", "_io", "io", "fcntl", "mmap", "sqlite3"}


def step_blocks(step: int) -> dict[Key, bytes]:
    """What the child writes in one step."""
    return make_blocks(4, BLOCK_BYTES, first=step * 4)


def doomed(step: int) -> list[Key]:
    """Which of those it deletes a step later (a kill right after may bring them back)."""
    return list(step_blocks(step))[:1] if step % 2 else []


@dataclasses.dataclass(frozen=True, slots=True)
class KillReport:
    """How many children were killed, at which of how many calls, and what was there after."""

    kills: int
    calls: int
    acknowledged_blocks: int
    served_blocks: int


async def kill_campaign(
    url: Callable[[pathlib.Path], str], directory: pathlib.Path, *, points: int = 6
) -> KillReport:
    """Kill `points` children, spread over the steps of their life; check a new open after each.

    url: tier URL for a directory of its own per child. Asserts that every block acknowledged is
    served, that no other bytes are, and that a cleared block never comes back.
    """
    whole = directory / "whole"
    code, said = await _child(url, whole, 0)
    assert code == 0, f"the child failed unkilled: {said}"
    edges = [0, *map(int, said.split())]
    steps = list(itertools.pairwise(edges))
    kills = acknowledged = served = 0
    for i in range(points):
        place = directory / f"kill{i}"
        first, last = steps[i * len(steps) // points]
        code, said = await _child(url, place, 1 + first + (last - first) * i // points)
        assert code in (0, -signal.SIGKILL), f"the child failed: {said}"
        kills += code != 0
        journal = (place / "journal").read_text().split()
        asked, there = await _check(url(place / "store"), journal)
        acknowledged += asked
        served += there
    return KillReport(kills, edges[-1], acknowledged, served)


async def _child(
    url: Callable[[pathlib.Path], str], place: pathlib.Path, kill_at: int
) -> tuple[int, str]:
    (place / "store").mkdir(parents=True)
    command = [sys.executable, "-m", __name__, url(place / "store"), str(place / "journal")]
    process = await asyncio.create_subprocess_exec(
        *command,
        str(kill_at),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def _check(url: str, journal: list[str]) -> tuple[int, int]:
    must: dict[Key, bytes] = {}
    cleared: set[Key] = set()
    for line in journal:
        what, _, step = line.partition(":")
        if what == "written":
            must |= step_blocks(int(step))
            for key in doomed(int(step)):
                del must[key]
        elif what == "clearing":
            must.clear()
        elif what == "cleared":
            cleared = {key for before in range(CLEAR_AT) for key in step_blocks(before)}
    everything = {k: v for step in range(STEPS) for k, v in step_blocks(step).items()}
    backend = registry.make_backend(url)
    await backend.open(make_context(BLOCK_BYTES))
    try:
        found = await load(backend, sizes(everything))
        listed = {key async for keys in backend.scan() for key in keys}
    finally:
        await backend.close()
    there = {key for key, data in found.items() if data is not Outcome.MISSING}
    assert all(found[key] == everything[key] for key in there), "torn or foreign bytes"
    assert must.keys() <= there, f"{len(must.keys() - there)} acknowledged blocks are gone"
    assert not there & cleared, "a cleared block came back"
    assert listed == there, "scan lists what cannot be read, or the other way round"
    return len(must), len(there)


# The child. ------------------------------------------------------------------------------------


def _kill_at_call(number: int) -> Callable[[], int]:
    """Count calls into C that may change a store; SIGKILL before call `number`. Returns a count."""
    seen = 0

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal seen
        if event != "c_call":
            return
        home = getattr(function, "__module__", None)
        if home is None:  # a method: where its type lives
            home = type(getattr(function, "__self__", None)).__module__
        if home in _CHANGES_A_STORE:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)
    return lambda: seen


async def _live(url: str, journal: Callable[[str], object]) -> None:
    backend: Backend = registry.make_backend(url)
    await backend.open(make_context(BLOCK_BYTES))
    for step in range(STEPS):
        if step == CLEAR_AT:
            journal("clearing:")
            await backend.clear()
            journal("cleared:")
        outcomes = await save(backend, step_blocks(step))
        assert set(outcomes.values()) == {Outcome.DONE}, outcomes
        journal(f"written:{step}")
        await backend.delete(Keys.of(doomed(step)))
    await backend.close()


def main() -> None:
    """Live through all steps, or be killed: ``kills.py URL JOURNAL KILL_AT``."""
    url, path, number = sys.argv[1:]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    registry.make_backend(url)  # imports are calls, too, and a thousand of them
    count = _kill_at_call(int(number))
    counts: list[int] = []

    def journal(line: str) -> None:
        os.write(fd, f"{line}\n".encode())
        counts.append(count())

    asyncio.run(_live(url, journal))
    sys.setprofile(None)
    print(*counts, count())


if __name__ == "__main__":
    main()
