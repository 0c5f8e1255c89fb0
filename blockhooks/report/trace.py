"""Chrome traces, which https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from blockhooks.report.figures import PHASES

__all__ = ["chrome_trace"]

PROCESS = 1


def chrome_trace(steps: Iterable[dict[str, Any]], names: dict[str, str]) -> dict[str, Any]:
    """Return the spans of steps in Chrome's JSON format.

    Forward and backward share a track; recompute has its own, so that it stands under the backward that waits for it.

    Args:
        steps: For each step ``number``, ``begin_ms``, ``wall_ms`` and ``spans``, each with ``block``, ``phase``,
            ``begin_ms`` and ``end_ms`` from the step's beginning.
        names: Metadata to show, such as the device and versions.
    """
    return {
        "displayTimeUnit": "ms",
        "otherData": names,
        "traceEvents": [*_tracks(), *(event for step in steps for event in _events(step))],
    }


TRACKS = {"step": 1, "forward": 2, "recompute": 3, "backward": 2}
TITLES = {1: "steps", 2: "forward and backward", 3: "recompute"}


def _tracks() -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "blockhooks"}}
    for track, title in TITLES.items():
        common = {"ph": "M", "pid": PROCESS, "tid": track}
        yield {**common, "name": "thread_name", "args": {"name": title}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": track}}


def _events(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = step["begin_ms"]
    yield _event(
        f"step {step['number']}", "step", start, start + step["wall_ms"], {"step": step["number"]}
    )
    for span in step["spans"]:
        yield _event(
            span["block"],
            span["phase"],
            start + span["begin_ms"],
            start + span["end_ms"],
            {"phase": span["phase"], "step": step["number"]},
        )


def _event(
    name: str, phase: str, begin_ms: float, end_ms: float, args: dict[str, Any]
) -> dict[str, Any]:
    assert phase == "step" or phase in PHASES
    return {
        "ph": "X",
        "cat": phase,
        "name": name,
        "pid": PROCESS,
        "tid": TRACKS[phase],
        # Both ends are rounded alike, so that neighbours and nested spans stay so.
        "ts": round(begin_ms * 1e3, 3),
        "dur": round(end_ms * 1e3, 3) - round(begin_ms * 1e3, 3),
        "args": args,
    }
