"""`bench.codec` measures what it says, in one JSON object; how fast is for people to look at."""

from __future__ import annotations

import json
import sys

import pytest

from bench import codec


def test_every_kind_and_size_has_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.codec", "--mib", "2", "--rounds", "1", "--json"])
    codec.main()
    report = json.loads(capsys.readouterr().out)
    rows = {(r["kind"], r["block_bytes"]): r for r in report["codec"]}
    assert set(rows) == {(kind, n) for kind in codec.KINDS for n in codec.BLOCK_BYTES}
    for (kind, _), row in rows.items():
        assert 0 < row["ratio"] <= 1
        assert (row["codec"] == "raw") == (row["ratio"] == 1)
        assert row["encode_cpu_s_per_gb"] > 0
        assert row["decode_cpu_s_per_gb"] > 0
        assert (kind != "noise") or row["codec"] == "raw"
        assert (kind != "zeros") or row["ratio"] < 0.01
        assert ("half" not in kind) or row["ratio"] < 0.6
    for row in report["checksums"]:
        assert {"xxh3", "numpy", "torch", "torch_whole", "memcpy"} <= set(row["gb_per_s"])
        assert all(rate > 0 for rate in row["gb_per_s"].values())


def test_the_table_has_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.codec", "--mib", "1", "--rounds", "1"])
    monkeypatch.setattr(codec, "BLOCK_BYTES", (64 << 10,))
    codec.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  64 KiB") for line in lines) == len(codec.KINDS) + 1
