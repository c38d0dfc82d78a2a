"""One life of a keeper as its client sees it: a child process and the socket to it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from tierkv.errors import KeeperError
from tierkv.keeper.wire import FrameReader, encode

_RECEIVE_BYTES: Final = 1 << 20


def _environment() -> dict[str, str]:
    """What the child needs to import the same modules as we do, backends of others included."""
    paths = [str(Path(__file__).resolve().parents[2]), *(p for p in sys.path if p)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        # The keeper does no linear algebra; a BLAS would start a thread per core all the same.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


class KeeperProcess:
    """A child process and the socket to it. Only the methods called `wait_...` wait.

    ended: the other side hung up, or what it sent was garbage.
    """

    def __init__(self, arena_fd: int) -> None:
        """Start it. `KeeperError` where the system refuses."""
        self.ended = False
        self._reader = FrameReader()
        self._out = bytearray()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        try:
            self._process = subprocess.Popen(
                [*_command(), *map(str, self._arguments(theirs.fileno(), arena_fd))],
                pass_fds=(theirs.fileno(), arena_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the program's own output stays its own
                env=_environment(),
            )
        except OSError as exc:
            ours.close()
            raise KeeperError(f"keeper: cannot be started: {exc}") from exc
        finally:
            theirs.close()
        self.socket = ours

    @staticmethod
    def _arguments(socket_fd: int, arena_fd: int) -> tuple[int, int, int, int]:
        # The kernel ties the child to the *thread* that started it. The main thread lives as long
        # as the process; for any other, the end of the socket must do.
        die_with_thread = threading.current_thread() is threading.main_thread()
        return socket_fd, arena_fd, os.getpid(), int(die_with_thread)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None until it is reaped."""
        return self._process.returncode

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken yet."""
        return len(self._out)

    def send(self, message: tuple[Any, ...]) -> None:
        """Queue a message and send what the socket takes."""
        self._out += encode([message])
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._out and not self.ended:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            except OSError:  # EPIPE, ECONNRESET: it is gone
                self.ended = True
                return
            del self._out[:sent]

    def receive(self) -> list[list[Any]]:
        """Everything that has arrived; sets `ended` at the end of it."""
        self.flush()
        messages: list[list[Any]] = []
        while True:
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
                if not data:
                    self.ended = True
                    return messages
                messages += self._reader.feed(data)
            except BlockingIOError:
                return messages
            except (OSError, ValueError):
                self.ended = True
                return messages

    def wait_readable(self, timeout_s: float) -> None:
        """Return when something has arrived, or after `timeout_s`."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def kill(self) -> None:
        """SIGKILL; nothing if it has ended."""
        self._process.kill()

    def reaped(self) -> bool:
        """Whether the process is gone: nothing touches the arena on its behalf any more."""
        return self._process.poll() is not None

    def wait_reaped(self, timeout_s: float) -> bool:
        """`reaped`, after waiting for it at most `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the socket; the process ends by that alone if it still runs."""
        self.socket.close()


def _command() -> list[str]:
    if not sys.executable:
        raise KeeperError("keeper: sys.executable is empty; no interpreter to start it with")
    # -P: what lies in the current directory must not shadow a module.
    return [sys.executable, "-P", "-m", "tierkv.keeper"]
