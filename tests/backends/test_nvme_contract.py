"""The nvme backend keeps every promise of the kit."""

from __future__ import annotations

import pathlib

import pytest

from tierkv.testing import BackendContract


@pytest.mark.every_loop
class TestNvmeBackend(BackendContract):
    def url(self, directory: pathlib.Path) -> str:
        return f"nvme://{directory}?capacity=256MiB&segment=8MiB"

    def small_url(self, directory: pathlib.Path) -> str:
        return f"nvme://{directory}?capacity=32MiB&segment=8MiB"
