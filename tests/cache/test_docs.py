"""Every example in the docstrings of the API runs, in order, and answers what it says."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tierkv import opening
from tierkv.cache import Cache

PARSER = doctest.DocTestParser()
LAYOUT = tierkv.Layout(
    (tierkv.Group(name="attention", kind=tierkv.GroupKind.FULL, block_tokens=4, block_bytes=1024),)
)
# `load` has the hit that `save` left, so the examples run in the order of a first day.
METHODS = ("chain", "save", "flush", "lookup", "load", "stats", "debug", "rotate")


async def run_example(example: doctest.Example, names: dict[str, Any]) -> None:
    """Run one example as a prompt that allows `await` would, and compare what it prints."""
    tree = ast.parse(example.source)
    code = compile(tree, "<example>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    expression = len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if expression:
            code = compile(
                example.source.strip(), "<example>", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
        value = types.FunctionType(code, names)()
        if inspect.iscoroutine(value):
            value = await value
        if expression and value is not None:
            print(repr(value))
    assert out.getvalue() == example.want, example.source


def examples(documented: Callable[..., Any]) -> list[doctest.Example]:
    return PARSER.get_examples(inspect.getdoc(documented) or "")


async def test_the_examples_of_the_cache_run_in_order() -> None:
    pages = {"attention": [torch.zeros(8, 1024, dtype=torch.uint8)]}
    names: dict[str, Any] = {
        "tierkv": tierkv,
        "Extras": tierkv.Extras,
        "layout": LAYOUT,
        "pages": pages,
    }
    async with tierkv.open("memory://", pinned="1MiB", layout=LAYOUT, namespace="m@1") as cache:
        names["cache"] = cache
        for method in METHODS:
            found = examples(getattr(Cache, method))
            assert found, f"Cache.{method} shows no example"
            for example in found:
                await run_example(example, names)
        assert cache.stats()["leased_blocks"] == 0


async def test_the_example_of_open_runs(tmp_path: Path) -> None:
    (example,) = examples(tierkv.open)
    assert "nvme:///tmp/kv?" in example.source
    example.source = example.source.replace("/tmp/kv", str(tmp_path / "kv"))
    await run_example(example, {"tierkv": tierkv, "layout": LAYOUT})


def test_every_public_operation_has_an_example_that_runs_here() -> None:
    public = {
        name
        for name, member in vars(Cache).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert public - {"aopen", "aclose"} == set(METHODS)
    assert examples(opening.open) and examples(tierkv.open) == examples(opening.open)


@pytest.mark.parametrize("wrong", ["1 + 1\n", "print(3)\n"])
async def test_the_runner_finds_a_wrong_answer(wrong: str) -> None:
    with pytest.raises(AssertionError):
        await run_example(doctest.Example(wrong, "1\n"), {})
