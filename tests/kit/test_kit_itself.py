"""The kit as a newcomer meets it: what it needs, what it imports, the four lines it asks for."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys
import types

import pytest
from blockbuster import BlockingError

import tierkv.testing
from tierkv.testing import BackendContract, loop_factories, never_blocked

MINE = """
from tierkv.testing import BackendContract

class TestMyBackend(BackendContract):
    def url(self, directory):
        return f"file://{directory}?capacity=64MiB"
"""
CONFTEST = """
from tierkv.testing import loop_factories

def pytest_asyncio_loop_factories(config, item):
    return loop_factories(config, item)
"""


def python(*args: str, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_the_four_lines_of_the_docstring_run_on_both_loops_in_strict_mode(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "test_mine.py").write_text(MINE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ["-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function"]
    done = python(
        "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *options,
        "-k", "read_back or many_groups", cwd=tmp_path,
    )  # fmt: skip
    assert "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["pytest", "pytest_asyncio", "hypothesis", "blockbuster"])
def test_what_is_missing_is_named_with_the_extra_that_brings_it(name: str) -> None:
    hide = (
        "import importlib.util as u; find = u.find_spec; "
        f"u.find_spec = lambda n, *a: None if n == {name!r} else find(n, *a); "
        "import tierkv.testing"
    )
    done = python("-c", hide)
    assert f"tierkv.testing needs {name}; install tierkv[testing]" in done.stderr


def test_a_child_that_makes_batches_pays_for_nothing_else() -> None:
    done = python(
        "-c",
        "import sys; from tierkv.testing import make_batch, save; "
        "print({'torch', 'pytest', 'hypothesis', 'uvloop'} & set(sys.modules))",
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_every_name_the_kit_lists_is_there() -> None:
    for name in tierkv.testing.__all__:
        assert getattr(tierkv.testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        tierkv.testing.nope  # noqa: B018 - looked up on purpose


@pytest.mark.parametrize(
    ("cls", "mark", "loops"),
    [
        (BackendContract, None, {"asyncio", "uvloop"}),
        (None, "every_loop", {"asyncio", "uvloop"}),
        (None, None, {"asyncio"}),
        (int, None, {"asyncio"}),
    ],
)
def test_only_the_kit_and_what_is_marked_runs_twice(
    cls: type | None, mark: str | None, loops: set[str]
) -> None:
    item = types.SimpleNamespace(cls=cls, get_closest_marker=lambda name: name == mark)
    assert loop_factories(None, item).keys() == loops


async def test_a_blocking_call_on_the_loop_is_seen_and_one_in_a_thread_is_not(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "x"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    buffer = bytearray(10)
    try:
        with never_blocked():
            for call in (
                lambda: os.preadv(fd, [buffer], 0),
                lambda: os.pwrite(fd, b"x", 0),
                lambda: os.fsync(fd),
                path.read_bytes,
                path.open,
            ):
                with pytest.raises(BlockingError):
                    call()
            assert await asyncio.to_thread(os.pread, fd, 10, 0) == b""
        assert os.pread(fd, 10, 0) == b""
    finally:
        os.close(fd)
