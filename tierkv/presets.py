"""Layouts of well-known models, as files in `tierkv/data`; each file says where it comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from tierkv.errors import ConfigError
from tierkv.layout import Layout
from tierkv.urls import nearest


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's layout with its origin.

    source: the configuration it was derived from and the formula, in words.
    """

    name: str
    source: str
    layout: Layout


def preset_names() -> tuple[str, ...]:
    """Every name that `load_preset` knows, sorted."""
    files = resources.files("tierkv").joinpath("data").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def preset(name: str) -> Preset:
    """The preset called `name`; `ConfigError` with the nearest name otherwise."""
    names = preset_names()
    if name not in names:
        raise ConfigError(
            f"no preset is called {name!r}{nearest(name, names)}; presets: {', '.join(names)} "
            "(or give a layout file)"
        )
    text = resources.files("tierkv").joinpath("data", f"{name}.json").read_text()
    data = json.loads(text)
    return Preset(name, data["source"], Layout.from_dict(data))


def load_preset(name: str) -> Layout:
    """The layout of the preset called `name`; `ConfigError` with the nearest name otherwise."""
    return preset(name).layout
