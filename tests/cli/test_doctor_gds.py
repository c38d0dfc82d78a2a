"""`tierkv doctor` tells the gds mode that an open would find, by trying."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.cli import doctor


@pytest.mark.usefixtures("cuda_stub")
def test_the_mode_is_what_was_tried(tmp_path: Path) -> None:
    odd = tmp_path / "a #b?c%20"
    odd.mkdir()
    answer = doctor.examine(odd)
    assert (answer["gpu"], answer["gds_mode"]) == (["stub"], "compat")
    assert "cuFile" in answer["gds_reason"]
    assert list(odd.iterdir()) == []


def test_without_a_gpu_it_is_the_host_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = doctor.CudaDriver(loaded=False, reason="no NVIDIA driver")
    monkeypatch.setattr(doctor.machine, "cuda_driver", lambda: none)
    answer = doctor.examine(tmp_path)
    assert (answer["gds_mode"], answer["gds_reason"]) == ("host", "no NVIDIA driver")
