"""What a soak tells while it runs, and who ends it where it hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

import psutil

HUNG_STATUS = 3
TELL_S = 10.0


class Watch:
    """Prints a line every `tell_s`; ends the process where a phase overruns its limit.

    tell: what there is to tell, in one line. describe: what hangs, as far as it is known.
    end: the last thing done before the process ends with `HUNG_STATUS`.

    Both are called on a thread of the watch while the main thread goes on: they only look. Should
    that thread find no turn either (a call that keeps the interpreter's lock), faulthandler ends
    the process half a minute later.
    """

    def __init__(
        self,
        tell: Callable[[], str],
        describe: Callable[[], str],
        end: Callable[[str], None] = lambda what: None,
        *,
        tell_s: float = TELL_S,
    ) -> None:
        self._tell, self._describe, self._end, self._tell_s = tell, describe, end, tell_s
        self.began = time.monotonic()
        self._phase, self._due = "start", float("inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="soak-watch")
        self._thread.start()

    def phase(self, name: str, limit_s: float) -> None:
        """A new phase; the next call must come within `limit_s`."""
        self._phase, self._due = name, time.monotonic() + limit_s
        faulthandler.dump_traceback_later(limit_s + 30, exit=True)

    def close(self) -> None:
        """The end: no limit any more."""
        faulthandler.cancel_dump_traceback_later()
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        told = time.monotonic()
        while not self._over.wait(min(self._tell_s, 0.5)):
            now = time.monotonic()
            if now >= told + self._tell_s:
                told = now
                self._say(self._tell())
            if now > self._due:
                self._give_up()

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self.began
        print(f"soak {elapsed:7.1f} s  {self._phase:<12} {text}", file=sys.stderr, flush=True)

    def _give_up(self) -> None:
        what = self._phase
        try:
            self._say(f"HANGS: {self._describe()}")
        finally:
            faulthandler.dump_traceback(all_threads=True)
            for child in psutil.Process().children(recursive=True):
                child.kill()
            self._end(what)
            os._exit(HUNG_STATUS)
