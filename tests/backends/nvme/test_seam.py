"""Every system call of the backend goes where faults can be put, and costs nothing for it."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

import tierkv_backends.nvme as package
from tierkv.testing import SystemFaults, load, make_blocks, save, sizes

MODULES = sorted(Path(package.__file__).parent.glob("*.py"))
UNSEEN = {
    "open", "io", "read_text", "read_bytes", "write_text", "write_bytes", "subprocess",
    "sendfile", "copyfile", "rmtree", "copytree", "fdopen",
}  # fmt: skip
"""What reaches the system without a function of `os` that a test could replace."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_reaches_the_system_by_another_way(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in UNSEEN:
                found.append((node.lineno, name))
            case ast.Call(func=ast.Attribute(attr=name, value=value)):
                own = isinstance(value, ast.Name) and value.id in ("os", "shutil")
                if name in UNSEEN and not (own and name == "open"):
                    found.append((node.lineno, name))
            case ast.ImportFrom(module=("os" | "fcntl" | "io" | "shutil") as module):
                found.append((node.lineno, f"from {module} import"))  # would keep the function
            case ast.Import(names=names):
                taken = {n.name for n in names} & ({"ctypes"} if path.stem != "direct" else set())
                found += [(node.lineno, name) for name in taken]
            case _:
                pass
    calls = [(line, name) for line, name in found if (path.stem, name) != ("backend", "open")]
    assert calls == []


async def test_the_layer_sees_what_strace_would_see(tmp_path: Path, opened: Any) -> None:
    """A store's whole life, and its descriptors: all that is opened is closed, under its eyes."""
    from tierkv_backends.nvme import direct

    blocks = make_blocks(6, [4096])
    with SystemFaults(tmp_path, more=[(direct, "statx_sync")]) as calls:
        async with opened(tmp_path / "store") as backend:
            await save(backend, blocks)
            assert await load(backend, sizes(blocks)) == blocks
            await backend.clear()
    seen = set(calls.trace)
    assert seen >= {
        "open", "close", "pwritev", "preadv", "pwrite", "fstat", "stat", "posix_fallocate",
        "replace", "fsync", "mkdir", "scandir", "statvfs", "flock", "ftruncate", "unlink",
        "statx_sync",
    }  # fmt: skip
    assert not calls._fds, "what was opened was not closed, or not where it can be seen"


def test_production_runs_the_systems_own_functions() -> None:
    before = os.pwritev
    with SystemFaults("/nowhere"):
        assert os.pwritev is not before
    assert os.pwritev is before
    assert type(os.pwritev).__name__ == "builtin_function_or_method"
