"""The charts of a page, made with plotly.

Phases and modes are told apart by place, pattern and lightness as well as by colour; the colours are those of Okabe and
Ito, which people who cannot tell red from green can tell apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from blockhooks.costs import format_bytes
from blockhooks.errors import import_extra
from blockhooks.report.figures import PHASES

__all__ = ["Chart", "charts"]

COLOURS: Final = {
    "forward": "#0072B2",
    "recompute": "#E69F00",
    "backward": "#009E73",
    "rest": "#999999",
    "kept": "#56B4E9",
    "dropped": "#D55E00",
    "x": "#999999",
}
PATTERNS: Final = {"recompute": "/", "backward": "x", "rest": ".", "dropped": "\\", "x": "."}
ROW: Final = 26  # pixels of a block's bar
MIB: Final = 1 << 20


class Chart(NamedTuple):
    """A chart and what it says in words.

    Attributes:
        title: Its heading.
        words: A sentence for those who do not see it.
        json: The figure, as plotly's JSON.
    """

    title: str
    words: str
    json: str


def charts(figures: dict[str, Any]) -> Iterator[Chart]:
    """Yield the charts of one run; none if no step was recorded."""
    if not figures["blocks"]:
        return
    if figures["memory"] is not None:
        yield _memory(figures)
    yield _times(figures)
    yield _bytes(figures)


def _go() -> Any:
    return import_extra("plotly.graph_objects", "report", "a page of a profile")


# ------------------------------------------------------------------------------------------------- live bytes over time


class Stretch(NamedTuple):
    """A stretch of time with the innermost span that was open."""

    begin: float
    end: float
    span: dict[str, Any] | None


def stretches(spans: Sequence[dict[str, Any]], until: float) -> Iterator[Stretch]:
    """Divide the time from 0 on by the innermost open span.

    Args:
        spans: Nested spans, with ``begin_ms``, ``end_ms`` and ``depth``.
        until: The end, in ms.
    """
    marks = [(span["end_ms"], 0, span) for span in spans]
    marks += [(span["begin_ms"], 1, span) for span in spans]
    begin = 0.0
    around: list[dict[str, Any]] = []
    for at, begins, span in sorted(marks, key=itemgetter(0, 1)):
        if at > begin:
            yield Stretch(begin, at, around[-1] if around else None)
            begin = at
        if begins:
            around.append(span)
        else:
            around.remove(span)
    if until > begin:
        yield Stretch(begin, until, None)


def _memory(figures: dict[str, Any]) -> Chart:
    memory = figures["memory"]
    found = list(stretches(memory["spans"], memory["wall_ms"]))
    subplots = import_extra("plotly.subplots", "report", "a page of a profile")
    figure = subplots.make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.04
    )
    times = [at for at, _ in memory["live"]]
    begins = [stretch.begin for stretch in found]
    figure.add_trace(
        _go().Scatter(
            x=times,
            y=[live / MIB for _, live in memory["live"]],
            customdata=[
                [_at(found[bisect_right(begins, at) - 1]), format_bytes(live)]
                for at, live in memory["live"]
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} at %{x:.2f} ms<extra></extra>",
            line={"shape": "hv", "width": 1.5, "color": COLOURS["kept"]},
            fill="tozeroy",
            showlegend=False,
        ),
        row=1,
        col=1,
    )
    for phase in PHASES:
        spans = [span for span in memory["spans"] if span["phase"] == phase]
        figure.add_trace(_lane(phase, spans), row=2, col=1)
    figure.update_layout(
        shapes=[_shade(band) for band in _bands(found)], barmode="overlay", height=420
    )
    figure.update_yaxes(title="MiB", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title="ms", row=2, col=1)
    words = (
        f"Live bytes over one step of {memory['wall_ms']:.1f} ms, at most {format_bytes(memory['peak_bytes'])}; "
        "below it, when blocks were in forward, recompute and backward."
    )
    return Chart("Live memory over a step", words, figure.to_json())


def _at(stretch: Stretch) -> str:
    span = stretch.span
    return "outside of the blocks" if span is None else f"{span['block']}, {span['phase']}"


def _lane(phase: str, spans: Sequence[dict[str, Any]]) -> Any:
    return _go().Bar(
        orientation="h",
        base=[span["begin_ms"] for span in spans],
        x=[span["end_ms"] - span["begin_ms"] for span in spans],
        y=[phase] * len(spans),
        customdata=[span["block"] for span in spans],
        hovertemplate=f"%{{customdata}}, {phase}<br>%{{x:.3f}} ms<extra></extra>",
        marker=_marker(phase),
        name=phase,
        showlegend=False,
    )


def _bands(found: Sequence[Stretch]) -> Iterator[Stretch]:
    """Yield the stretches of blocks, those of one phase that follow each other as one."""
    band: Stretch | None = None
    for stretch in found:
        if stretch.span is None:
            continue
        if band is not None and band.span is not None:
            if band.end == stretch.begin and band.span["phase"] == stretch.span["phase"]:
                band = band._replace(end=stretch.end)
                continue
            yield band
        band = stretch
    if band is not None:
        yield band


def _shade(band: Stretch) -> dict[str, Any]:
    assert band.span is not None
    return {
        "type": "rect",
        "layer": "below",
        "xref": "x",
        "yref": "y domain",
        "x0": band.begin,
        "x1": band.end,
        "y0": 0,
        "y1": 1,
        "line": {"width": 0},
        "fillcolor": COLOURS[band.span["phase"]],
        "opacity": 0.18,
    }


# ------------------------------------------------------------------------------------------------ a bar for each block


def _times(figures: dict[str, Any]) -> Chart:
    bars = {phase: [block["ms"][phase]["mean"] for block in figures["blocks"]] for phase in PHASES}
    slowest = max(figures["blocks"], key=lambda block: sum(block["ms"][p]["mean"] for p in PHASES))
    return Chart(
        "Time of each block",
        f"Milliseconds of forward, recompute and backward of each block; {slowest['name']} took longest.",
        _bars(figures, bars, "ms per step", "%{x:.3f} ms"),
    )


def _bytes(figures: dict[str, Any]) -> Chart:
    keys = {"kept": "kept_bytes", "dropped": "dropped_bytes", "x": "x_bytes"}
    bars = {name: [block[key] / MIB for block in figures["blocks"]] for name, key in keys.items()}
    totals = figures["totals"]
    return Chart(
        "What autograd saved for each block",
        f"Kept in all {format_bytes(totals['kept_bytes'])}, dropped {format_bytes(totals['dropped_bytes'])}, "
        f"inputs kept {format_bytes(totals['x_bytes'])}.",
        _bars(figures, bars, "MiB", "%{x:.3f} MiB"),
    )


def _bars(
    figures: dict[str, Any], bars: Mapping[str, Sequence[float]], axis: str, value: str
) -> str:
    go = _go()
    names = [block["name"] for block in figures["blocks"]]
    figure = go.Figure(
        [
            go.Bar(
                orientation="h",
                x=values,
                y=names,
                name=name,
                marker=_marker(name),
                hovertemplate=f"%{{y}}<br>{name} {value}<extra></extra>",
            )
            for name, values in bars.items()
        ]
    )
    figure.update_layout(barmode="stack", height=ROW * len(names) + 110)
    figure.update_yaxes(autorange="reversed", type="category", dtick=1)
    figure.update_xaxes(title=axis)
    return str(figure.to_json())


def _marker(name: str) -> dict[str, Any]:
    pattern = {"shape": PATTERNS.get(name, ""), "fillmode": "overlay", "size": 6, "solidity": 0.3}
    return {
        "color": COLOURS[name],
        "pattern": pattern,
        "line": {"width": 1, "color": "rgba(255,255,255,0.6)"},
    }


# ------------------------------------------------------------------------------------------------------------- all runs


def runs_chart(runs: Mapping[str, dict[str, Any]]) -> Chart:
    """Return the chart of what the steps of several runs consist of."""
    go = _go()
    parts = (*PHASES, "rest")
    figure = go.Figure(
        [
            go.Bar(
                orientation="h",
                x=[figures["totals"]["ms"][part]["mean"] for figures in runs.values()],
                y=list(runs),
                name=part,
                marker=_marker(part),
                hovertemplate=f"%{{y}}<br>{part} %{{x:.3f}} ms<extra></extra>",
            )
            for part in parts
        ]
    )
    figure.update_layout(barmode="stack", height=40 * len(runs) + 120)
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(title="ms per step")
    words = ", ".join(
        f"{name}: {f['totals']['ms']['wall']['mean']:.1f} ms" for name, f in runs.items()
    )
    return Chart(
        "What a step consists of", f"Milliseconds of a step. {words}.", str(figure.to_json())
    )


def curve_chart(pareto: Mapping[str, Any], today: Mapping[str, Any] | None) -> Chart:
    """Return the chart of time against memory.

    Args:
        pareto: The best plans in ``"points"`` and others in ``"heuristics"``, each with its ``name`` and ``plan``.
        today: The plan in use, to be marked.
    """
    best = pareto["points"]
    plans = {
        "best plans": (
            best,
            {"mode": "lines+markers", "line": {"shape": "hv", "color": COLOURS["forward"]}},
        ),
        "plans by rule": (
            pareto["heuristics"],
            {
                "mode": "markers",
                "marker": {"symbol": "diamond-open", "size": 9, "color": COLOURS["rest"]},
            },
        ),
        "this plan": (
            [] if today is None else [{"name": "this plan", "plan": today}],
            {
                "mode": "markers",
                "marker": {"symbol": "star", "size": 16, "color": COLOURS["dropped"]},
            },
        ),
    }
    figure = _go().Figure(
        [_points(name, points, look) for name, (points, look) in plans.items() if points]
    )
    figure.update_layout(height=340)
    figure.update_xaxes(title="peak, % of the plain loop's", rangemode="tozero")
    figure.update_yaxes(title="time of a step, plain = 1")
    words = (
        f"Predicted time against peak for {len(best)} plans, from {format_bytes(best[0]['plan']['peak'])} "
        f"to {format_bytes(best[-1]['plan']['peak'])}."
    )
    return Chart("Time against memory", words, str(figure.to_json()))


def _points(name: str, points: Sequence[Mapping[str, Any]], look: dict[str, Any]) -> Any:
    plans = [point["plan"] for point in points]
    return _go().Scatter(
        x=[plan["peak"] / plan["plain_peak"] * 100 for plan in plans],
        y=[plan["time"] / plan["plain_time"] for plan in plans],
        customdata=[[point["name"], format_bytes(point["plan"]["peak"])] for point in points],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]} (%{x:.1f} %), %{y:.3f} of the plain time<extra></extra>",
        name=name,
        **look,
    )
