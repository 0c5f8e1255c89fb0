"""Rules of the house that a reader would otherwise have to watch over."""

import ast
import re

import pytest

from blockhooks import hookspecs
from tests.meta.source import TESTS, modules, tree

ROOT = TESTS.parent
MODULES = modules()
SPECS = [name for name, spec in vars(hookspecs).items() if hasattr(spec, "blockhooks_spec")]


def test_there_are_five_hooks():
    assert len(SPECS) == 5


@pytest.mark.parametrize("hook", SPECS)
def test_each_hook_has_a_test_of_its_name(hook):
    pattern = re.compile(rf"def test_hook_{hook}\b")
    assert any(pattern.search(path.read_text()) for path in TESTS.rglob("test_*.py"))


def test_the_changelog_has_unreleased_changes_in_known_groups():
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased = text.split("## Unreleased\n", 1)[1].split("\n## ", 1)[0]
    groups = re.findall(r"^### (\w+)$", unreleased, re.MULTILINE)
    assert groups
    assert set(groups) <= {"Added", "Changed", "Fixed", "Removed"}
    assert len(groups) == len(set(groups))
    lines = [line for line in unreleased.splitlines() if line and not line.startswith("###")]
    assert lines
    assert all(line.startswith("- ") for line in lines), "a change is one line"


def raised_strings(module: str) -> list[tuple[int, str]]:
    """Return the pieces of text in the ``raise`` statements of a module, with their lines."""
    return [
        (text.lineno, text.value)
        for node in ast.walk(tree(MODULES[module]))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for text in ast.walk(node.exc)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_errors_tell_what_was_expected_rather_than_scold(module):
    for line, text in raised_strings(module):
        for word in ("invalid", "please", "!"):
            assert word not in text.lower(), f"{MODULES[module]}:{line}: {word!r} in {text!r}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_left_for_later(module):
    for number, line in enumerate(MODULES[module].read_text().splitlines(), start=1):
        assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line), f"{MODULES[module]}:{number}"


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("test_*.py")), ids=lambda p: str(p.relative_to(TESTS))
)
def test_expected_errors_are_matched_by_their_words(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "pytest.raises",
            "pytest.warns",
        ):
            assert any(keyword.arg == "match" for keyword in node.keywords), f"{path}:{node.lineno}"
