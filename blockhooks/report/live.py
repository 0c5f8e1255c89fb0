"""The heat strip: blocks in a line while training, with their times and bytes."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from blockhooks.errors import import_extra
from blockhooks.report.figures import BlockStep, StepFigures
from blockhooks.report.table import size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["Strip"]

INTERVAL_NS: Final = 250_000_000
HEIGHTS: Final = " ▁▂▃▄▅▆▇█"


class Strip:
    """Shows the last step's blocks in a terminal, refreshed at most four times a second.

    A bar is as high as the block's share of the largest, so nothing depends on telling colours apart.

    Args:
        console: Where to show it; by default standard error, so that standard output stays as it was.

    Raises:
        MissingExtraError: If rich is not installed.
    """

    def __init__(self, console: Console | None = None) -> None:
        purpose = "Profile(live=True)"
        self._text = import_extra("rich.text", "cli", purpose).Text
        live = import_extra("rich.live", "cli", purpose).Live
        console = console or import_extra("rich.console", "cli", purpose).Console(stderr=True)
        self._live: Any = live(
            console=console,
            auto_refresh=False,
            # What is printed meanwhile goes above the strip on a terminal, and where it went anywhere else.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._next_ns = 0

    def due(self) -> bool:
        """Whether it is time to refresh."""
        return time.perf_counter_ns() >= self._next_ns

    def show(self, step: StepFigures) -> None:
        """Show a step."""
        self._next_ns = time.perf_counter_ns() + INTERVAL_NS
        if not self._live.is_started:
            self._live.start()
            atexit.register(self.close)  # or the cursor stays hidden
        self._live.update(self.render(step), refresh=True)

    def close(self) -> None:
        """Leave the last picture as it is, and give the terminal back."""
        self._live.stop()

    def render(self, step: StepFigures) -> Text:
        """Draw a step."""
        blocks = list(step.blocks.values())
        times = [sum(block.ms) for block in blocks]
        kept = [block.kept_bytes + block.x_bytes for block in blocks]
        slowest = blocks[times.index(max(times))]
        text: Text = self._text(f"step {step.number}: {step.wall_ms:.1f} ms\n", no_wrap=True)
        self._line(
            text, "time", times, f"{max(times):.1f} ms, {slowest.name}: {_phases(slowest)}\n"
        )
        self._line(text, "kept", kept, f"{size(sum(kept))} in all")
        return text

    def _line(self, text: Text, title: str, values: Sequence[float], words: str) -> None:
        top = max(values) or 1
        text.append(f"{title} ")
        for value in values:
            share = value / top
            text.append(HEIGHTS[round(share * (len(HEIGHTS) - 1))], style=_heat(share))
        text.append(f" {words}")


def _phases(block: BlockStep) -> str:
    forward, recompute, backward = block.ms
    return f"forward {forward:.1f}, recompute {recompute:.1f}, backward {backward:.1f} ms"


def _heat(share: float) -> str:
    """Return a colour from blue to yellow: told apart also without red and green."""
    red, green, blue = (
        round(low + share * (high - low)) for low, high in ((40, 250), (90, 200), (180, 40))
    )
    return f"rgb({red},{green},{blue})"
