"""Tier URLs: what cannot be meant is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.errors import ConfigError
from tierkv.urls import TierURL


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/mnt/kv", "has no scheme"),
        ("nvme://[::1", "write it like nvme:///mnt/kv"),
        ("nvme:///mnt/kv#capacity=1GiB", "what follows # would be ignored"),
        ("nvme:///mnt/kv?capacity=1GiB#1", "what follows # would be ignored"),
        ("nvme:///mnt/\0kv", "NUL byte"),
        ("nvme:///mnt/%00kv", "NUL byte"),
        ("nvme:///mnt/kv?a=1&a=2", "written twice"),
        (b"nvme:///mnt/kv", "of type bytes"),
        (None, "of type NoneType"),
    ],
)
def test_what_is_no_tier_url_is_refused_in_one_line(text: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TierURL.parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hash_in_a_path_can_be_written() -> None:
    assert TierURL.parse("nvme:///mnt/kv%231").path == "/mnt/kv#1"
