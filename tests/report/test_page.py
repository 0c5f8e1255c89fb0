"""The page holds every figure as it is, and opens without a network."""

import csv
import io
import json
import re
import shutil
import time
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, apply_blocks, plan
from blockhooks.budget import Pareto, Point
from blockhooks.errors import MissingExtraError
from blockhooks.hooks.profile import Profile
from blockhooks.report.charts import stretches
from blockhooks.report.page import html_page, written
from blockhooks.solver import Plan

NAMES = ("plain", "check <b>pointed</b>")


def profile_of(*strategy):
    profile = Profile(flops=True)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
    x = torch.randn(2, 8, 16, requires_grad=True)

    def step():
        apply_blocks(blocks, x, hooks=[*strategy, profile]).sum().backward()

    for _ in range(2):
        step()
    with profile.measure("cpu"):
        step()
    return profile


@pytest.fixture(scope="module")
def runs():
    pytest.importorskip("plotly")
    torch.manual_seed(0)
    profiles = profile_of(), profile_of(Checkpoint(plan.tree(2)))
    return {name: profile.to_dict() for name, profile in zip(NAMES, profiles, strict=True)}


def a_point(name, time, peak):
    return Point(name, Plan(plan.every(2)(4), time, peak, 1.0, 1000))


PARETO = Pareto(
    points=(a_point("budget 20%", 1.3, 200), a_point("budget 100%", 1.0, 1000)),
    heuristics=(a_point("every(2)", 1.4, 300),),
)


@pytest.fixture(scope="module")
def page(runs):
    return html_page(runs, PARETO.to_dict(), a_point("today", 1.1, 600).plan.to_dict())


class Numbers(HTMLParser):
    """Collects the elements that carry a figure, and all words outside of scripts."""

    def __init__(self, page):
        super().__init__()
        self.numbers, self.words = {}, []
        self._key = self._tag = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self._tag = tag
        if "data-key" in attributes:
            self._key = tuple(json.loads(attributes["data-key"]))
            assert self._key not in self.numbers or "flops" in self._key
            self.numbers[self._key] = [json.loads(attributes["data-value"]), None]

    def handle_data(self, data):
        if self._key is not None:
            self.numbers[self._key][1] = data
        elif self._tag not in ("script", "style"):
            self.words.append(data)

    def handle_endtag(self, tag):
        self._key = self._tag = None


def look_up(runs, key):
    value = runs
    for part in key:
        value = value[part]
    return value


# ---------------------------------------------------------------------------------------------------- without a browser


def test_each_number_is_the_profiles(runs, page):
    numbers = Numbers(page).numbers
    for key, (value, text) in numbers.items():
        assert value == look_up(runs, key), key
        units = ("ms", "count", "bytes", "short")
        assert text in {
            written(value, unit)
            for unit in units
            if unit == "ms" or value is not None or text == "–"
        }, key


def test_each_figure_of_each_block_stands_on_the_page(runs, page):
    numbers = Numbers(page).numbers
    for name, figures in runs.items():
        for place, block in enumerate(figures["blocks"]):
            for phase in ("forward", "recompute", "backward"):
                assert (name, "blocks", place, "calls", phase) in numbers
                assert (name, "blocks", place, "flops", phase) in numbers
                for key in block["ms"][phase]:
                    assert (name, "blocks", place, "ms", phase, key) in numbers
            for key in ("kept_bytes", "dropped_bytes", "x_bytes", "peak_bytes"):
                assert (name, "blocks", place, key) in numbers


def test_numbers_are_written_for_a_reader():
    assert written(None, "ms") == "–"
    assert written(1234.5678, "ms") == "1,234.568"
    assert written(1234567, "count") == "1,234,567"
    assert written(1536, "bytes") == "1.50 KiB"
    assert written(12_345_678, "short") == "12.35 M"
    assert written(7e18, "short") == "7000 P"


def test_names_are_words_and_no_markup(page):
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<b>" not in outside
    assert "check &lt;b&gt;pointed&lt;/b&gt;" in outside


def test_chain_device_versions_and_plan_are_told(page):
    words = " ".join(Numbers(page).words)
    assert "Chain, outermost first: Checkpoint, Profile" in words
    assert f"torch {torch.__version__}" in words
    assert "dropped, recomputed in backward" in words
    assert page.count('title="blocks 0 to 1"') == 1  # the tree's first segment
    assert page.count('class="cell recompute"') == 4 + 1  # and the legend


def test_nothing_on_the_page_names_another_place(page):
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "http" not in outside.replace('http-equiv="Content-Security-Policy"', "")
    assert re.findall(r'\b(?:src|href)="([^"]*)"', outside) == ["data:,", "#figures"]


def test_a_run_that_was_not_measured_says_how(runs):
    figures = {**runs["plain"], "memory": None}
    page = html_page({"plain": figures})
    assert "<code>with profile.measure():</code>" in page
    assert "Runs" not in Numbers(page).words


def test_a_profile_of_nothing_has_a_page():
    pytest.importorskip("plotly")
    assert "steps recorded" in Numbers(html_page({"nothing": Profile().to_dict()})).words


def test_drift_and_outliers_are_told(runs):
    drift = {"block": "2: Layer", "phase": "backward", "first_ms": 1.0, "last_ms": 2.0}
    outlier = {"step": 31, "block": "1: Layer", "phase": "forward", "ms": 9.0, "usual_ms": 1.5}
    words = Numbers(
        html_page({"a": {**runs["plain"], "drift": [drift], "outliers": [outlier]}})
    ).words
    assert any("2: Layer became slower: backward took 1.00 ms" in word for word in words)
    assert any(
        "Step 31: forward of 1: Layer took 9.00 ms, usually 1.50 ms" in word for word in words
    )


def test_stretches_are_the_innermost_spans():
    outer = {"begin_ms": 1.0, "end_ms": 9.0, "depth": 0}
    inner = {"begin_ms": 3.0, "end_ms": 4.0, "depth": 1}
    after = {"begin_ms": 9.0, "end_ms": 10.0, "depth": 0}
    found = [(s.begin, s.end, s.span) for s in stretches([outer, inner, after], 12.0)]
    assert found == [
        (0.0, 1.0, None),
        (1.0, 3.0, outer),
        (3.0, 4.0, inner),
        (4.0, 9.0, outer),
        (9.0, 10.0, after),
        (10.0, 12.0, None),
    ]


def test_profiles_write_a_page_of_several_runs(tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "page.html"
    plain, checkpointed = profile_of(), profile_of(Checkpoint())
    best = PARETO.points[0].plan
    checkpointed.report(path, {"plain": plain}, name="checkpointed", pareto=PARETO, plan=best)
    words = Numbers(path.read_text()).words
    assert [word for word in words if word in ("plain", "checkpointed")][:2]
    assert "Compared with plain" in words
    assert "Predicted time against peak for 2 plans, from 200 B to 1000 B." in words


def test_without_plotly_the_extra_is_named(monkeypatch, runs):
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    monkeypatch.delitem(__import__("sys").modules, "plotly.offline", raising=False)
    with pytest.raises(MissingExtraError, match=r"blockhooks\[report\]"):
        html_page(runs)


# ------------------------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser(page, tmp_path_factory):
    pytest.importorskip("selenium", reason="needs selenium")
    from selenium import webdriver

    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs chromium and chromedriver")
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(page, encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={folder / 'data'}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    try:
        driver.get("about:blank")
        for kind in ("browser", "performance"):
            driver.get_log(kind)  # of the first page
        size(driver, 1280)
        driver.get((folder / "page.html").as_uri())
        yield driver
    finally:
        driver.quit()


def size(driver, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(driver, value):
    feature = {"name": "prefers-color-scheme", "value": value}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def requests(driver):
    """Return the addresses that the page has asked for."""
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]


def hover_text(driver, chart, curve, point, subplot="xy"):
    return driver.execute_async_script(
        """
        const [id, curveNumber, pointNumber, subplot, done] = arguments;
        const chart = document.getElementById(id);
        Plotly.Fx.hover(chart, [{curveNumber, pointNumber}], [subplot]);
        const read = () => [...chart.querySelectorAll('.hovertext tspan')].map((t) => t.textContent);
        setTimeout(() => done(read().join('|')), 200); // Plotly draws at most every 50 ms
        """,
        chart,
        curve,
        point,
        subplot,
    )


def test_the_page_opens_without_an_error_and_asks_for_nothing(browser):
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:"))] == []
    assert browser.get_log("browser") == []
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.chart')].map((c) => c.querySelectorAll('.main-svg').length > 0)"
    )
    assert drawn == [True] * 8  # two for all, three for each run


def test_bars_tell_the_block_and_its_time(browser, runs):
    for number, figures in enumerate(runs.values()):
        for curve, phase in enumerate(("forward", "recompute", "backward")):
            block = figures["blocks"][2]
            expected = f"2: Sequential|{phase} {block['ms'][phase]['mean']:.3f} ms"
            if block["ms"][phase]["mean"]:
                assert hover_text(browser, f"chart-{number}-1", curve, 2) == expected


def test_the_curve_of_live_bytes_tells_block_phase_and_bytes(browser, runs):
    memory = runs["plain"]["memory"]
    span = next(
        s for s in memory["spans"] if s["phase"] == "backward" and s["block"] == "2: Sequential"
    )
    inside = [
        (place, live)
        for place, (at, live) in enumerate(memory["live"])
        if span["begin_ms"] < at < span["end_ms"]
    ]
    place, live = inside[len(inside) // 2]
    text = hover_text(browser, "chart-0-0", 0, place)
    assert text.startswith(f"2: Sequential, backward|{written(live, 'bytes')} at ")


def test_the_curve_tells_plans_by_name(browser):
    texts = [hover_text(browser, "curve", curve, 0) for curve in range(3)]
    assert texts[0].startswith("budget 20%|200 B (20.0 %), 1.300 of the plain time")
    assert texts[1].startswith("every(2)|300 B (30.0 %), 1.400")
    assert texts[2].startswith("this plan|600 B (60.0 %), 1.100")


def test_charts_show_the_exact_figures(browser, runs):
    for number, figures in enumerate(runs.values()):
        shown = browser.execute_script(
            f"return document.getElementById('chart-{number}-1').data.map((trace) => [...trace.x])"
        )
        assert shown == [
            [block["ms"][phase]["mean"] for block in figures["blocks"]]
            for phase in ("forward", "recompute", "backward")
        ]


def test_the_table_is_copied_as_csv(browser, runs):
    browser.execute_script(
        "document.execCommand = (what) => { window.copied = document.activeElement.value; return what === 'copy'; }"
    )
    browser.find_element("id", "copy").click()
    head, *lines = csv.reader(io.StringIO(browser.execute_script("return window.copied")))
    assert browser.find_element("id", "told").text == "Copied."
    assert len(lines) == 8
    for line in lines:
        row = dict(zip(head, line, strict=True))
        (block,) = [b for b in runs[row["run"]]["blocks"] if b["name"] == row["block"]]
        assert row["plan"] == block["mode"]
        assert float(row["recompute p95 ms"]) == block["ms"]["recompute"]["p95"]
        assert int(row["dropped bytes"]) == block["dropped_bytes"]
        assert int(row["backward FLOPs"]) == block["flops"]["backward"]


def test_arrow_keys_go_from_point_to_point(browser):
    from selenium.webdriver.common.keys import Keys

    chart = browser.find_element("id", "chart-1-1")
    texts = []
    for key in (Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT):
        chart.send_keys(key)
        time.sleep(0.2)
        texts.append(
            browser.execute_script(
                "return [...arguments[0].querySelectorAll('.hovertext tspan')].map((t) => t.textContent)",
                chart,
            )
        )
    assert [text[0] for text in texts] == ["0: Sequential", "1: Sequential", "1: Sequential"]
    assert texts[1][1].startswith("forward")
    assert texts[2][1].startswith("recompute")


def test_everything_can_be_reached_with_a_keyboard(browser):
    reachable = browser.execute_script(
        "return [...document.querySelectorAll('button, a, .chart, .scroll')].map((e) => e.tabIndex)"
    )
    assert len(reachable) > 10
    assert set(reachable) == {0}


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("value", ["light", "dark"])
def test_the_page_is_readable_at_any_width_in_light_and_dark(browser, width, value):
    size(browser, width)
    scheme(browser, value)
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 300))"
    )
    theme, beyond, text, ground, chart_text = browser.execute_script(
        """
        const style = getComputedStyle(document.body);
        const root = document.documentElement;
        return [root.dataset.theme, root.scrollWidth - root.clientWidth, style.color,
          style.backgroundColor, document.getElementById('chart-0-1').layout.font.color];
        """
    )
    assert theme == value
    assert beyond == 0
    assert contrast(text, ground) > 7
    assert contrast(chart_text, ground) > 7
    deadline = time.monotonic() + 20
    while (misfits := charts_that_do_not_fit(browser)) and time.monotonic() < deadline:
        time.sleep(0.2)  # a chart follows its place a little later
    assert misfits == []
    scheme(browser, "")


def charts_that_do_not_fit(browser):
    return browser.execute_script(
        """
        const fits = (chart) => {
          const drawn = chart.querySelector('.main-svg').getBoundingClientRect();
          const place = chart.getBoundingClientRect();
          return Math.abs(drawn.width - place.width) < 1 && drawn.height === place.height && drawn.height > 120;
        };
        return [...document.querySelectorAll('.chart')].filter((chart) => !fits(chart)).map((chart) => chart.id);
        """
    )


def contrast(one, other):
    """Return the contrast of two colours, as WCAG defines it."""
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    if colour.startswith("#"):
        parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    else:
        parts = list(map(int, re.findall(r"\d+", colour)[:3]))
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (p / 255 for p in parts)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
