"""Every option of `kv_connector_extra_config`: what it means, and what is said of a bad value."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tierkv.connectors.vllm.options import LOAD_PARAM, LoadWhen, Options
from tierkv.connectors.vllm.scheduler import load_when
from tierkv.errors import ConfigError
from tierkv.reach import Policy

ALL: dict[str, tuple[Any, Any]] = {
    "url": ("memory://", "memory://"),
    "pinned": (4097, 2 * 4096),  # whole slots
    "policy": ("end", Policy.parse("end")),
    "min_hit_tokens": (0, 0),
    "load": ("always", LoadWhen.ALWAYS),
    "identity": ("weights-7", "weights-7"),
    "salt": ("team", "team"),
    "open_timeout_s": (1, 1.0),
    "read_timeout_s": (2.5, 2.5),
    "write_timeout_s": (3, 3.0),
    "hang_timeout_s": (4, 4.0),
    "load_timeout_s": (5, 5.0),
    "close_timeout_s": (6, 6.0),
    "io_threads": (1, 1),
    "codec": ("none", "none"),
    "device_checksums": (True, True),
}


def test_every_option_is_taken_at_its_word() -> None:
    assert set(ALL) == {f.name for f in fields(Options)}
    options = Options.parse({name: given for name, (given, _) in ALL.items()})
    assert {name: getattr(options, name) for name in ALL} == {n: v for n, (_, v) in ALL.items()}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"min_hit_tokens": -1}, "min_hit_tokens is -1; write a whole number, or 0 for none"),
        ({"min_hit_tokens": True}, "min_hit_tokens is True; write a whole number, or 0 for none"),
        ({"min_hit_tokens": "64"}, "min_hit_tokens is '64'; write a whole number"),
        ({"io_threads": 0}, "io_threads is 0; write a whole number above 0"),
        ({"io_threads": 2.0}, "io_threads is 2.0; write a whole number above 0"),
        ({"read_timeout_s": "10"}, "read_timeout_s is '10'; write seconds above 0"),
        ({"hang_timeout_s": True}, "hang_timeout_s is True; write seconds above 0"),
        ({"load": "allways"}, "load is 'allways' (did you mean 'always'?); write auto or always"),
        ({"load": "never"}, "load is 'never'"),  # then the connector would only write
        ({"load": None}, "load is None"),
        ({"identity": 7}, "identity is 7; write a string"),
        ({"salt": None}, "salt is None; write a string"),
    ],
)
def test_a_bad_value_is_named_with_what_to_write(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options.parse(given)
    assert says in str(caught.value)
    assert str(caught.value).startswith("kv_connector_extra_config: ")


@pytest.mark.parametrize(
    ("params", "means"),
    [
        (None, LoadWhen.AUTO),
        ({}, LoadWhen.AUTO),
        ({"other": 1}, LoadWhen.AUTO),
        ({LOAD_PARAM: None}, LoadWhen.AUTO),
        ({LOAD_PARAM: "never"}, LoadWhen.NEVER),
        ({LOAD_PARAM: "always"}, LoadWhen.ALWAYS),
        ({LOAD_PARAM: "sometimes"}, LoadWhen.AUTO),
        ({LOAD_PARAM: ["always"]}, LoadWhen.AUTO),  # whatever JSON a client sends
        ({LOAD_PARAM: {}}, LoadWhen.AUTO),
        ({LOAD_PARAM: 1}, LoadWhen.AUTO),
    ],
)
def test_a_request_says_when_and_nonsense_changes_nothing(
    params: dict[str, Any] | None, means: LoadWhen
) -> None:
    assert load_when(params, LoadWhen.AUTO) is means
