"""One JSON object and nothing else, whatever else is written; errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cli.output import json_text

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
SCRIPT = Path(sysconfig.get_path("scripts")) / "tierkv"

NOISY = """
import os, subprocess, sys
import typer
from tierkv.cli.output import answering
from tierkv.errors import StoreBusyError

def command(fail: bool = False) -> None:
    with answering(as_json=True) as screen:
        print("a library prints")
        os.write(1, b"C code writes\\n")
        subprocess.run(["echo", "a child writes"], check=True)
        if fail:
            raise StoreBusyError("owned by\\nprocess 7")
        screen.show({"answer": 42}, lambda: "", ok=True)

typer.run(command)
"""


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, check=False
    )


def script(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=60, check=False)


def test_whatever_writes_to_stdout_meanwhile_lands_on_stderr() -> None:
    done = python("-c", NOISY)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"answer": 42})
    for line in ("a library prints", "C code writes", "a child writes"):
        assert line in done.stderr


def test_an_error_is_one_object_on_stdout_and_one_line_on_stderr() -> None:
    done = python("-c", NOISY, "--fail")
    assert done.returncode == 2
    assert json.loads(done.stdout) == {
        "error": "owned by process 7",
        "error_type": "StoreBusyError",
    }
    assert done.stderr.endswith("tierkv: owned by process 7\n")
    assert "Traceback" not in done.stderr


def test_a_bug_is_not_dressed_up_as_an_error_of_ours() -> None:
    done = python("-c", NOISY.replace("StoreBusyError(", "ZeroDivisionError("), "--fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr


def test_the_installed_script_prints_one_object(tmp_path: Path) -> None:
    done = script("doctor", "--json", "--dir", str(tmp_path))
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["ok"] else 1)
    assert answer["dir"] == str(tmp_path)


def test_the_version_is_that_of_the_installed_package() -> None:
    done = script("--version")
    assert (done.returncode, done.stdout) == (0, f"tierkv {version('tierkv')}\n")


def test_the_installed_script_refuses_in_one_line() -> None:
    done = script("verify", "no-scheme")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tierkv: tier URL 'no-scheme' has no scheme")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("heavy", ["torch", "numpy", "rich.progress", "uvloop", "asyncio"])
def test_help_imports_nothing_heavy(heavy: str) -> None:
    done = python("-X", "importtime", "-c", "import tierkv.cli")
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "tierkv.cli.doctor" in imported
    assert heavy not in imported


@given(JSON, st.lists(JSON, max_size=3))
def test_an_answer_is_written_as_json_with_iterators_as_lists(
    value: object, some: list[object]
) -> None:
    assert json.loads("".join(json_text(value))) == value
    answer = {
        "plain": value,
        "made": iter(some),
        "inner": [{"made": iter(some)}, {"made": iter([])}],
    }
    assert json.loads("".join(json_text(answer))) == {
        "plain": value,
        "made": some,
        "inner": [{"made": some}, {"made": []}],
    }


def test_what_an_iterator_yields_is_written_before_it_ends() -> None:
    text = json_text({"keys": iter(range(10**12))})
    begun = "".join(next(text) for _ in range(6))
    assert begun.startswith('{"keys": [0, 1, 2')
    assert 1000 < len(begun) < 20_000
