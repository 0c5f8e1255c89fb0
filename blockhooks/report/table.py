"""Tables of a profile, as plain text, for rich, and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from blockhooks.costs import format_bytes
from blockhooks.report.figures import PHASES

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "drawn_table",
    "html_table",
    "markdown_table",
    "rich_table",
    "rows",
    "size",
    "text_table",
]

HEADER = (
    "block",
    "plan",
    "forward ms",
    "recompute ms",
    "backward ms",
    "calls",
    "kept",
    "dropped",
    "x",
    "peak",
)
LEFT = 2  # columns of words, the others are numbers


class Row(NamedTuple):
    """A line of the table, as text."""

    cells: tuple[str, ...]
    total: bool = False


def size(nbytes: int | None) -> str:
    """Return a number of bytes as a reader would say it; a dash for None."""
    return "-" if nbytes is None else format_bytes(nbytes)


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    """Yield a line for each block, and one for the step."""
    for block in figures["blocks"]:
        calls = "+".join(str(block["calls"][phase]) for phase in PHASES)
        yield Row((block["name"], block["mode"], *_times(block), calls, *_sizes(block)))
    totals = figures["totals"]
    steps = figures["steps"]
    yield Row(
        (
            f"all, {steps} steps" if steps != 1 else "all, 1 step",
            "",
            *_times(totals),
            "",
            *_sizes(totals),
        ),
        True,
    )


def _times(figures: dict[str, Any]) -> Iterator[str]:
    return (f"{figures['ms'][phase]['p50']:.2f}" for phase in PHASES)


def _sizes(figures: dict[str, Any]) -> Iterator[str]:
    return (size(figures[key]) for key in ("kept_bytes", "dropped_bytes", "x_bytes", "peak_bytes"))


def _caption(figures: dict[str, Any]) -> str:
    ms = figures["totals"]["ms"]
    return (
        f"step {ms['wall']['p50']:.2f} ms (rest {ms['rest']['p50']:.2f} ms) on {figures['device']}; "
        "times are medians over steps, calls are forward+recompute+backward"
    )


def text_table(figures: dict[str, Any]) -> str:
    """Return the table as plain text."""
    lines = [HEADER, *(row.cells for row in rows(figures))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [_line(cells, widths) for cells in lines]
    rule = "-" * len(text[0])
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1], _caption(figures)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    words = [cell.ljust(width) for cell, width in zip(cells[:LEFT], widths, strict=False)]
    numbers = [cell.rjust(width) for cell, width in zip(cells[LEFT:], widths[LEFT:], strict=True)]
    return "  ".join(words + numbers)


def rich_table(figures: dict[str, Any]) -> Table:
    """Return the table for rich, which must be installed."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, caption=_caption(figures), caption_justify="left")
    for i, title in enumerate(HEADER):
        table.add_column(title, justify="left" if i < LEFT else "right", no_wrap=i != 0)
    for row in rows(figures):
        if row.total:
            table.add_section()
        table.add_row(*map(Text, row.cells), style="bold" if row.total else None)
    return table


def drawn_table(figures: dict[str, Any]) -> str:
    """Return the table as text that rich has drawn.

    Raises:
        ModuleNotFoundError: If rich is not installed.
    """
    from rich.console import Console

    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(rich_table(figures))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def markdown_table(figures: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    lines = [HEADER, ["-" * len(title) for title in HEADER], *(row.cells for row in rows(figures))]
    return (
        "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{_caption(figures)}\n"
    )


def html_table(figures: dict[str, Any]) -> str:
    """Return the table as an HTML fragment, for notebooks."""
    head = "".join(f"<th>{escape(title)}</th>" for title in HEADER)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells) + "</tr>"
        for row in rows(figures)
    )
    return (
        f"<table><caption>{escape(_caption(figures))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
