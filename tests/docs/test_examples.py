"""Every fenced Python example of README and docs runs, page by page, and prints what the page says.

The examples of a page are one program, in order. A fence `output` right after an example holds what it prints; where
the example is meant to raise, the output ends with the error as Python shows it, ``Name: message``.
"""

import contextlib
import io
import os
from pathlib import Path

import pytest

from blockhooks.recipes import RECIPES
from tests.docs.pages import PAGES, Fence, fences, name

WITH_EXAMPLES = [page for page in PAGES if any(f.language == "python" for f in fences(page))]


@pytest.fixture(autouse=True)
def _recipes_put_back():
    """A page shows how to extend the table of recipes, which is the same for all tests."""
    before = dict(RECIPES)
    yield
    RECIPES.clear()
    RECIPES.update(before)


def run(example: Fence, page: Path, names: dict[str, object], may_raise: bool) -> str:
    """Run an example and return what it printed, with the error that ended it, if one was expected."""
    # Empty lines in front give tracebacks the line numbers of the page.
    code = compile("\n" * (example.line - 1) + example.text, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, names)
        except Exception as error:
            if not may_raise:
                raise
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name)
def test_examples_run_and_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": f"example_{page.stem.replace('-', '_')}"}
    parts = list(fences(page))
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if part.language != "python":
            continue
        expected = after if after is not None and after.language == "output" else None
        printed = run(part, page, names, may_raise=expected is not None)
        if expected is not None:
            where = f"{name(page)}:{expected.line}"
            assert printed.rstrip() == expected.text.rstrip(), f"{where} prints something else"


def test_an_output_fence_follows_an_example():
    for page in PAGES:
        before = ""
        for part in fences(page):
            assert part.language != "output" or before == "python", f"{name(page)}:{part.line}"
            before = part.language


def test_fences_name_a_known_language():
    known = {"python", "output", "sh", "text", "toml", "", "json"}
    for page in PAGES:
        for part in fences(page):
            assert part.language in known, f"{name(page)}:{part.line}: {part.language!r}"


def test_the_runner_notices_a_failing_example():
    page = PAGES[0]
    with pytest.raises(ZeroDivisionError, match="division"):
        run(Fence("python", "1 / 0", 7), page, {}, may_raise=False)
    assert run(Fence("python", "print(1); 1 / 0", 7), page, {}, may_raise=True).startswith(
        f"1{os.linesep}ZeroDivisionError: "
    )
