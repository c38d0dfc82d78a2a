"""`tierkv verify` works on any backend that offers it, and knows none by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierkv.backend import CorruptBlock, Skipped, Verification
from tierkv.blocks import Outcome
from tierkv.cli import app
from tierkv.errors import StoreUnusableError
from tierkv.registry import make_backend
from tierkv.testing import Key, make_blocks, make_context, save

BAD = CorruptBlock(
    namespace="model", group=1, hash_hex="ab" * 32, where="000001.seg+4096", reason="checksum"
)


class Verifiable:
    scheme = "verifiable"

    def __init__(self, outcome: Verification | StoreUnusableError) -> None:
        self.outcome = outcome

    async def verify(self, progress: Callable[[int, int], None]) -> Verification:
        print("a library that chats on stdout")
        progress(0, 100)
        progress(100, 100)
        if isinstance(self.outcome, StoreUnusableError):
            raise self.outcome
        return self.outcome


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def call(backend: object, *flags: str) -> Any:
        monkeypatch.setattr("tierkv.registry.make_backend", lambda url: backend)
        return CliRunner().invoke(app, ["verify", "verifiable:///x", *flags])

    return call


def test_a_sound_store_exits_with_0(verify: Callable[..., Any]) -> None:
    result = verify(Verifiable(Verification(blocks=3, payload_bytes=5000)), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "ok": True,
        "url": "verifiable:///x",
        "blocks": 3,
        "bytes": 5000,
        "corrupt": [],
        "skipped": [],
    }


def test_a_corrupt_block_is_listed_and_exits_with_1(verify: Callable[..., Any]) -> None:
    found = Verification(blocks=3, payload_bytes=5000, corrupt=(BAD,))
    result = verify(Verifiable(found), "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    assert answer["corrupt"] == [
        {
            "namespace": "model",
            "group": 1,
            "hash_hex": "ab" * 32,
            "where": "000001.seg+4096",
            "reason": "checksum",
        }
    ]
    assert verify(Verifiable(found)).exit_code == 1


def test_what_was_not_read_is_listed_and_exits_with_1(verify: Callable[..., Any]) -> None:
    part = Skipped(directory="/x/a", reason="in use by pid 7")
    found = Verification(blocks=3, payload_bytes=5000, skipped=(part,))
    result = verify(Verifiable(found), "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    assert answer["skipped"] == [{"directory": "/x/a", "reason": "in use by pid 7"}]
    text = verify(Verifiable(found))
    assert text.exit_code == 1
    assert "NOT READ: /x/a: in use by pid 7" in text.stdout


def test_a_store_that_cannot_be_read_is_one_line_and_exits_with_2(
    verify: Callable[..., Any],
) -> None:
    result = verify(Verifiable(StoreUnusableError("/x is not\na store")))
    assert (result.exit_code, result.stdout.replace("a library that chats on stdout\n", "")) == (
        2,
        "",
    )
    assert result.stderr == "tierkv: /x is not a store\n"


def test_a_backend_that_offers_no_verification_is_told_so(verify: Callable[..., Any]) -> None:
    class Plain:
        scheme = "plain"

    result = verify(Plain(), "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error_type"] == "ConfigError"
    assert "'plain' offers nothing to verify" in result.stderr


STORES = {
    "file": "file://{root}?capacity=64MiB",
    "nvme": "nvme://{root}?capacity=64MiB&segment=1MiB",
}


async def fill(url: str, blocks: dict[Key, bytes]) -> None:
    backend = make_backend(url)
    try:
        await backend.open(make_context((5000, 9000)))
        assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
    finally:
        await backend.close()


def flip_a_byte_of(payload: bytes, root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(payload)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([payload[100] ^ 1]))
            return
    raise AssertionError("the payload lies in no file")


@pytest.mark.parametrize("scheme", sorted(STORES))
def test_a_flipped_byte_in_a_real_store_is_found(scheme: str, tmp_path: Path) -> None:
    url = STORES[scheme].format(root=tmp_path)
    blocks = make_blocks(6, (5000, 9000))
    asyncio.run(fill(url, blocks))

    sound = CliRunner().invoke(app, ["verify", url, "--json"])
    assert sound.exit_code == 0
    answer = json.loads(sound.stdout)
    assert (answer["blocks"], answer["bytes"]) == (6, 3 * 5000 + 3 * 9000)

    (group, block_hash), payload = list(blocks.items())[3]
    flip_a_byte_of(payload, tmp_path)
    broken = CliRunner().invoke(app, ["verify", url, "--json"])
    assert broken.exit_code == 1
    (corrupt,) = json.loads(broken.stdout)["corrupt"]
    assert (corrupt["group"], corrupt["hash_hex"]) == (group, block_hash.hex())
    assert json.loads(broken.stdout)["blocks"] == 6


@pytest.mark.parametrize("scheme", sorted(STORES))
def test_a_store_that_is_not_there_is_one_line(scheme: str, tmp_path: Path) -> None:
    url = STORES[scheme].format(root=tmp_path / "absent")
    result = CliRunner().invoke(app, ["verify", url])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "absent" in result.stderr


@pytest.mark.parametrize("scheme", sorted(STORES))
def test_a_root_with_a_store_of_another_kind_is_no_success(scheme: str, tmp_path: Path) -> None:
    (other,) = set(STORES) - {scheme}
    asyncio.run(fill(STORES[other].format(root=tmp_path), make_blocks(2, (5000, 9000))))
    result = CliRunner().invoke(app, ["verify", STORES[scheme].format(root=tmp_path)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"holds no {scheme} store" in result.stderr


def test_an_unknown_scheme_is_one_line_with_the_nearest_known_name() -> None:
    result = CliRunner().invoke(app, ["verify", "nvmee:///x"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "did you mean 'nvme'?" in result.stderr


@pytest.mark.parametrize("url", ["nvme://[::1", "nvme:///x%00", "nvme:///x#y"])
def test_a_url_that_cannot_be_is_one_line(url: str) -> None:
    result = CliRunner().invoke(app, ["verify", url])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in result.stderr
