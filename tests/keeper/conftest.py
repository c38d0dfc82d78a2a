"""A keeper in a real child process, and words for what tests say to it."""

from __future__ import annotations

import dataclasses
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from tierkv.blocks import Event, MoveDone, MoveKind, Outcome, Recovered, slot_bytes
from tierkv.keeper import KeeperClient
from tierkv.pinned import Arena
from tierkv.storage import StorageConfig
from tierkv.testing import make_key, make_move, make_payload

BLOCK_BYTES = (5000, 12288)
SLOT = slot_bytes(max(BLOCK_BYTES))
SLOTS = 64
PATIENCE_S = 30.0

E = TypeVar("E")


class Post:
    """One client under test: submit moves of numbered blocks, wait for events by type."""

    def __init__(self, config: StorageConfig) -> None:
        self.arena = Arena.create(config.arena_bytes)
        self.client = KeeperClient(config, self.arena)
        self.events: list[Event] = []
        self.epoch = 0
        self._ids = iter(range(1, 1 << 30))

    def open(self) -> Recovered:
        return self.client.wait_open(PATIENCE_S)

    def close(self) -> None:
        self.client.close(deadline_s=1)
        self.arena.close()

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until `condition` holds; the events stay."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.events += self.client.poll()
            if condition():
                return
            assert time.monotonic() < deadline, f"still waiting; events: {self.events}"
            self.client.wait(0.05)

    def event(self, kind: type[E], where: Callable[[E], bool] = lambda _: True) -> E:
        """Wait for the first event of a type, and take it out."""
        found: list[E] = []

        def there() -> bool:
            found.extend(e for e in self.events if isinstance(e, kind) and where(e))
            return bool(found)

        self.until(there)
        self.events.remove(found[0])  # type: ignore[arg-type] # E is one of the events
        return found[0]

    def submit(self, kind: MoveKind, numbers: Sequence[int], *, slot: int = 0, **more: Any) -> int:
        keys = [make_key(n, n % len(BLOCK_BYTES)) for n in numbers]
        if kind is MoveKind.SAVE:
            for i, key in enumerate(keys):
                payload = make_payload(key, BLOCK_BYTES[key[0]])
                self.arena.view[(slot + i) * SLOT : (slot + i) * SLOT + len(payload)] = payload
        move = make_move(
            kind,
            keys,
            move_id=next(self._ids),
            offsets=[(slot + i) * SLOT for i in range(len(keys))],
            epoch=self.epoch,
            **more,
        )
        self.client.submit(move)
        return move.id

    def done(self, move_id: int) -> list[Outcome]:
        event = self.event(MoveDone, lambda e: e.move_id == move_id)
        return [Outcome(o) for o in event.outcomes.tolist()]

    def run(self, kind: MoveKind, numbers: Sequence[int], **more: Any) -> list[Outcome]:
        return self.done(self.submit(kind, numbers, **more))

    def holds(self, slot: int, number: int) -> bool:
        key = make_key(number, number % len(BLOCK_BYTES))
        payload = make_payload(key, BLOCK_BYTES[key[0]])
        return self.arena.view[slot * SLOT : slot * SLOT + len(payload)] == payload


def make_config(url: str, **options: Any) -> StorageConfig:
    config = StorageConfig(
        url=url,
        namespace=b"\x01" * 32,
        namespace_text="test",
        arena_bytes=SLOT * SLOTS,
        block_bytes=BLOCK_BYTES,
    )
    return dataclasses.replace(config, **options)


@pytest.fixture
def config() -> StorageConfig:
    """A memory tier."""
    return make_config("memory://")


class OpenPost(Protocol):
    def __call__(self, url: str = ..., *, wait: bool = ..., **options: Any) -> Post: ...


@pytest.fixture
def open_post() -> Iterator[OpenPost]:
    """Opens posts and closes them at the end."""
    posts: list[Post] = []

    def opened(url: str = "memory://", *, wait: bool = True, **options: Any) -> Post:
        posts.append(Post(make_config(url, **options)))
        if wait:
            posts[-1].open()
        return posts[-1]

    yield opened
    for post in posts:
        post.close()


@pytest.fixture
def sluggish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scheme `sluggish` known to keepers, which look where we look."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugin"))


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process, no child of ours, ends within `PATIENCE_S`."""

    def ends(pid: int) -> bool:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([fd], [], [], PATIENCE_S)[0])
        finally:
            os.close(fd)

    return ends
