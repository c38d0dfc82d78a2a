"""The memory backend keeps every promise of the kit, while it is open."""

from __future__ import annotations

import pathlib

import pytest

from tierkv.testing import BackendContract


@pytest.mark.every_loop
class TestMemoryBackend(BackendContract):
    survives_reopen = False
    exclusive = False

    def url(self, directory: pathlib.Path) -> str:
        return "memory://"

    def small_url(self, directory: pathlib.Path) -> str:
        return "memory://?capacity=16MiB"
