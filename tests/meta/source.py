"""The package's source files, parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import blockhooks

PACKAGE = Path(blockhooks.__file__).parent
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Import:
    """A name imported from a module of the package, or the module itself (name is None)."""

    module: str
    name: str | None
    line: int


def modules() -> dict[str, Path]:
    """Return the modules of the package by dotted name below ``blockhooks``; the package itself is ''."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what is executed at some time: everything but what is there for type checkers alone."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child):
            yield from executed(child)


def own_imports(path: Path) -> Iterator[Import]:
    """Yield what a file imports from the package, at its top or inside functions."""
    known = modules()
    for node in executed(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "blockhooks":
                    yield Import(alias.name.partition(".")[2], None, node.lineno)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "blockhooks":
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = (node.module or "").partition(".")[2]
            for alias in node.names:
                below = f"{module}.{alias.name}".lstrip(".")
                is_module = below in known
                yield Import(
                    below if is_module else module, None if is_module else alias.name, node.lineno
                )
