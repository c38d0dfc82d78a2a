"""``python -m tierkv.keeper SOCKET_FD ARENA_FD PARENT_PID DIE_WITH_THREAD``, as a client does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable

from tierkv.keeper.child import Keeper

_PR_SET_PDEATHSIG = 1

_NICENESS = 10
"""The engine's thread goes first where cores are short. Beside one that spins on two cores, at
2 MiB extents, that thread kept 0.82 to 0.85 of its rate without this and 0.92 to 0.98 with it, and
the keeper 0.80 to 0.98 of its own (bench/gil.py)."""


def _new_event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _die_with(parent_pid: int) -> None:
    """Have the kernel end this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the request was in place
        os._exit(1)


async def _serve(sock: socket.socket, arena_fd: int) -> None:
    loop = asyncio.get_running_loop()
    keeper = Keeper(arena_fd)
    await loop.create_unix_connection(lambda: keeper, sock=sock)
    await keeper.ended


def main(args: list[str]) -> None:
    """Serve one client until it says close or goes away. Does not return."""
    sock_fd, arena_fd, parent_pid, die_with_thread = map(int, args)
    # The client's process decides when to stop: Ctrl-C goes to the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    if die_with_thread:
        _die_with(parent_pid)
    sock = socket.socket(fileno=sock_fd)
    with asyncio.Runner(loop_factory=_new_event_loop()) as runner:
        runner.run(_serve(sock, arena_fd))
        os._exit(0)  # a thread that hangs in a dead disk must not keep the process


if __name__ == "__main__":
    main(sys.argv[1:])
