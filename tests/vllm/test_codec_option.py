"""The connector's option `codec`."""

from __future__ import annotations

import pytest

from tierkv.connectors.vllm.options import Options
from tierkv.errors import ConfigError


def test_the_connectors_option_is_checked_like_the_others() -> None:
    assert Options.parse({"url": "memory://", "codec": "lz4"}).codec == "lz4"
    assert Options.parse({}).codec == "none"
    where = "kv_connector_extra_config: codec"
    with pytest.raises(ConfigError, match=f"{where} is 'gzip'; write one of: none, lz4"):
        Options.parse({"url": "memory://", "codec": "gzip"})
    with pytest.raises(ConfigError, match=f"{where} is 4; write a string"):
        Options.parse({"url": "memory://", "codec": 4})
    with pytest.raises(ConfigError, match=f"{where} 'lz4' has nothing to compress"):
        Options.parse({"codec": "lz4"})
