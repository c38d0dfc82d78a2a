"""The conformance kit: what every backend promises, as tests that anyone can run on theirs.

A backend's own test file is four lines::

    from tierkv.testing import BackendContract

    class TestMyBackend(BackendContract):
        def url(self, directory):
            return f"mine://{directory}?capacity=64MiB"

and, to have everything run on asyncio and on uvloop, in ``conftest.py``::

    from tierkv.testing import loop_factories

    def pytest_asyncio_loop_factories(config, item):
        return loop_factories(config, item)

What is here:

- `BackendContract`: the promises of `tierkv.backend`, one test each, random histories against a
  dict (`BackendMachine`) and kills of a child process (`kill_campaign`) included.
- `make_batch`, `empty_batch`, `make_move`, `save`, `load`, `assert_same`, ...: blocks for tests,
  as small dicts.
- `FaultyBackend`: wraps a backend and lies, fails or raises as told. `SlowBackend`: wraps a backend
  and holds calls until released.
- `SystemFaults`: the n-th system call of a store fails, falls short, hangs, lies or kills.
- `never_blocked`: raises where something blocks the event loop.

Names are looked up when first used, so that a child process that needs `make_batch` only does not
pay for pytest and hypothesis.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

_NEEDS = ("pytest", "pytest_asyncio", "hypothesis", "blockbuster")
_missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
if _missing:
    raise ImportError(
        f"tierkv.testing needs {', '.join(_missing)}; install tierkv[testing]", name=_missing[0]
    )

_HOME = {
    "BackendContract": "contract",
    "BackendMachine": "machine",
    "FILL": "batches",
    "Fault": "doubles",
    "FaultyBackend": "doubles",
    "Hit": "faults",
    "Injection": "faults",
    "Key": "batches",
    "KillReport": "kills",
    "Lie": "doubles",
    "Op": "doubles",
    "SlowBackend": "doubles",
    "SystemFaults": "faults",
    "agree_at_once": "batches",
    "assert_same": "batches",
    "empty_batch": "batches",
    "kill_campaign": "kills",
    "every_other": "batches",
    "load": "batches",
    "loop_factories": "loops",
    "make_batch": "batches",
    "make_blocks": "batches",
    "make_context": "batches",
    "make_key": "batches",
    "make_move": "batches",
    "make_payload": "batches",
    "never_blocked": "loops",
    "save": "batches",
    "sizes": "batches",
}
__all__ = sorted(_HOME)

if "pytest" in sys.modules:  # elsewhere nothing rewrites assertions
    sys.modules["pytest"].register_assert_rewrite(
        *(f"tierkv.testing.{name}" for name in sorted({*_HOME.values(), "promises"}))
    )

if TYPE_CHECKING:
    from tierkv.testing.batches import FILL as FILL
    from tierkv.testing.batches import Key as Key
    from tierkv.testing.batches import agree_at_once as agree_at_once
    from tierkv.testing.batches import assert_same as assert_same
    from tierkv.testing.batches import empty_batch as empty_batch
    from tierkv.testing.batches import every_other as every_other
    from tierkv.testing.batches import load as load
    from tierkv.testing.batches import make_batch as make_batch
    from tierkv.testing.batches import make_blocks as make_blocks
    from tierkv.testing.batches import make_context as make_context
    from tierkv.testing.batches import make_key as make_key
    from tierkv.testing.batches import make_move as make_move
    from tierkv.testing.batches import make_payload as make_payload
    from tierkv.testing.batches import save as save
    from tierkv.testing.batches import sizes as sizes
    from tierkv.testing.contract import BackendContract as BackendContract
    from tierkv.testing.doubles import Fault as Fault
    from tierkv.testing.doubles import FaultyBackend as FaultyBackend
    from tierkv.testing.doubles import Lie as Lie
    from tierkv.testing.doubles import Op as Op
    from tierkv.testing.doubles import SlowBackend as SlowBackend
    from tierkv.testing.faults import Hit as Hit
    from tierkv.testing.faults import Injection as Injection
    from tierkv.testing.faults import SystemFaults as SystemFaults
    from tierkv.testing.kills import KillReport as KillReport
    from tierkv.testing.kills import kill_campaign as kill_campaign
    from tierkv.testing.loops import loop_factories as loop_factories
    from tierkv.testing.loops import never_blocked as never_blocked
    from tierkv.testing.machine import BackendMachine as BackendMachine


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tierkv.testing.{_HOME[name]}"), name)
