"""Installs the outsider's package of `tests/sample_backend` as a user would, into a folder."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

SAMPLE = pathlib.Path(__file__).parent.parent / "sample_backend"


@pytest.fixture(scope="session")
def installed_sample(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder it is installed in, once per session."""
    source = tmp_path_factory.mktemp("sample-source") / "tierkv-sqlite"
    shutil.copytree(SAMPLE, source)  # a build leaves things beside what it builds
    target = tmp_path_factory.mktemp("sample-installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture
def sample_package(installed_sample: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The same, on sys.path while the test runs, so that no other test sees its scheme."""
    monkeypatch.syspath_prepend(installed_sample)
    return installed_sample
