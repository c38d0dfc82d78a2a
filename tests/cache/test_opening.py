"""`tierkv.open` refuses what cannot be when it is called, in one line, not later."""

from __future__ import annotations

import math
from typing import Any

import pytest

import tierkv
from tierkv import Group, GroupKind, Layout
from tierkv.errors import ConfigError

LAYOUT = Layout((Group(name="a", kind=GroupKind.FULL, block_tokens=4, block_bytes=4096),))
GOOD: dict[str, Any] = {"url": "", "layout": LAYOUT, "namespace": "m@1", "pinned": "1MiB"}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("url", None),
        ("url", b"nvme:///tmp/kv"),
        ("layout", None),
        ("layout", 3),
        ("namespace", None),
        ("namespace", b"m@1"),
        ("rank", -1),
        ("rank", "0"),
        ("rank", True),
        ("data_parallel_rank", -1),
        ("data_parallel_rank", 0.0),
        *((name, bad) for name in ("read_timeout_s", "write_timeout_s") for bad in (0, -1.0, "10")),
        ("read_timeout_s", math.nan),
        ("read_timeout_s", math.inf),
        ("write_timeout_s", None),
    ],
)
def test_a_bad_argument_is_named_with_what_to_write(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*; write ") as caught:
        tierkv.open(**GOOD | {name: bad})
    assert "\n" not in str(caught.value)


def test_whole_seconds_are_seconds() -> None:
    tierkv.open(**GOOD | {"read_timeout_s": 1, "write_timeout_s": 1})
