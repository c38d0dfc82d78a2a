"""What is asked of a machine, on machines that are not here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from tierkv.cli import machine


class FakeDriver:
    """libcuda with `names` for GPUs, or one that fails to start with `status`."""

    def __init__(self, *names: bytes, status: int = 0) -> None:
        self.names = names
        self.status = status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 100 + index
        return 0

    def cuDeviceGetName(self, text: Any, nbytes: int, device: ctypes.c_int) -> int:
        text.value = self.names[device.value - 100]
        return 0


def ask(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None) -> machine.CudaDriver:
    def load(name: str) -> FakeDriver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    return machine.cuda_driver()


def test_every_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(monkeypatch, FakeDriver(b"GPU A", b"GPU B"))
    assert found == machine.CudaDriver(loaded=True, gpus=("GPU A", "GPU B"))


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(monkeypatch, None)
    assert not found.loaded
    assert "no NVIDIA driver" in found.reason


def test_a_driver_that_does_not_start_is_not_taken_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ask(monkeypatch, FakeDriver(b"GPU A", status=999))
    assert (found.loaded, found.gpus) == (False, ())
    assert "cuInit = 999" in found.reason


def test_a_driver_without_a_gpu_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(monkeypatch, FakeDriver())
    assert (found.loaded, found.gpus, found.reason) == (True, (), "no GPU is there")


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5", 8 << 30), (str(3 << 30), str(1 << 30), 2 << 30), (str(99 << 30), "0", 8 << 30)],
)
def test_memory_is_what_the_container_may_take(
    tmp_path: Path, limit: str, used: str, expected: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {(8 << 30) // 1024} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert machine.available_memory_bytes(meminfo, tmp_path) == expected


def test_memory_is_known_without_a_container(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert machine.available_memory_bytes(absent, absent) > 0
