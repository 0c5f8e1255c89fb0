"""Read the documentation as data: pages, headings, fenced examples, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Fence:
    """A fenced piece of a page: its language, its text, and the line its text begins at."""

    language: str
    text: str
    line: int


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> Iterator[Fence]:
    """Yield the fenced pieces of a page in order."""
    opened: tuple[str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith("```"):
            body.append(line)
        elif opened is None:
            opened, body = (line[3:].strip(), number + 1), []
        else:
            yield Fence(opened[0], "\n".join(body), opened[1])
            opened = None
    assert opened is None, f"{name(page)}: the fence at line {opened[1] - 1} is not closed"


def prose(page: Path) -> list[str]:
    """Return the lines of a page that are in no fence."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            lines.append(line)
    return lines


def headings(page: Path, level: int) -> list[str]:
    """Return the headings of one level, without their marks of code."""
    mark = "#" * level + " "
    return [line[len(mark) :].replace("`", "") for line in prose(page) if line.startswith(mark)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make."""
    titles = [line.lstrip("#").strip() for line in prose(page) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the links to other places of the project."""
    for line in prose(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if "://" not in target:
                yield target
