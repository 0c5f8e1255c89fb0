"""The public face is what it says it is."""

import importlib
import inspect
from importlib import metadata

import pytest

import blockhooks
from tests.meta.source import modules

MODULES = [m for m in modules() if m and m != "__main__"]


def test_the_public_names_are_sorted_and_there():
    assert list(blockhooks.__all__) == sorted(blockhooks.__all__)
    for name in blockhooks.__all__:
        assert getattr(blockhooks, name) is not None


def test_what_the_package_shows_is_what_it_exports():
    # "@" begins what pytest's rewriting of assertions adds, since the package has a pytest plugin.
    shown = {name for name in vars(blockhooks) if not name.startswith(("_", "@"))}
    private = shown - set(blockhooks.__all__) - {"annotations"}
    private -= {m.split(".")[0] for m in modules()}
    assert not private, f"imported, but not in __all__: {sorted(private)}"


def test_each_public_thing_has_a_docstring():
    for name in blockhooks.__all__:
        value = getattr(blockhooks, name)
        if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), name


def test_the_version_is_the_installed_one():
    try:
        installed = metadata.version("blockhooks")
    except metadata.PackageNotFoundError:
        pytest.skip("run from the source tree without an installation")
    assert blockhooks.__version__ == installed


@pytest.mark.parametrize("module", MODULES)
def test_each_module_lists_what_it_exports(module):
    try:
        there = importlib.import_module(f"blockhooks.{module}")
    except ModuleNotFoundError as error:
        if not module.startswith("integrations."):
            raise
        pytest.skip(f"needs {error.name}")  # an integration is importable only with its package
    is_folder = hasattr(there, "__path__")  # may have nothing of its own
    for name in getattr(there, "__all__", ()) if is_folder else there.__all__:
        assert hasattr(there, name), f"{module}.__all__ names {name}"
