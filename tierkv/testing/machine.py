"""Random histories of a backend, compared step by step with a dict."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tierkv.backend import Backend
from tierkv.blocks import Keys, Outcome
from tierkv.testing.batches import Key, load, make_context, make_key, make_payload, save

BLOCK_BYTES: Final = (4096, 511, 20_000)
"""Groups of the machine: few and small, so that many steps fit."""

_KEYS: Final = [make_key(number, group) for number in range(5) for group in range(3)]
_some_keys = st.lists(st.sampled_from(_KEYS), max_size=6, unique=True)
_T = TypeVar("_T")


class BackendMachine(RuleBasedStateMachine):
    """Writes, reads, deletes, clears, reopens and retires at random; a dict knows the answers.

    Subclass it, say how to make a backend in a directory, and run `check`::

        class Mine(BackendMachine):
            def make_backend(self, directory):
                return make_backend(f"mine://{directory}")

        def test_random_histories():
            Mine.check()

    For every key the dict holds the set of answers that would be right: its bytes, None for
    "not there", or both where the backend has asked to retire the key and may drop it any time.
    """

    survives_reopen = True
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None

    @classmethod
    def check(cls, *, max_examples: int = 12, steps: int = 25) -> None:
        """Run it: `max_examples` histories of at most `steps` steps."""
        run_state_machine_as_test(
            cls,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=steps,
                deadline=None,
                report_multiple_bugs=False,
            ),
        )

    def make_backend(self, directory: pathlib.Path) -> Backend:
        """A backend that is not open, keeping its things in `directory`."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.right: dict[Key, set[bytes | None]] = {key: {None} for key in _KEYS}
        self.retired: set[Key] = set()
        self.folder = tempfile.TemporaryDirectory(prefix="tierkv-machine-")
        self.runner = asyncio.Runner(loop_factory=self.loop_factory)
        self.backend = self._opened()

    def _run(self, work: Awaitable[_T]) -> _T:
        async def main() -> _T:
            return await work

        return self.runner.run(main())

    def _opened(self) -> Backend:
        backend = self.make_backend(pathlib.Path(self.folder.name))
        self._run(backend.open(make_context(BLOCK_BYTES, retire=self._retire)))
        return backend

    async def _retire(self, keys: Keys) -> None:
        for key in keys:
            self.right[key].add(None)
            self.retired.add(key)

    def _learn(self, key: Key, answer: bytes | None) -> None:
        assert answer in self.right[key], f"read gave {_short(answer)}, a dict would not"
        if answer is None:
            self.retired.discard(key)
        elif key in self.retired:
            return  # may still go
        self.right[key] = {answer}

    @rule(keys=_some_keys, variant=st.integers(0, 1))
    def write(self, keys: list[Key], variant: int) -> None:
        """Write a batch; a key that is there keeps its bytes."""
        batch = {key: make_payload(key, BLOCK_BYTES[key[0]], variant) for key in keys}
        for key, outcome in self._run(save(self.backend, batch)).items():
            assert outcome in (Outcome.DONE, Outcome.DECLINED), f"write gave {outcome.name}"
            right = self.right[key]
            if outcome is Outcome.DECLINED:
                assert None in right, "an existing key must not be declined"
            elif None in right:
                right.add(batch[key])
                if key not in self.retired:
                    right.discard(None)

    @rule(keys=_some_keys)
    def read(self, keys: list[Key]) -> None:
        """Read a batch: full bytes or MISSING, as the dict says."""
        found = self._run(load(self.backend, {key: BLOCK_BYTES[key[0]] for key in keys}))
        for key, got in found.items():
            assert isinstance(got, bytes) or got is Outcome.MISSING, f"read gave {got}"
            self._learn(key, got if isinstance(got, bytes) else None)

    @rule(keys=_some_keys)
    def delete(self, keys: list[Key]) -> None:
        """Delete keys, known or not."""
        self._run(self.backend.delete(Keys.of(keys)))
        for key in keys:
            self._forget(key)

    @rule()
    def clear(self) -> None:
        """Forget everything."""
        self._run(self.backend.clear())
        for key in _KEYS:
            self._forget(key)

    @rule()
    def reopen(self) -> None:
        """Close, and open another instance on the same place."""
        self._run(self.backend.close())
        self.backend = self._opened()
        self.retired.clear()
        if not self.survives_reopen:
            for key in _KEYS:
                self._forget(key)

    def _forget(self, key: Key) -> None:
        self.right[key] = {None}
        self.retired.discard(key)

    @invariant()
    def contains_scan_and_usage_agree(self) -> None:
        """Three ways to ask what is there give one answer, and it is one the dict allows."""
        there = self._run(self._there())
        for key in _KEYS:
            if key in there:
                assert self.right[key] != {None}, "contains a key that was forgotten"
            else:
                assert None in self.right[key], "a stored key is gone"
        usage = self._run(self.backend.usage())
        assert usage.blocks == len(there)
        assert usage.payload_bytes == sum(BLOCK_BYTES[group] for group, _ in there)

    async def _there(self) -> set[Key]:
        mask = await self.backend.contains(Keys.of(_KEYS))
        there = {key for key, yes in zip(_KEYS, mask.tolist(), strict=True) if yes}
        scanned = [key async for keys in self.backend.scan() for key in keys]
        assert sorted(scanned) == sorted(there), "scan and contains disagree"
        return there

    def teardown(self) -> None:
        """Give directory and loop back."""
        try:
            self._run(self.backend.close())
        finally:
            self.runner.close()
            self.folder.cleanup()


def _short(answer: bytes | None) -> Any:
    return "nothing" if answer is None else f"{len(answer)} bytes {answer[:8].hex()}"
