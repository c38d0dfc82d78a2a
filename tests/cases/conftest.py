"""What several case files ask for."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tierkv import registry

URLS = {
    "memory": "memory://",
    "file": "file://{}?capacity=64MiB",
    "nvme": "nvme://{}?capacity=256MiB&segment=8MiB",
    "gds": "gds://{}?capacity=256MiB&segment=8MiB",
}


@pytest.fixture(params=sorted(e.name for e in registry.schemes().values()))
def tier(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Callable[[], str]:
    """The URL of a tier of every registered scheme, over one and the same directory."""
    scheme: str = request.param
    assert scheme in URLS, f"say in {__file__} how to make a {scheme} tier"
    return lambda: URLS[scheme].format(tmp_path)
