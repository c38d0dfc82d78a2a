"""The file backend keeps every promise of the kit."""

from __future__ import annotations

import pathlib

from tierkv.testing import BackendContract


class TestFileBackend(BackendContract):
    def url(self, directory: pathlib.Path) -> str:
        return f"file://{directory}?capacity=64MiB"

    def small_url(self, directory: pathlib.Path) -> str:
        return f"file://{directory}?capacity=16MiB"
