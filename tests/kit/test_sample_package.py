"""An outsider can: a package that nothing in tierkv knows is found by its scheme and passes."""

from __future__ import annotations

import importlib
import pathlib
import sys

import pytest

from tierkv import registry
from tierkv.errors import BackendNotFoundError, ConfigError
from tierkv.testing import BackendContract


@pytest.mark.usefixtures("sample_package")
class TestSqliteBackend(BackendContract):
    def url(self, directory: pathlib.Path) -> str:
        return f"sqlite://{directory}"


def test_the_registry_finds_the_outsider_by_its_scheme(sample_package: pathlib.Path) -> None:
    found = registry.backend_class("sqlite")
    home = sys.modules[found.__module__].__file__
    assert home is not None
    assert pathlib.Path(home).is_relative_to(sample_package)
    assert "sqlite" in registry.schemes()


@pytest.mark.usefixtures("sample_package")
def test_a_misspelled_scheme_names_the_outsider_and_its_options_are_checked() -> None:
    with pytest.raises(BackendNotFoundError, match="did you mean 'sqlite'"):
        registry.make_backend("sqlit:///x")
    with pytest.raises(ConfigError, match="unknown option 'capacity'; sqlite knows: none"):
        registry.make_backend("sqlite:///x?capacity=1GiB")


def test_nothing_in_tierkv_names_the_outsider() -> None:
    package = pathlib.Path(importlib.import_module("tierkv").__path__[0])
    backends = pathlib.Path(importlib.import_module("tierkv_backends").__path__[0])
    sources = [*package.rglob("*.py"), *backends.rglob("*.py")]
    assert not [path for path in sources if "tierkv_sqlite" in path.read_text()]
