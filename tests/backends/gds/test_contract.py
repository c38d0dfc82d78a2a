"""The gds backend keeps every promise of the kit.

kvikio is the real one; the CUDA driver under it is the stub of tests/conftest.py.
"""

from __future__ import annotations

import pathlib

import pytest

from tierkv.testing import BackendContract


@pytest.mark.usefixtures("cuda_stub")  # on one loop: nvme, whose code it is, has both
class TestGdsBackend(BackendContract):
    def url(self, directory: pathlib.Path) -> str:
        return f"gds://{directory}?capacity=256MiB&segment=8MiB"

    def small_url(self, directory: pathlib.Path) -> str:
        return f"gds://{directory}?capacity=32MiB&segment=8MiB"
