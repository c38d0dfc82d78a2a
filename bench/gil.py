"""Spike: what a thread that spins in Python costs a reader in the same process and in another.

Reads a page-cached file into shared memory with `preadv`, once in a thread of this process and
once in a child that gets its commands over a socket pair, each alone and beside a spinning thread.
"""

from __future__ import annotations

import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

TOTAL = 512 << 20


def read_all(fd: int, view: memoryview, nbytes: int) -> float:
    start = time.perf_counter()
    for at in range(0, TOTAL, nbytes):
        os.preadv(fd, [view[at : at + nbytes]], at)
    return TOTAL / (time.perf_counter() - start) / 1e9


def child(sock_fd: int, arena_fd: int, file_fd: int) -> None:
    sock = socket.socket(fileno=sock_fd)
    view = memoryview(mmap.mmap(arena_fd, TOTAL))
    while data := sock.recv(64):
        sock.send(str(read_all(file_fd, view, int(data))).encode())


class Spinner:
    def __init__(self) -> None:
        self.count = 0
        self.stop = False
        self.thread = threading.Thread(target=self.spin)

    def spin(self) -> None:
        while not self.stop:
            self.count += 1

    def __enter__(self) -> Spinner:
        self.start = time.perf_counter()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop = True
        self.thread.join()
        self.rate = self.count / (time.perf_counter() - self.start)


def main() -> None:
    arena_fd = os.memfd_create("gil")
    os.truncate(arena_fd, TOTAL)
    view = memoryview(mmap.mmap(arena_fd, TOTAL))
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.write(os.urandom(1 << 20) * (TOTAL >> 20))
        file.flush()
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), arena_fd, file.fileno())
        proc = subprocess.Popen(
            [sys.executable, __file__, *map(str, fds)], pass_fds=fds
        )
        theirs.close()

        def keeper(nbytes: int) -> float:
            ours.send(str(nbytes).encode())
            return float(ours.recv(64))

        def thread(nbytes: int) -> float:
            return read_all(file.fileno(), view, nbytes)

        with Spinner() as alone:
            time.sleep(1)
        for nbytes in (2 << 20, 64 << 10):
            for name, run in (("thread", thread), ("keeper", keeper)):
                idle, busy, rates = [], [], []
                for _ in range(3):
                    idle.append(run(nbytes))
                    with Spinner() as spin:
                        busy.append(run(nbytes))
                    rates.append(spin.rate / alone.rate)
                a, b, c = map(statistics.median, (idle, busy, rates))
                print(f"{nbytes >> 10:5d} KiB {name}: idle {a:.2f} GB/s, beside {b:.2f} ({b / a:.2f}), spinner {c:.2f}")
        ours.close()
        proc.wait()


if __name__ == "__main__":
    child(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else main()
