// The plots of a report's page: draws what charts.py has computed, with the reader's choice of runs, x axis, means and logarithms.
"use strict";
const by = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");  // plotly reads a little HTML in names
const short = text => text.length > 60 ? text.slice(0, 59) + "\u2026" : text;
const BUTTONS = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
const hidden = new Set();  // labels of runs that are not shown
let data = JSON.parse(by("data").textContent);

function colour(run) {
  return css(run.baseline ? "base" : run.flagged ? "red" : run.colour);
}

function places(run, steps) {  // steps as places on the chosen axis; those without a row in proportion to the last row
  const axis = by("axis").value;
  if (axis === "step") return steps;
  const at = new Map(run.step.map((step, index) => [step, run[axis][index]]));
  const last = run.step.length - 1, share = last < 0 ? 0 : run[axis][last] / run.step[last];
  return steps.map(step => at.has(step) ? at.get(step) : step * share);
}

function smooth(values) {
  const rows = Number(by("smooth").value);
  if (rows < 2) return values;
  return values.map((_, end) => {
    const window = values.slice(Math.max(0, end - rows + 1), end + 1).filter(value => value !== null);
    return window.length ? window.reduce((sum, value) => sum + value, 0) / window.length : null;
  });
}

function bars(chart) {
  const words = bar => bar.text + (bar.remark ? "  " + bar.remark : "");
  const shown = chart.bars.filter(bar => !hidden.has(data.runs[bar.row].label));
  const traces = shown.map(bar => ({
    type: "bar", orientation: "h", x: [bar.value], y: [bar.row], text: [plain(words(bar))], textposition: "none",
    marker: { color: colour(data.runs[bar.row]) },
    opacity: data.runs[bar.row].partial ? 0.55 : 1, name: plain(data.runs[bar.row].label), hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
    error_x: { type: "data", array: [bar.spread], visible: bar.spread !== null, thickness: 1.2, width: 0, color: css("ink") },
  }));
  const right = 20 + 6 * Math.max(0, ...shown.map(bar => words(bar).length));  // pixels of the column of values
  const annotations = shown.map(bar => ({ xref: "paper", x: 1, xanchor: "left", y: bar.row, text: plain(words(bar)), showarrow: false,
                                          font: { size: 11 } }));
  const layout = { annotations, xaxis: { rangemode: "tozero" }, height: 110 + 30 * shown.length, margin: { l: 190, r: right }, yaxis: {
    autorange: "reversed", tickvals: shown.map(bar => bar.row), ticktext: shown.map(bar => plain(data.runs[bar.row].label.slice(0, 28))) } };
  if (chart.limit) layout.shapes = [{ type: "line", x0: chart.limit, x1: chart.limit, yref: "paper", y0: 0, y1: 1, line: { color: css("red") } }];
  return [traces, layout];
}

function lines(chart) {
  const overSteps = chart.over === "step", traces = [];
  for (const [name, steps, limit] of chart.bands) {
    const run = data.runs.find(run => run.reference);
    traces.push({ x: places(run, steps), y: limit, mode: "lines", line: { width: 0 }, fill: "tozeroy", fillcolor: css("wash"),
                  name: plain(name), hoverinfo: "skip" });
  }
  for (const line of chart.lines) {
    const run = line.row < 0 ? null : data.runs[line.row];
    if (run && hidden.has(run.label)) continue;
    const x = overSteps ? places(run, line.x) : line.x;
    const look = run ? { color: colour(run), dash: run.baseline ? "solid" : run.dash, width: line.faint ? 0.8 : run.baseline ? 4 : 1.7 } :
                       { color: css("base"), dash: "dash", width: 1 };
    if (line.low.length) {
      traces.push({ x, y: line.low, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false });
      traces.push({ x, y: line.high, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, fill: "tonexty",
                    fillcolor: look.color, opacity: 0.15 });
    }
    traces.push({ x, y: overSteps && !chart.log ? smooth(line.y) : line.y, line: look,
                  mode: line.x.length < 12 && !line.faint ? "lines+markers" : "lines",
                  name: plain(short(line.label) + (line.faint ? ", training" : "")), opacity: line.faint ? 0.45 : run && run.baseline ? 0.55 : 1 });
  }
  const losses = ["loss", "validation", "compute", "parameters"].includes(chart.name);
  const axis = by("axis"), title = overSteps ? axis.options[axis.selectedIndex].text : chart.over;
  const log = chart.log || (losses && by("log").checked), named = chart.log;  // labels that say more than the runs' names
  const layout = { xaxis: { title: { text: title }, type: overSteps ? "linear" : "log", dtick: chart.over === "devices" ? Math.log10(2) : undefined },
                   yaxis: { type: log ? "log" : "linear", exponentformat: "power", rangemode: losses || log ? "normal" : "tozero" },
                   hovermode: chart.lines.length > 12 ? "closest" : "x unified", showlegend: named,
                   height: 320 + (named ? 18 * chart.lines.length : 0) };
  return [traces, layout];
}

function histogram(chart) {
  const traces = chart.lines.filter(line => !hidden.has(data.runs[line.row].label)).map(line => ({
    type: "histogram", x: line.y, name: plain(short(line.label)), opacity: 0.65, marker: { color: colour(data.runs[line.row]) } }));
  return [traces, { barmode: "overlay", xaxis: { title: { text: "seconds a step" } }, yaxis: { title: { text: "logged rows" } },
                    showlegend: false, height: 320 }];
}

function timeline(chart) {
  const traces = chart.kinds.map(([name, kind]) => {
    const boxes = chart.boxes.filter(box => box.kind === kind);
    return { type: "bar", orientation: "h", name, x: boxes.map(box => box.length), base: boxes.map(box => box.start), y: boxes.map(box => box.rank),
             text: boxes.map(box => String(box.microbatch)), textposition: "inside", insidetextanchor: "middle", width: 0.8,
             marker: { color: boxes.map(box => css(box.colour)), line: { color: css("paper"), width: 1 } },
             hovertemplate: "microbatch %{text}<extra>" + name + "</extra>" };
  });
  const ranks = [...new Set(chart.boxes.map(box => box.rank))];
  return [traces, { barmode: "overlay", xaxis: { title: { text: plain(chart.note) } }, height: 190 + 34 * ranks.length, yaxis: {
    autorange: "reversed", tickvals: ranks, ticktext: ranks.map(rank => "rank " + rank) } }];
}

function draw() {
  const kinds = { bars, lines, histogram, timeline };
  for (const chart of data.charts.filter(chart => !by("chart-" + chart.name)))  // all of them first: each takes the width that it finds
    by("charts").appendChild(document.createElement("div")).id = "chart-" + chart.name;
  data.charts.forEach(chart => {
    const place = by("chart-" + chart.name), [traces, own] = kinds[chart.kind](chart);
    const grid = { gridcolor: css("rule"), zerolinecolor: css("rule"), linecolor: css("rule"), automargin: true };
    const layout = { ...own, uirevision: by("axis").value, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("ink"), size: 12 }, title: { text: "<b>" + plain(chart.title) + "</b><br><span style='font-size:.8em'>" +
      plain(chart.unit || "") + "</span>", x: 0, xanchor: "left" }, showlegend: own.showlegend ?? chart.kind === "timeline",
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("base"), activecolor: css("ink") }, margin: { t: 60, r: 20, b: 40, l: 60, ...own.margin },
      xaxis: { ...grid, ...own.xaxis }, yaxis: { ...grid, ...own.yaxis },
      hoverlabel: { namelength: -1, bgcolor: css("paper"), bordercolor: css("rule"), font: { color: css("ink") } } };
    Plotly.react(place, traces, layout, { responsive: true, displaylogo: false, modeBarButtons: [BUTTONS] });
  });
  document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + 1;
}

function swatch(run) {
  const dashes = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" };
  const image = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(image.namespaceURI, "line");
  for (const [name, value] of Object.entries({ width: 26, height: 8 })) image.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x2: 26, y1: 4, y2: 4, stroke: colour(run), "stroke-width": run.baseline ? 4 : 2,
    "stroke-dasharray": run.baseline ? "" : dashes[run.dash] })) line.setAttribute(name, value);
  image.append(line);
  return image;
}

function pickers() {
  by("runs").replaceChildren(...data.runs.map(run => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.checked = !hidden.has(run.label);
    box.addEventListener("change", () => { box.checked ? hidden.delete(run.label) : hidden.add(run.label); draw(); });
    label.append(box, swatch(run), run.label);
    return label;
  }));
}

function redraw() {
  pickers();
  draw();
}

async function refresh() {
  try {
    const answer = await fetch("data.json");
    if (!answer.ok) throw new Error(await answer.text());
    const now = await answer.json();
    by("results").innerHTML = now.results;  // both made by the same template as the page, with everything escaped
    by("details").innerHTML = now.details;
    data = now.data;
    redraw();
    by("live").textContent = now.state;
  } catch (error) {
    by("live").textContent = "no answer: " + error.message;
  }
}

for (const id of ["axis", "smooth", "log"]) by(id).addEventListener("change", draw);
by("all").addEventListener("click", () => { hidden.clear(); redraw(); });
by("none").addEventListener("click", () => { data.runs.forEach(run => hidden.add(run.label)); redraw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

async function start() {  // plotly is packed: base64 of gzip
  const packed = Uint8Array.from(atob(by("plotly").textContent), character => character.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
  by("controls").hidden = false;
  redraw();
  if (document.body.dataset.live) setInterval(refresh, 1000 * document.body.dataset.live);
}

start().catch(error => { by("charts").textContent = "The plots need a browser of 2023 or later: " + error.message; });
