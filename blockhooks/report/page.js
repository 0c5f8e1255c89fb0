"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const charts = [];

  function colours() {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { text: of("--text"), line: of("--line"), ground: of("--ground") };
  }

  // What a chart's axes and words look like in this theme and at this width.
  function look(layout) {
    const { text, line, ground } = colours();
    const narrow = window.innerWidth < 600;
    const changed = {
      "font.color": text,
      "font.size": narrow ? 10 : 12,
      "hoverlabel.bgcolor": ground,
      "hoverlabel.font.color": text,
    };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      changed[`${axis}.gridcolor`] = line;
      changed[`${axis}.zerolinecolor`] = line;
      changed[`${axis}.linecolor`] = line;
    }
    return changed;
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    for (const chart of charts) Plotly.relayout(chart, look(chart.layout));
  }

  function draw(data) {
    const chart = document.getElementById(data.dataset.for);
    const { data: traces, layout } = JSON.parse(data.textContent);
    Object.assign(layout, {
      template: undefined,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 10, r: 10, t: 30, b: 10 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
      hovermode: "closest",
      dragmode: false,
    });
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      layout[axis].automargin = true;
    }
    chart.style.height = `${layout.height}px`; // or a chart that is resized early takes the height of nothing
    Plotly.newPlot(chart, traces, layout, { responsive: true, displayModeBar: false });
    charts.push(chart);
    withKeys(chart);
  }

  // The arrow keys go from point to point, and from one row of bars to the next.
  function withKeys(chart) {
    let curve = 0;
    let point = -1;
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const traces = chart.data.filter((trace) => trace.x && trace.x.length);
      const bars = traces.length > 1 && traces.every((trace) => trace.x.length === traces[0].x.length);
      const within = event.key === "ArrowRight" || event.key === "ArrowLeft";
      if (bars && within) curve = (curve + step + traces.length) % traces.length;
      else point += step;
      const length = traces[curve].x.length;
      point = (Math.max(point, point === -1 && step > 0 ? 0 : point) + length) % length;
      const subplot = (traces[curve].xaxis || "x").replace("x", "") || "";
      Plotly.Fx.hover(
        chart,
        [{ curveNumber: chart.data.indexOf(traces[curve]), pointNumber: point }],
        [`x${subplot}y${subplot}`],
      );
    });
  }

  function csv() {
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const exact = (cell) => {
      const value = cell.dataset.value;
      return value === undefined ? cell.textContent : value === "null" ? "" : value;
    };
    return [...document.querySelectorAll("#table-all tr")]
      .map((row) => [...row.cells].map((cell) => quoted(exact(cell))).join(","))
      .join("\n");
  }

  function copy(text) {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy"); // works for a page that was opened from disk, too
    area.remove();
    document.getElementById("told").textContent = done ? "Copied." : "The browser did not allow it.";
  }

  function save(text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = "profile.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  root.dataset.theme = dark.matches ? "dark" : "light";
  document.querySelectorAll('script[type="application/json"]').forEach(draw);
  setTheme(root.dataset.theme);
  dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  window.addEventListener("resize", () => setTheme(root.dataset.theme));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
  });
  document.getElementById("copy").addEventListener("click", () => copy(csv()));
  document.getElementById("save").addEventListener("click", () => save(csv()));
})();
