"""A README command that no test runs is a defect."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierkv.cli import app, engine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_the_program_runs_as_a_script_and_says_what_was_saved(tmp_path: Path) -> None:
    (source,) = blocks("python")
    assert "nvme:///tmp/kv?" in source
    script = tmp_path / "example.py"
    script.write_text(source.replace("/tmp/kv", str(tmp_path / "kv")))
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "96 of 100 tokens need not be computed\n"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)\b", README))
    assert targets
    assert targets - set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)) == set()


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`(tierkv [a-z][^`]*)`", README))))
def test_every_command_in_the_text_is_understood(line: str) -> None:
    _, command, *rest = shlex.split(line)
    options = [word for word in rest if word.startswith("--")]
    help_text = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"])
    assert help_text.exit_code == 0
    assert [option for option in options if option not in help_text.stdout] == []


def test_the_line_for_vllm_is_the_one_that_doctor_writes() -> None:
    (line,) = [text for text in blocks("bash") if text.startswith("vllm serve")]
    text = shlex.split(line)[-1]
    extra = json.loads(text)["kv_connector_extra_config"]
    assert json.loads(text) == engine.transfer_config(extra["url"], extra["pinned"])
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_the_supported_versions_are_those_of_the_doctor() -> None:
    assert f"`{engine.SUPPORTED_RANGE}`" in README


def test_every_link_inside_the_project_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
