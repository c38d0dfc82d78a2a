"""Rules about the source that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierkv

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "tierkv").rglob("*.py"), *(ROOT / "backends").rglob("*.py")])
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def test_no_pickle_on_media_or_on_the_wire() -> None:
    imports = [
        where(path, node)
        for path, node in nodes()
        if isinstance(node, ast.Import | ast.ImportFrom)
        and re.search(r"\b(c?pickle|marshal|shelve|dill)\b", ast.unparse(node))
    ]
    assert imports == []


def test_a_move_is_made_where_it_is_decided_and_nowhere_else() -> None:
    makers = {"tierkv/blocks.py", "tierkv/ledger.py", "tierkv/books.py"}  # books: the ledger's
    uses = {
        str(path.relative_to(ROOT))
        for path, node in nodes()
        if (isinstance(node, ast.Name) and node.id in ("planned_move", "_PLANNED"))
        or (isinstance(node, ast.Attribute) and node.attr in ("planned_move", "_PLANNED"))
        or (isinstance(node, ast.alias) and node.name in ("planned_move", "_PLANNED"))
    }
    assert {u for u in uses if not u.startswith("tierkv/testing/")} - makers == set()


def test_every_type_ignore_has_a_code_and_a_reason() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "type: ignore" in line and not re.search(r"type: ignore\[[\w, -]+\]\s+#\s*\S", line)
    ]
    assert bare == [], "write: # type: ignore[code]  # reason"


def test_functions_and_files_are_short() -> None:
    long = [
        f"{p.relative_to(ROOT)}"
        for p in SOURCES
        if len(p.read_text().splitlines()) > MAX_FILE_LINES
    ]
    long += [
        f"{where(path, node)} {node.name}"
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("name", tierkv.__all__)
def test_every_exported_name_can_be_fetched(name: str) -> None:
    assert getattr(tierkv, name) is not None
    assert name in dir(tierkv)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tierkv.nothing  # noqa: B018 - reading it is the test


def test_type_checkers_see_the_names_that_are_exported() -> None:
    tree = ast.parse((ROOT / "tierkv" / "__init__.py").read_text())
    seen = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tierkv.")
        for alias in node.names
    }
    assert seen == set(tierkv.__all__) - {"__version__"}


def test_importing_tierkv_imports_nothing_else() -> None:
    code = "import sys, tierkv; print(*sorted(m for m in sys.modules if m.startswith('tierkv')))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "tierkv.blocks" not in done.stdout
    assert "torch" not in done.stdout


def test_finding_unique_values_imports_nothing_more_than_the_core_did() -> None:
    code = (
        "import sys, numpy as np, tierkv.blocks; before = set(sys.modules)\n"
        "np.unique(np.arange(3)); assert set(sys.modules) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
