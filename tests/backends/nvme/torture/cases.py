"""One fault or kill, from an empty directory to the proof that nothing is lost, in forked children.

The parent has everything imported and no threads, so a child costs milliseconds.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401 - numpy.unique imports it late; once here, not in every child
import uvloop

from tests.backends.nvme.torture.homes import AtBackend, AtStorage, Home
from tests.backends.nvme.torture.journal import Journal
from tests.backends.nvme.torture.life import (
    LARGE,
    SEGMENT,
    Life,
    descriptors,
    numbers,
    physical_bytes,
    threads_left,
    url_of,
)
from tierkv.backend import SupportsVerify
from tierkv.blocks import Outcome
from tierkv.errors import StoreUnusableError
from tierkv.registry import make_backend
from tierkv.testing.faults import CHANGES, READS, WRITES, Injection, SystemFaults
from tierkv_backends.nvme import direct

LIMIT_S = 60
"""A child that takes longer hangs: its threads are printed and the case fails."""

LATE = frozenset({"pwritev", "pwrite", "fsync", "replace", "unlink", "posix_fallocate", "mkdir"})
HANG_AT_STORAGE = frozenset({"pwritev", "preadv", "open", "posix_fallocate", "fsync"})


@dataclass(frozen=True, slots=True)
class Case:
    """home: ``backend`` or ``storage``. number: of the call."""

    home: str
    number: int
    injection: Injection | None = None
    code: int = 0

    @property
    def capacity(self) -> int:
        """The quota: room for two lanes, and for one."""
        return (8 if self.home == "backend" else 4) * SEGMENT

    @property
    def is_kill(self) -> bool:
        return self.injection in (Injection.KILL, Injection.TORN_KILL)

    @property
    def may_lose(self) -> bool:
        """Bits that a disk flips, and files that it says are not there, are lost: misses."""
        return self.injection is Injection.FLIP or self.code == errno.ENOENT

    def __str__(self) -> str:
        code = f" {errno.errorcode[self.code]}" if self.code else ""
        what = self.injection.value if self.injection else "nothing"
        return f"{self.home}, call {self.number}: {what}{code}"


def faults_of(home: str, trace: list[str]) -> Iterator[Case]:
    """Every fault that makes sense at every call."""
    for number, name in enumerate(trace, 1):
        if name == "close":  # it closes, whatever it answers
            yield Case(home, number, Injection.ERROR, errno.EIO)
            continue
        codes = [errno.EIO]
        if name == "open":
            codes += [errno.EMFILE, errno.ENOENT]
        if name == "stat":
            codes += [errno.ENOENT]
        if name in ("posix_fallocate", "mkdir", "replace", "ftruncate", *WRITES):
            codes += [errno.ENOSPC]
        if name in ("pwritev", "preadv"):
            codes += [errno.EINVAL]
        for code in codes:
            yield Case(home, number, Injection.ERROR, code)
        if name in LATE:
            yield Case(home, number, Injection.LATE_ERROR, errno.EIO)
        if name in READS | WRITES:
            yield Case(home, number, Injection.SHORT)
            yield Case(home, number, Injection.FLIP)
        if home == "backend" or name in HANG_AT_STORAGE:
            yield Case(home, number, Injection.HANG)


def kills_of(home: str, trace: list[str]) -> Iterator[Case]:
    """Before every call that changes something, and in the middle of every write."""
    for number, name in enumerate(trace, 1):
        if name in CHANGES:
            yield Case(home, number, Injection.KILL)
        if name in WRITES:
            yield Case(home, number, Injection.TORN_KILL)


class Bench:
    """A place to try cases at, one after another."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        self._journal = Journal()

    def try_sync(self, case: Case) -> dict[str, Any]:
        """Run a case. ``violations`` of the answer is empty where all is well."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)
        self._journal.blank()
        if case.is_kill:
            code, answer = self._in_child(lambda: self._live(case))
            if code == -signal.SIGKILL:
                answer = {"violations": [], "hit": True, "name": ""}
            if code in (0, -signal.SIGKILL):
                code, checked = self._in_child(lambda: self._check(case))
                answer = joined(answer, checked) if code == 0 else checked
        else:
            code, answer = self._in_child(lambda: joined(self._live(case), self._check(case)))
        if code:
            answer = {"violations": [f"a child ended with {code}: {answer}"], "hit": True}
        shutil.rmtree(self._root, ignore_errors=True)
        return answer

    def _in_child(self, work: Callable[[], dict[str, Any]]) -> tuple[int, Any]:
        """(exit status, what it returned, or what it printed)."""
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            _be_child(work, into)
        os.close(into)
        with os.fdopen(out, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return code, json.loads(said) if code == 0 else said.decode(errors="replace")

    # In the children. -------------------------------------------------------------------------

    def _home(self, case: Case) -> Home:
        url = url_of(self._root, case.capacity)
        if case.home == "backend":
            return AtBackend(url, self._journal)
        timeout_s = 0.1 if case.injection is Injection.HANG else 10.0
        return AtStorage(url, self._journal, timeout_s=timeout_s)

    def _live(self, case: Case) -> dict[str, Any]:
        run = uvloop.run if case.number % 2 else asyncio.run
        run(asyncio.sleep(0))  # what a loop opens once for its process
        before = descriptors()
        calls = SystemFaults(
            self._root, more=[(direct, "statx_sync")], on_hang=lambda: on_hang[0]()
        )
        on_hang: list[Callable[[], object]] = [lambda: None]
        life = Life(
            lambda: self._home(case), self._journal, self._root, calls,
            capacity=case.capacity, flips=case.injection is Injection.FLIP,
        )  # fmt: skip
        if case.injection is not None:
            calls.at(case.number, case.injection, case.code)

        async def main() -> None:
            loop = asyncio.get_running_loop()
            hung = asyncio.Event()
            on_hang[0] = lambda: loop.call_soon_threadsafe(hung.set)

            async def watch() -> None:
                await hung.wait()
                await life.others_go_on()

            watching = asyncio.ensure_future(watch())
            await life.live()
            if not hung.is_set():
                watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled():
                watching.result()

        with calls:
            run(main())
        violations = [*life.violations, *(f"thread {name} lives on" for name in threads_left())]
        gc.collect()  # cancelled tasks are rings that refer to the arena
        left = descriptors()
        if left.keys() - before.keys():
            violations.append(f"left open: {[left[n] for n in left.keys() - before.keys()]}")
        return {
            "violations": violations,
            "hit": bool(calls.hits),
            "name": calls.hits[0].name if calls.hits else "",
            "trace": calls.trace if case.injection is None else [],
        }

    def _check(self, case: Case) -> dict[str, Any]:
        return asyncio.run(self._checked(case))

    async def _checked(self, case: Case) -> dict[str, Any]:
        history = self._journal.read()
        url = url_of(self._root, case.capacity)
        said = []
        if case.is_kill or (case.number % 4 == 0 and not case.may_lose):
            said += await self._verify(url, bool(history.must))
        home = AtBackend(url, self._journal)
        await home.open()
        found = await home.load(sorted(history.may))
        there = {n: data for n, data in found.items() if isinstance(data, bytes)}
        said += filter(None, (history.wrong(n, data) for n, data in there.items()))
        lost = history.must - there.keys()
        if lost and not case.may_lose:
            said.append(f"{len(lost)} of {len(history.must)} acknowledged blocks are gone")
        late: list[int] = []
        for i in range(case.capacity // SEGMENT + 2):
            late = numbers(LARGE, 5000 + 20 * i, 11)  # about a segment
            self._journal.offer(late, 0)
            for _ in range(500):  # 5 s; who makes room may be slow, and then declines at once
                outcomes = await home.save(late, 0)
                if set(outcomes.values()) == {Outcome.DONE}:
                    break
                await asyncio.sleep(0.01)
            else:
                said.append(f"later saves do not end DONE: {set(outcomes.values())}")
                break
            if physical_bytes(self._root) > case.capacity + SEGMENT:
                said.append(f"{physical_bytes(self._root)} bytes on disk")
        await home.close()
        home = AtBackend(url, self._journal)
        await home.open()
        found = await home.load(late)
        if not all(isinstance(data, bytes) for data in found.values()):
            said.append("what was saved last is not there after the next open")
        await home.close()
        return {"violations": said, "lost": len(lost), "must": len(history.must)}

    async def _verify(self, url: str, must: bool) -> list[str]:
        outside = make_backend(url)
        assert isinstance(outside, SupportsVerify)
        try:
            verified = await outside.verify(lambda done, total: None)
        except StoreUnusableError as exc:
            return [f"verify: {exc}"] if must else []
        return [f"verify: {bad}" for bad in (*verified.corrupt, *verified.skipped)]


def joined(lived: dict[str, Any], checked: dict[str, Any]) -> dict[str, Any]:
    """Two answers as one."""
    return {**lived, **checked, "violations": lived["violations"] + checked["violations"]}


def _be_child(work: Callable[[], dict[str, Any]], into: int) -> None:
    """Do the work and end, without a way back into what the parent does."""
    code = 1
    try:
        os.dup2(into, 2)  # tracebacks and warnings, where nothing else is said
        gc.disable()  # a short life; collections would copy the parent's heap
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        answer = json.dumps(work()).encode()
        faulthandler.cancel_dump_traceback_later()
        os.write(into, answer)
        code = 0
    except BaseException:  # noqa: BLE001 - told to the parent
        os.write(into, traceback.format_exc().encode())
    finally:
        sys.stderr.flush()
        os._exit(code)
