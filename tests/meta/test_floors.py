"""A file imports from its own floor and below, built-in hooks never from each other, nothing in a circle."""

from graphlib import TopologicalSorter

import pytest

from tests.meta.source import modules, own_imports

FLOORS = (
    ("errors", "plan", "structure", "survey", "ambient", "report", "costs", "solver", "recipes"),
    (
        "recompute",
        "memory",
        "timeline",
        "saved",
        "rebuild",
        "offloading",
        "measuring",
        "estimating",
        "outside",
    ),
    ("hookspecs", "run", "calls", "planner"),
    ("hooks",),
    ("chain",),
    ("apply", "checkpointing", "lowering", "modules"),
    ("attach", "models", "budget"),
    ("testing", "pytest_plugin", "verify", "integrations"),
    ("cli", "__main__", "demo", "targets"),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def floor(module: str) -> int:
    return FLOOR[module.split(".")[0]]


MODULES = {module: path for module, path in modules().items() if module}  # '' is the public face


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for found in own_imports(MODULES[module]):
        # The public face is everything; only the top floor stands above it.
        height = floor(found.module) if found.module else len(FLOORS) - 2
        where = f"{MODULES[module]}:{found.line} imports {found.module or 'blockhooks'}"
        assert height <= floor(module), f"{where}, a higher floor"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("hooks.")])
def test_a_built_in_hook_imports_no_sibling(module):
    for found in own_imports(MODULES[module]):
        assert found.module.split(".")[0] != "hooks", f"{MODULES[module]}:{found.line}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("hooks.")])
def test_a_built_in_hook_uses_only_public_names(module):
    for found in own_imports(MODULES[module]):
        if found.name is not None:
            there = __import__(f"blockhooks.{found.module}", fromlist=["__all__"])
            where = f"{MODULES[module]}:{found.line}"
            assert found.name in there.__all__, f"{where}: {found.module}.{found.name}"


def test_the_hookspecs_import_nothing_of_their_floor():
    assert list(own_imports(MODULES["hookspecs"])) == []


def test_nothing_is_imported_in_a_circle():
    graph = {
        module: {found.module for found in own_imports(path)} - {module, ""}
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError and names the circle
