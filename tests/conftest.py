"""What every test may ask for: a detector of blocking calls, and both event loops."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tierkv.testing import loop_factories, never_blocked
from tierkv.testing.loops import LoopFactory


@pytest.fixture
def blockbuster() -> Iterator[None]:
    """While it is in use, a blocking call on a running loop raises."""
    with never_blocked():
        yield


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """Asyncio, and uvloop too for the kit and for what is marked `every_loop`."""
    return loop_factories(config, item)


@pytest.fixture(scope="session")
def stub_libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 without a GPU, enough for the real kvikio. Built once."""
    source = Path(__file__).parent / "backends" / "gds" / "libcuda.c"
    folder = tmp_path_factory.mktemp("libcuda")
    flags = ["-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *flags, "-o", folder / "libcuda.so.1", source], check=True, timeout=60)
    return folder


@pytest.fixture
def cuda_stub(stub_libcuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and its children have a CUDA driver while the test runs.

    A library cannot be unloaded, but this one does not start where the variable is not set.
    """
    ctypes.CDLL(str(stub_libcuda / "libcuda.so.1"))  # found by its name from now on
    monkeypatch.setenv("TIERKV_TEST_CUDA", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_libcuda))
    monkeypatch.setattr("tierkv_backends.gds.probe._known", _KNOWN_WITH_STUB)


_KNOWN_WITH_STUB: dict[object, object] = {}
