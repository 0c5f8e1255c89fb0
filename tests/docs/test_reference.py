"""The reference pages name exactly what the package has."""

import inspect

import pytest

import blockhooks
from blockhooks import errors, hookspecs
from tests.docs.pages import PAGES, ROOT, anchors, headings, links, name

SPECS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "blockhooks_spec")}
HOOKS_PAGE = ROOT / "docs/reference/hooks.md"
API_PAGE = ROOT / "docs/reference/api.md"
ERRORS_PAGE = ROOT / "docs/reference/errors.md"


def signature(name: str) -> str:
    return f"{name}({', '.join(inspect.signature(SPECS[name]).parameters)})"


def section(text: str, heading: str) -> str:
    """Return what stands below a heading of level 2."""
    return text.split(f"## `{heading}`\n", 1)[1].split("\n## ", 1)[0]


def test_each_hook_has_a_heading_with_its_exact_signature():
    assert headings(HOOKS_PAGE, 2)[: len(SPECS)] == [signature(name) for name in SPECS]


@pytest.mark.parametrize("name", SPECS)
def test_the_hook_page_tells_side_and_result_as_the_hookspec_does(name):
    page = section(HOOKS_PAGE.read_text(), signature(name))
    doc = inspect.getdoc(SPECS[name])
    for word in ("Side", "Result"):
        told = doc.split(f"{word}: ", 1)[1].split(".", 1)[0].split(";", 1)[0].split(":", 1)[0]
        assert f"**{word}:** {told}" in page, f"{name}: {word}: {told}"
    assert "```python" in page


def test_the_api_page_has_a_heading_for_each_public_name():
    documented = {heading.split("(")[0] for heading in headings(API_PAGE, 3)}
    assert documented == set(blockhooks.__all__)


@pytest.mark.parametrize("heading", [h for h in headings(API_PAGE, 3) if "(" in h])
def test_signatures_on_the_api_page_are_the_real_ones(heading):
    name = heading.split("(")[0]
    real = inspect.signature(getattr(blockhooks, name))
    bare = [p.replace(annotation=p.empty) for p in real.parameters.values()]
    assert heading == name + str(inspect.Signature(bare))


def test_the_errors_page_has_a_heading_for_each_error():
    named = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert "BlockhooksError" in named
    assert set(headings(ERRORS_PAGE, 2)) >= named


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name(page)}: {target}"
        assert not anchor or anchor in anchors(there), f"{name(page)}: {target}"


def test_each_page_is_reached_from_the_index():
    index = ROOT / "docs/index.md"
    reached = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    missing = {page for page in PAGES if page not in (index, ROOT / "README.md")} - reached
    assert not missing, sorted(map(name, missing))
