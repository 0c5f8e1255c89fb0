"""One HTML page about one or several runs: opens from disk, asks nothing of a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from blockhooks.costs import format_bytes
from blockhooks.errors import import_extra
from blockhooks.report.charts import Chart, charts, curve_chart, runs_chart
from blockhooks.report.figures import PHASES, compare

__all__ = ["html_page", "write_page"]

HERE: Final = Path(__file__).parent
MODES: Final = {
    "keep": "kept by autograd",
    "recompute": "dropped, recomputed in backward",
    "selective": "cheap parts dropped",
    "offload": "moved elsewhere",
}


def write_page(
    path: str | Path,
    runs: Mapping[str, dict[str, Any]],
    pareto: Mapping[str, Any] | None = None,
    today: Mapping[str, Any] | None = None,
) -> None:
    """Write a page about one or several runs.

    Args:
        path: The file, by custom ``*.html``.
        runs: Figures as of ``profile.to_dict()``, by the name of the run. Differences are to the first.
        pareto: What is possible between little memory and little time, as of ``budget.pareto(...).to_dict()``.
        today: The plan in use, as of ``Plan.to_dict()``, which is marked on that curve.

    Raises:
        MissingExtraError: If plotly is not installed.
    """
    Path(path).write_text(html_page(runs, pareto, today), encoding="utf-8")


def html_page(
    runs: Mapping[str, dict[str, Any]],
    pareto: Mapping[str, Any] | None = None,
    today: Mapping[str, Any] | None = None,
) -> str:
    """Return the page; see `write_page`."""
    plotly = import_extra("plotly.offline", "report", "a page of a profile").get_plotlyjs()
    body = "".join(_body(runs, pareto, today))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing on this page may ask for anything from elsewhere.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">"
        '<link rel="icon" href="data:,">'
        f"<title>{escape(', '.join(runs))} - blockhooks profile</title>"
        f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head>\n"
        f"<body>{body}\n<script>{plotly}</script>\n"
        f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _body(
    runs: Mapping[str, dict[str, Any]],
    pareto: Mapping[str, Any] | None,
    today: Mapping[str, Any] | None,
) -> Iterator[str]:
    yield '<a class="skip" href="#figures">Skip to the table of figures</a><header><h1>Profile</h1>'
    yield '<button type="button" id="theme">Dark or light</button></header><main>'
    names = list(runs)
    if len(runs) > 1:
        yield f"<section><h2>Runs</h2>{_chart('runs', runs_chart(runs))}"
        yield f"{_differences(runs)}</section>"
    if pareto is not None:
        yield f"<section><h2>Budget</h2>{_chart('curve', curve_chart(pareto, today))}</section>"
    yield f'<div class="runs count{min(len(runs), 2)}">'
    for number, name in enumerate(names):
        yield "".join(_run(number, name, runs[name]))
    yield '</div><section id="figures"><h2>All figures</h2>'
    yield '<p><button type="button" id="copy">Copy as CSV</button> '
    yield '<button type="button" id="save">Save as CSV</button> <span id="told" role="status"></span></p>'
    yield f"{_all_figures(runs)}</section></main>"


# ------------------------------------------------------------------------------------------------------------ numbers


class Number(NamedTuple):
    """A figure of a run: where it stands in the figures, and how it is written."""

    run: str
    path: tuple[str | int, ...]
    value: float | None
    unit: str

    def __str__(self) -> str:
        return written(self.value, self.unit)

    def tagged(self, tag: str) -> str:
        """Return it as an element that carries the exact value."""
        key = escape(json.dumps([self.run, *self.path]), quote=True)
        value = json.dumps(self.value)
        return f'<{tag} class="number" data-key="{key}" data-value="{value}" title="{value}">{self}</{tag}>'


def written(value: float | None, unit: str) -> str:
    """Return a figure as it stands on the page; a dash for None.

    Args:
        value: The figure.
        unit: ``"ms"`` has three decimals, ``"count"`` is whole; ``"bytes"`` and ``"short"`` are shortened, with
            binary and with decimal prefixes.
    """
    if value is None:
        return "–"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "short":
        return _shortened(value)
    return f"{value:,.3f}" if unit == "ms" else f"{value:,}"


def _shortened(value: float) -> str:
    for prefix in ("", " k", " M", " G", " T"):
        if abs(value) < 1000:
            return f"{value:.4g}{prefix}"
        value /= 1000
    return f"{value:.4g} P"


def _totals(run: str, figures: dict[str, Any]) -> Iterator[tuple[str, Number]]:
    totals = figures["totals"]
    for part in ("wall", *PHASES, "rest"):
        value = totals["ms"][part]["mean"]
        label = "step" if part == "wall" else part
        yield f"{label}, ms", Number(run, ("totals", "ms", part, "mean"), value, "ms")
    for key, label in {
        "peak_bytes": "peak",
        "kept_bytes": "kept",
        "dropped_bytes": "dropped",
        "x_bytes": "inputs kept",
    }.items():
        yield label, Number(run, ("totals", key), totals[key], "bytes")
    for key, label in {
        "model_flops": "model FLOPs",
        "hardware_flops": "hardware FLOPs",
        "model_flops_per_second": "model FLOP/s",
        "hardware_flops_per_second": "hardware FLOP/s",
        "tokens_per_second": "tokens per second",
    }.items():
        yield label, Number(run, ("totals", key), totals[key], "short")
    yield "steps recorded", Number(run, ("steps",), figures["steps"], "count")


def _of_block(run: str, place: int, block: dict[str, Any]) -> Iterator[Number]:
    start = ("blocks", place)
    for phase in PHASES:
        for key in ("mean", "p50", "p95"):
            yield Number(run, (*start, "ms", phase, key), block["ms"][phase][key], "ms")
    for phase in PHASES:
        yield Number(run, (*start, "calls", phase), block["calls"][phase], "count")
    for key in ("kept_bytes", "dropped_bytes", "x_bytes", "peak_bytes"):
        yield Number(run, (*start, key), block[key], "count")
    flops = block["flops"]
    for phase in PHASES:
        path = (*start, "flops") if flops is None else (*start, "flops", phase)
        yield Number(run, path, None if flops is None else flops[phase], "count")


COLUMNS: Final = (
    *(f"{phase} {key} ms" for phase in PHASES for key in ("mean", "p50", "p95")),
    *(f"{phase} calls" for phase in PHASES),
    "kept bytes",
    "dropped bytes",
    "x bytes",
    "peak bytes",
    *(f"{phase} FLOPs" for phase in PHASES),
)


def _all_figures(runs: Mapping[str, dict[str, Any]]) -> str:
    lines = [
        f'<tr><td>{escape(name)}</td><th scope="row">{escape(block["name"])}</th><td>{escape(block["mode"])}</td>'
        + "".join(number.tagged("td") for number in _of_block(name, place, block))
        + "</tr>"
        for name, figures in runs.items()
        for place, block in enumerate(figures["blocks"])
    ]
    return _table("All figures of all blocks", ("run", "block", "plan", *COLUMNS), lines, "all")


def _differences(runs: Mapping[str, dict[str, Any]]) -> str:
    base, *others = runs
    lines = []
    for name in others:
        found = compare(runs[name], runs[base])["totals"]
        cells = [_ratio(found[f"{part}_ratio"]) for part in ("wall", *PHASES)]
        cells += [
            _more(found.get(f"{key}_more")) for key in ("peak_bytes", "kept_bytes", "dropped_bytes")
        ]
        lines.append(
            f'<tr><th scope="row">{escape(name)}</th>'
            + "".join(f"<td>{c}</td>" for c in cells)
            + "</tr>"
        )
    head = ("run", "step time", *(f"{phase} time" for phase in PHASES), "peak", "kept", "dropped")
    return _table(f"Compared with {base}", head, lines, "differences")


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"× {ratio:.3f}"


def _more(nbytes: int | None) -> str:
    return "–" if nbytes is None else ("+" if nbytes >= 0 else "−") + format_bytes(abs(nbytes))


def _table(caption: str, head: Iterable[str], lines: Iterable[str], name: str) -> str:
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}">'
        f'<table id="table-{name}"><caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


# ---------------------------------------------------------------------------------------------------------- one run


def _run(number: int, name: str, figures: dict[str, Any]) -> Iterator[str]:
    yield f'<section class="run"><h2>{escape(name)}</h2>'
    versions = ", ".join(f"{key} {value}" for key, value in figures["versions"].items())
    yield f"<p>{escape(figures['device'])}; {escape(versions)}</p>"
    yield f"<p>Chain, outermost first: {escape(figures['chain'])}</p>"
    yield '<dl class="totals">'
    for label, value in _totals(name, figures):
        yield f"<div><dt>{escape(label)}</dt>{value.tagged('dd')}</div>"
    yield f"</dl><h3>Plan</h3>{_plan(figures)}"
    yield "".join(_remarks(figures))
    for place, chart in enumerate(charts(figures)):
        yield _chart(f"chart-{number}-{place}", chart)
    if figures["memory"] is None:
        yield "<p>Live bytes over time were not measured; <code>with profile.measure():</code> does.</p>"
    yield "</section>"


def _chart(name: str, chart: Chart) -> str:
    words = escape(chart.words, quote=True)
    data = chart.json.replace("<", "\\u003c")
    return (
        f'<figure><figcaption>{escape(chart.title)}</figcaption><div class="chart" id="{name}" tabindex="0" '
        f'role="img" aria-label="{words} The arrow keys go from point to point."></div>'
        f'<p class="words">{words}</p>'
        f'<script type="application/json" data-for="{name}">{data}</script></figure>'
    )


def _plan(figures: dict[str, Any]) -> str:
    blocks = {block["name"]: block for block in figures["blocks"]}
    used = dict.fromkeys(block["mode"] for block in figures["blocks"])
    legend = ", ".join(
        f'<span class="cell {mode}">{mode[0].upper()}</span> {MODES[mode]}' for mode in used
    )
    strip = "".join(
        _segment(s, dict(enumerate(s["blocks"], s["start"])), blocks) for s in figures["plan"]
    )
    return (
        f'<div class="plan" role="list" aria-label="Segments of the plan">{strip}</div>'
        f'<p class="words">{legend}; a frame is a segment</p>'
    )


def _segment(
    segment: dict[str, Any], names: Mapping[int, str], blocks: Mapping[str, dict[str, Any]]
) -> str:
    inside = (
        "".join(_segment(child, names, blocks) for child in segment["children"])
        if segment["children"]
        else "".join(
            _cell(blocks[names[index]])
            for index in range(segment["start"], segment["stop"])
            if names[index] in blocks
        )
    )
    title = f"blocks {segment['start']} to {segment['stop'] - 1}"
    return f'<span class="segment" role="listitem" title="{title}">{inside}</span>'


def _cell(block: dict[str, Any]) -> str:
    mode = block["mode"]
    title = escape(f"{block['name']}: {MODES[mode]}", quote=True)
    return f'<span class="cell {mode}" title="{title}">{mode[0].upper()}</span>'


def _remarks(figures: dict[str, Any]) -> Iterator[str]:
    for drift in figures["drift"]:
        yield (
            f'<p class="remark">{escape(drift["block"])} became slower: {drift["phase"]} took '
            f"{drift['first_ms']:.2f} ms at the beginning and takes {drift['last_ms']:.2f} ms now.</p>"
        )
    for outlier in figures["outliers"]:
        yield (
            f'<p class="remark">Step {outlier["step"]}: {outlier["phase"]} of {escape(outlier["block"])} took '
            f"{outlier['ms']:.2f} ms, usually {outlier['usual_ms']:.2f} ms.</p>"
        )
