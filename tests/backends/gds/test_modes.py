"""Which mode is in force: the judgement, the probe without a driver, the probe that hangs."""

from __future__ import annotations

import itertools
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import ConfigError, StoreError
from tierkv.registry import make_backend
from tierkv.testing import load, make_blocks, make_context, save, sizes
from tierkv_backends.gds import probe
from tierkv_backends.gds.modes import Attempt, Mode, Try, judge, next_try

GOOD: dict[str, Any] = {"gds_available": True, "allow_compat": False}


def decided(answers: dict[Try, dict[str, Any]]) -> tuple[Mode, str, list[Try]]:
    tried: list[Try] = []

    def attempt(one: Try) -> Attempt:
        tried.append(one)
        return Attempt(tried=one, **answers[one])

    verdict = probe.decide_sync(attempt)
    return verdict.mode, verdict.reason, tried


def test_the_driver_says_yes_and_the_strict_probe_succeeds() -> None:
    mode, _, tried = decided({Try.STRICT: GOOD})
    assert (mode, tried) == (Mode.GDS, [Try.STRICT])


@pytest.mark.parametrize(
    ("strict", "why"),
    [
        ({**GOOD, "error": "OSError: 5030"}, "5030"),
        ({**GOOD, "gds_available": False}, "not available"),
        ({**GOOD, "allow_compat": True}, "cannot be disallowed"),
    ],
)
def test_anything_less_is_not_gds(strict: dict[str, Any], why: str) -> None:
    mode, reason, tried = decided({Try.STRICT: strict, Try.LOOSE: GOOD})
    assert (mode, tried) == (Mode.CUFILE_COMPAT, [Try.STRICT, Try.LOOSE])
    assert why in reason


def test_where_cufile_moves_nothing_kvikio_bounces() -> None:
    broken = {**GOOD, "error": "cuFileDriverOpen"}
    answers = {Try.STRICT: broken, Try.LOOSE: broken, Try.BOUNCE: {"compat": True}}
    mode, reason, tried = decided(answers)
    assert (mode, tried) == (Mode.COMPAT, [Try.STRICT, Try.LOOSE, Try.BOUNCE])
    assert "cuFileDriverOpen" in reason


def test_kvikio_in_compat_mode_is_not_probed_again() -> None:
    mode, reason, tried = decided({Try.STRICT: {"compat": True}})
    assert (mode, tried) == (Mode.COMPAT, [Try.STRICT])
    assert "no cuFile that works here" in reason


@pytest.mark.parametrize("field", ["no_cuda", "no_kvikio"])
@pytest.mark.parametrize("at", list(Try))
def test_without_cuda_or_kvikio_it_is_the_host(field: str, at: Try) -> None:
    broken: dict[str, Any] = {**GOOD, "error": "x"}
    answers = {one: broken for one in Try} | {at: {field: "the reason"}}
    mode, reason, _ = decided(answers)
    assert (mode, reason) == (Mode.HOST, "the reason")


def test_every_history_ends_and_gds_is_only_what_was_proven() -> None:
    flags = [False, True]
    kinds = [
        dict(compat=c, gds_available=g, allow_compat=a, error="broken" * e)
        for c, g, a, e in itertools.product(flags, repeat=4)
    ]
    for three in itertools.product(kinds, repeat=3):
        attempts: list[Attempt] = []
        while (one := next_try(attempts)) is not None:
            attempts.append(Attempt(tried=one, **three[len(attempts)]))  # type: ignore[arg-type]  # of a dict
        verdict = judge(attempts)
        first, last = attempts[0], attempts[-1]
        proven = first.gds_available and not (first.compat or first.allow_compat or first.error)
        assert (verdict.mode is Mode.GDS) == proven
        assert (verdict.mode is Mode.HOST) == bool(last.error)
        assert verdict.reason


async def test_without_a_driver_it_is_nvme_and_says_why(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_known", {})
    blocks = make_blocks(6, [4096])
    async with opened("gds", tmp_path) as backend:
        await save(backend, blocks)
        assert await load(backend, sizes(blocks)) == blocks
        modes = (await backend.usage()).modes
        assert (modes["mode"], modes["io"]) == ("host", "threads")
        assert modes["reason"] == "libcuda.so.1 was not found: no NVIDIA driver"
        assert backend.device_path == "none"
        with pytest.raises(StoreError, match="no device memory in mode host: libcuda"):
            await backend.register_device(None)
    with pytest.raises(StoreError, match=r"engine=kvikio does not work here: libcuda.*threads"):
        async with opened("nvme", tmp_path, "&engine=kvikio"):
            pass
    with pytest.raises(StoreError, match="mode=gds, but only host works here: libcuda"):
        async with opened("gds", tmp_path, "&mode=gds"):
            pass


def shadowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, *, installed: bool = True
) -> None:
    """A package `kvikio` in front of the real one, in children only."""
    package = tmp_path / "shadow" / "kvikio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(code))
    if not installed:  # importlib.metadata looks into the same path
        site = package.parent / "sitecustomize.py"
        site.write_text(
            "import importlib.metadata as m\n"
            "def version(name, real=m.version):\n"
            "    if name == 'kvikio-cu13':\n"
            "        raise m.PackageNotFoundError(name)\n"
            "    return real(name)\n"
            "m.version = version\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    monkeypatch.setattr(probe, "_known", {})


@pytest.mark.usefixtures("cuda_stub")
async def test_a_probe_that_hangs_ends_at_its_deadline(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadowed(tmp_path, monkeypatch, "import time\nwhile True: time.sleep(60)")
    monkeypatch.setattr(probe, "PROBE_S", 1.5)
    async with opened("gds", tmp_path / "store") as backend:
        modes = (await backend.usage()).modes
        assert (modes["mode"], modes["reason"]) == ("host", "a probe did not answer within 1.5 s")


@pytest.mark.usefixtures("cuda_stub")
async def test_a_probe_that_crashes_is_a_reason(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadowed(tmp_path, monkeypatch, "import os\nos.abort()")
    async with opened("gds", tmp_path / "store") as backend:
        modes = (await backend.usage()).modes
        assert modes["mode"] == "host"
        assert "the probe ended with -6" in modes["reason"]


@pytest.mark.parametrize("url", ["gds://{}?mode=auto", "nvme://{}?engine=kvikio"])
async def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    gone = "raise ModuleNotFoundError('no kvikio')"
    shadowed(tmp_path, monkeypatch, gone, installed=False)
    backend = make_backend(url.format(tmp_path / "store"))
    with pytest.raises(ConfigError, match=r"pip install 'tierkv\[gpu\]'"):
        await backend.open(make_context((4096,)))
    await backend.close()


def test_a_probe_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_known", {})
    probe.find_mode_sync(tmp_path)
    assert list(tmp_path.iterdir()) == []
