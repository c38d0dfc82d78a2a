"""Tests on the real engine; collected only where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import engines

    @pytest.fixture(params=engines.MODELS)
    def model(request: pytest.FixtureRequest) -> str:
        """Each of the tiny models: one KV cache group, and three of them."""
        return str(request.param)

    @pytest.fixture(scope="session")
    def references() -> engines.References:
        """What an engine without a connector answers; computed once per model."""
        return engines.References()

    @pytest.fixture
    def store(tmp_path: Path) -> Path:
        """An empty directory for a store."""
        return tmp_path / "store"

    @pytest.fixture(autouse=True)
    def no_engine_left() -> Iterator[None]:
        """Ends engines that a failed test left open."""
        yield
        engines.close_all()
