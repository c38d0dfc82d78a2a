"""The memory backend keeps every promise of the kit, while it is open."""

from __future__ import annotations

import pathlib

from tierkv.testing import BackendContract


class TestMemoryBackend(BackendContract):
    survives_reopen = False
    exclusive = False

    def url(self, directory: pathlib.Path) -> str:
        return "memory://"

    def small_url(self, directory: pathlib.Path) -> str:
        return "memory://?capacity=16MiB"
