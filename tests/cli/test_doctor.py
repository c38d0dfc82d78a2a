"""`tierkv doctor` says what is true of this machine, and what to do about it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierkv.cli import app, doctor, engine, machine
from tierkv.errors import ConfigError
from tierkv.urls import TierURL, parse_size

FIELDS = [
    *("ok", "gpu", "libcuda", "kvikio", "gds_mode", "direct_io", "alignment", "io_engine"),
    *("memlock_bytes", "free_bytes", "uvloop", "versions", "problems"),
]


def run(*args: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", *args, "--json"])
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return result.exit_code, answer


def problems(answer: dict[str, Any], *, required: bool) -> str:
    return "\n".join(p["problem"] for p in answer["problems"] if p["required"] is required)


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU where every built-in backend can be imported."""
    monkeypatch.setattr(machine, "cuda_driver", lambda: machine.CudaDriver(loaded=False))
    monkeypatch.setattr(doctor, "_backends", lambda problems: {"nvme": "somewhere:NvmeBackend"})


@pytest.mark.usefixtures("sound")
def test_every_promised_field_is_there(tmp_path: Path) -> None:
    code, answer = run("--dir", str(tmp_path))
    assert [f for f in FIELDS if f not in answer] == []
    assert (code, answer["ok"]) == (0, True)
    assert answer["free_bytes"] > 0
    assert answer["versions"]["tierkv"]
    assert answer["gds_mode"] == "host"


@pytest.mark.usefixtures("sound")
def test_the_table_says_the_same_without_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--dir", str(tmp_path)])
    assert result.exit_code == 0
    assert "direct I/O" in result.stdout
    assert result.stdout.rstrip().endswith("ok")


@pytest.mark.usefixtures("sound")
def test_of_a_directory_that_is_not_there_the_nearest_one_above_is_examined(tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "too"
    code, answer = run("--dir", str(absent))
    assert (code, answer["ok"]) == (0, True)
    assert (answer["dir"], answer["examined_dir"]) == (str(absent), str(tmp_path))
    assert answer["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    table = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["doctor", "--dir", str(absent)])
    assert f"not there yet; examined {tmp_path}" in table.stdout


def test_a_file_in_place_of_the_directory_is_a_required_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        code, answer = run("--dir", str(tmp_path / place))
        assert (code, answer["ok"], answer["free_bytes"]) == (1, False, None)
        assert "file cannot be written: Not a directory" in problems(answer, required=True)


def test_a_built_in_backend_that_is_missing_is_a_required_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.registry.schemes", dict)
    code, answer = run("--dir", str(tmp_path))
    assert (code, answer["backends"]) == (1, {})
    assert "no backend is registered for scheme 'nvme'" in problems(answer, required=True)


@pytest.mark.usefixtures("sound")
def test_a_gpu_without_kvikio_is_named_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine.CudaDriver(loaded=True, gpus=("NVIDIA Some GPU",))
    monkeypatch.setattr(machine, "cuda_driver", lambda: one)
    monkeypatch.setattr(doctor, "_kvikio", lambda: (None, "kvikio is not installed"))
    code, answer = run("--dir", str(tmp_path))
    assert (code, answer["gpu"]) == (0, ["NVIDIA Some GPU"])
    assert (answer["gds_mode"], answer["gds_reason"]) == ("host", "kvikio is not installed")
    assert "pip install 'tierkv[gpu]'" in [p["fix"] for p in answer["problems"]]


@pytest.mark.usefixtures("sound")
def test_a_file_system_without_direct_io_is_a_note_and_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "dio_alignment", lambda path: None)
    code, answer = run("--dir", str(tmp_path))
    assert (code, answer["direct_io"], answer["alignment"]) == (0, False, None)
    assert "states no direct-I/O alignment" in problems(answer, required=False)


@pytest.mark.usefixtures("sound")
def test_a_low_memlock_limit_is_a_note_with_the_setting_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memlock_bytes", lambda: 65536)
    monkeypatch.setattr(machine, "may_lock_anything", lambda: False)
    _, answer = run("--dir", str(tmp_path))
    assert answer["memlock_bytes"] == 65536
    assert any("ulimit -l" in p["fix"] for p in answer["problems"])


@pytest.mark.usefixtures("sound")
def test_a_low_memlock_limit_is_no_matter_for_a_process_that_it_does_not_bind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memlock_bytes", lambda: 65536)
    monkeypatch.setattr(machine, "may_lock_anything", lambda: True)
    _, answer = run("--dir", str(tmp_path))
    assert not any("ulimit -l" in p["fix"] for p in answer["problems"])


def test_the_probe_believes_a_real_write_and_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, nbytes: int) -> bool:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(machine, "dio_alignment", lambda path: 512)
    monkeypatch.setattr(machine, "_write_and_read_back", refuse)
    found = machine.direct_io(tmp_path)
    assert found == machine.DirectIO(
        works=False, alignment=512, reason="O_DIRECT was refused: Invalid argument"
    )
    assert os.listdir(tmp_path) == []


def test_the_probe_does_not_take_other_bytes_for_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "dio_alignment", lambda path: 512)
    monkeypatch.setattr(machine, "_write_and_read_back", lambda path, nbytes: False)
    assert not machine.direct_io(tmp_path).works


def test_a_full_disk_is_not_taken_for_a_refusal_of_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, nbytes: int) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine, "dio_alignment", lambda path: 512)
    monkeypatch.setattr(machine, "_write_and_read_back", full)
    with pytest.raises(OSError, match="No space left"):
        machine.direct_io(tmp_path)


def test_the_probe_really_writes_where_the_file_system_states_an_alignment(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    alignment = machine.dio_alignment(file)
    found = machine.direct_io(tmp_path)
    assert found.works is bool(alignment)
    assert found.alignment == (alignment or 0)


def test_tmpfs_takes_the_flag_and_is_reported_as_buffered() -> None:
    shm = Path("/dev/shm")
    if not (shm.is_dir() and os.access(shm, os.W_OK)):
        pytest.skip("no writable tmpfs here")
    found = machine.direct_io(shm)
    assert (found.works, found.alignment) == (False, 0)
    assert [p.name for p in shm.glob(".tierkv-probe-*")] == []


def test_a_page_satisfies_the_alignment_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert mmap.PAGESIZE % (machine.dio_alignment(file) or 1) == 0


@pytest.mark.usefixtures("sound")
def test_vllm_gets_one_argument_that_a_shell_takes_apart_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a dir with 'quotes' & spaces"
    place.mkdir()
    monkeypatch.setattr(machine, "free_bytes", lambda directory: 101 << 30)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 16 << 30)
    _, answer = run("--dir", str(place), "--vllm")
    option, text = shlex.split(answer["vllm"]["argument"])
    config = json.loads(text)
    assert option == "--kv-transfer-config"
    assert config == answer["vllm"]["kv_transfer_config"]
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    url = TierURL.parse(extra["url"])
    assert (url.scheme, url.path) == ("nvme", str(place))
    assert parse_size(dict(url.options)["capacity"], "capacity") == 50 << 30
    assert parse_size(extra["pinned"], "pinned") == 4 << 30


@pytest.mark.usefixtures("sound")
def test_the_argument_for_vllm_is_one_line_on_a_narrow_terminal(tmp_path: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "40"})
    result = runner.invoke(app, ["doctor", "--vllm", "--dir", str(tmp_path)])
    lines = [li for li in result.stdout.splitlines() if li.startswith("--kv-transfer-config")]
    assert len(lines) == 1
    assert json.loads(shlex.split(lines[0])[1])["kv_role"] == "kv_both"


@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", (0, True)),
        ("0.32.3+cpu", (0, True)),
        ("0.31.9", (1, False)),
        ("0.33.0rc1", (1, False)),
    ],
)
def test_an_engine_outside_the_supported_range_is_a_required_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, expected: tuple[int, bool]
) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: version if name == "vllm" else "1.0")
    code, answer = run("--dir", str(tmp_path), "--vllm")
    assert (code, answer["vllm"]["supported"]) == expected
    assert (version in problems(answer, required=True)) is not expected[1]


@pytest.mark.usefixtures("sound")
def test_an_absent_engine_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: None)
    code, answer = run("--dir", str(tmp_path), "--vllm")
    assert (code, answer["vllm"]["installed"], answer["vllm"]["supported"]) == (0, None, None)
    assert engine.SUPPORTED_RANGE in answer["vllm"]["note"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(3 << 30, "3GiB"), ((3 << 30) + 5, "3GiB"), (200 << 20, "200MiB"), (9, "1MiB")],
)
def test_sizes_are_rounded_down_to_what_a_url_can_say(nbytes: int, text: str) -> None:
    assert engine.size_text(nbytes) == text


@pytest.mark.parametrize("version", ["0.31.9", "0.32.0", "0.32.7+cpu", "0.33.0", "1.0", "unknown"])
def test_the_doctor_and_the_connector_agree_on_versions(version: str) -> None:
    # By path: the package around it imports the engine, which is not here.
    path = Path(machine.__file__).parents[1] / "connectors" / "vllm" / "version.py"
    check_version = runpy.run_path(str(path))["check_version"]
    try:
        check_version(version)
    except ConfigError as exc:
        assert not engine.supported(version)
        assert f"vllm{engine.SUPPORTED_RANGE}" in str(exc)
    else:
        assert engine.supported(version)
