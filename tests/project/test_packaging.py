"""What is installed is what pyproject.toml says, and what is shipped is what is meant."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REINSTALL = "the installed metadata is stale; run: .venv/bin/pip install -e . --no-deps"


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return data


def test_installed_entry_points_are_those_of_pyproject(project: dict[str, Any]) -> None:
    written = {("console_scripts", k, v) for k, v in project["scripts"].items()}
    for group, entries in project["entry-points"].items():
        written |= {(group, k, v) for k, v in entries.items()}
    found = {(e.group, e.name, e.value) for e in distribution("tierkv").entry_points}
    assert found == written, REINSTALL


def test_installed_version_is_that_of_pyproject(project: dict[str, Any]) -> None:
    assert distribution("tierkv").version == project["version"], REINSTALL


def test_every_dependency_has_a_pin(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if "==" not in line or "+" in line] == []
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["testing"], *extras["plot"]]
    names = {distribution_name(want).lower() for want in wanted} - {"tierkv"}
    assert names - pinned == set()


def distribution_name(requirement: str) -> str:
    for i, c in enumerate(requirement):
        if not (c.isalnum() or c in "-_."):
            return requirement[:i]
    return requirement


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist, built without the network."""
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=100,
    )
    return target


def wheel_names(dist: Path) -> list[str]:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_both_packages_typed_and_nothing_else(dist: Path) -> None:
    names = wheel_names(dist)
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"tierkv", "tierkv_backends"}
    assert {"tierkv/py.typed", "tierkv_backends/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    code = [n for n in names if n.endswith((".py", "py.typed")) or ".dist-info" in n]
    data = [n for n in names if n.startswith("tierkv/data/") and n.endswith(".json")]
    assert data
    strays = set(names) - {*code, *data}
    assert strays == set()


def test_every_module_of_the_tree_is_in_the_wheel(dist: Path) -> None:
    tree = {str(p.relative_to(ROOT)) for p in (ROOT / "tierkv").rglob("*.py")}
    backends = ROOT / "backends"
    tree |= {str(p.relative_to(backends)) for p in backends.rglob("*.py")}
    assert tree - set(wheel_names(dist)) == set()


def test_the_sdist_holds_what_is_listed_and_no_stray(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = config["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    always = {"pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {name.split("/")[0] for name in names} - always == set(listed)


def test_the_wheel_works_alone(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import tierkv, tierkv_backends.memory as m; print(tierkv.__file__, m.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert all(Path(path).is_relative_to(tmp_path) for path in done.stdout.split())


def test_ci_runs_the_checks_the_tests_and_the_engine() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    steps = [
        li.removeprefix("step ") for li in script.read_text().splitlines() if li[:5] == "step "
    ]
    assert steps == ["make check", "make test", "make test-vllm"]
