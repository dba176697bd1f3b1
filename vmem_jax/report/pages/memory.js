"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, text = "", name = "") => {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = name;
  return node;
};
// A table's cell with a name, which breaks after a slash where it has to.
const path = (text) => {
  const cell = make("td", "", "name");
  text.split(/(?<=\/)/).forEach((part, i) => cell.append(...(i ? [make("wbr")] : []), part));
  return cell;
};
const [plain, plan] = data.panels;
const MOST = Math.max(plain.peak.nbytes, plain.compiled, plan.compiled);
const UNIT = MOST >= 2 ** 30 ? ["GiB", 2 ** 30] : MOST >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
const END = Math.max(plain.seconds, plan.seconds);
const TIME = END >= 2 ? ["s", 1] : END >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
const size = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(n) >= 1024 && i < 4) { n /= 1024; i++; }
  return (i ? n.toFixed(2) : n.toFixed(0)) + " " + units[i];
};
const time = (s) => (s * TIME[1]).toPrecision(4) + " " + TIME[0];
const signed = (x) => (x >= 0 ? "+" : "−") + Math.abs(x * 100).toFixed(1) + " %";

const KINDS = { parameter: "#4e79a7", "optimiser state": "#9c7ac7", batch: "#76b7b2", constant: "#9aa5b1", output: "#6b8fb3", gradient: "#59a14f", activation: "#f2994a", workspace: "#e15759" };
const WHEEL = ["#f2994a", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#86bc86", "#d37295", "#499894", "#f1ce63"];
const LANES = { forward: "#4e79a7", backward: "#59a14f", update: "#9c7ac7", recompute: "#f2994a", waits: "#e15759", "copy out": "#76b7b2", "copy in": "#edc948" };
const DECISIONS = { "held throughout": "#4e79a7", kept: "#59a14f", recomputed: "#f2994a", moved: "#76b7b2", "moved by slices": "#76b7b2", compressed: "#edc948", stacked: "#9c7ac7", "micro-batched": "#d37295", fused: "#9c755f", "short-lived": "#9aa5b1" };
const names = (by) => {
  const found = [...new Set([...Object.keys(plain[by]), ...Object.keys(plan[by])])];
  const first = by === "kinds" ? Object.keys(KINDS) : ["arguments and results", ...data.layers];
  const rank = (n) => (n === "workspace" ? 99 : first.includes(n) ? first.indexOf(n) : 50);
  return found.sort((a, b) => rank(a) - rank(b));
};
const colours = (by) => {
  let i = 0;
  return Object.fromEntries(names(by).map((n) => [n, by === "kinds" ? KINDS[n] || "#888" : n === "workspace" ? "#b3bcc7" : n === "arguments and results" ? "#4e79a7" : WHEEL[i++ % WHEEL.length]]));
};
let by = "kinds";
const theme = () => document.documentElement.dataset.theme;
const tone = () => {
  const css = getComputedStyle(document.documentElement);
  return Object.fromEntries(["card", "ink", "soft", "line", "bad", "accent"].map((k) => [k, css.getPropertyValue("--" + k).trim()]));
};
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };
const LEFT = 62, RIGHT = 14;
const NARROW = matchMedia("(max-width: 540px)"); // a chart's title has two lines then, from its left edge
const axis = (t, more) => ({ gridcolor: t.line, linecolor: t.line, zeroline: false, tickfont: { color: t.soft }, ...more });
const layout = (t, more) => ({
  paper_bgcolor: t.card, plot_bgcolor: t.card, showlegend: false,
  font: { family: "system-ui, DejaVu Sans, sans-serif", size: 12, color: t.ink },
  hoverlabel: { bgcolor: t.card, bordercolor: t.line, font: { color: t.ink, size: 12 }, namelength: 40 }, ...more,
});

function areas() {
  const t = tone(), paint = colours(by), traces = [], shapes = [], notes = [];
  const top = Math.max(plain.peak.nbytes, plan.peak.nbytes, plain.compiled, plan.compiled) * 1.16 / UNIT[1];
  data.panels.forEach((panel, i) => {
    const y = i ? "y2" : "y";
    const x = [...panel.at, panel.seconds].map((s) => s * TIME[1]);
    for (const name of names(by)) {
      const series = panel[by][name];
      if (!series) continue;
      const held = [...series, series[series.length - 1]];
      traces.push({ type: "scatter", mode: "lines", x, y: held.map((n) => n / UNIT[1]), text: held.map(size), yaxis: y, name, stackgroup: "s" + i, line: { shape: "hv", width: 0 }, fillcolor: paint[name], hovertemplate: "%{text}" });
    }
    const high = panel.peak.nbytes / UNIT[1], at = panel.peak.at * TIME[1], late = panel.peak.at > 0.6 * END;
    const beside = NARROW.matches && high <= data.budget / UNIT[1] && data.budget / UNIT[1] - high < 0.15 * top; // the budget's name is above
    traces.push({ type: "scatter", mode: "markers", x: [at], y: [high], yaxis: y, name: "peak", marker: { size: 9, color: t.ink, line: { color: t.card, width: 2 } }, hovertemplate: size(panel.peak.nbytes) + "<extra>peak</extra>" });
    notes.push({ x: at, y: high, yref: y, text: "peak " + size(panel.peak.nbytes), showarrow: false, yanchor: beside ? "top" : "bottom", xanchor: late ? "right" : "left", xshift: late ? -8 : 8, font: { color: t.ink, size: 12 }, bgcolor: t.card, borderpad: 2, opacity: 0.92 });
    notes.push({ xref: "paper", x: 0, yref: y + " domain", y: 1.02, yanchor: "bottom", xanchor: "left", showarrow: false, align: "left", xshift: NARROW.matches ? 4 - LEFT : 0, text: "<b>" + panel.title + "</b>" + (NARROW.matches ? "<br>" : "  ") + time(panel.seconds) + " predicted, " + size(panel.compiled) + " compiled", font: { size: 13, color: t.ink } });
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: y, y0: panel.compiled / UNIT[1], y1: panel.compiled / UNIT[1], line: { color: t.soft, width: 1.2, dash: "dot" } });
    if (data.budget && data.budget / UNIT[1] <= top) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: y, y0: data.budget / UNIT[1], y1: data.budget / UNIT[1], line: { color: t.bad, width: 1.5, dash: "dash" } });
      notes.push({ xref: "paper", x: 1, xanchor: "right", yref: y, y: data.budget / UNIT[1], yanchor: "bottom", showarrow: false, text: "budget " + size(data.budget), font: { color: t.bad, size: 12 }, bgcolor: t.card, borderpad: 1, opacity: 0.92 });
    }
  });
  const yaxis = { range: [0, top], ticksuffix: " " + UNIT[0], fixedrange: true, nticks: 5 };
  const gap = NARROW.matches ? 0.06 : 0.04; // half of what is between the charts
  const range = $("areas").layout ? $("areas").layout.xaxis.range : [0, END * TIME[1]];
  Plotly.react("areas", traces, layout(t, {
    height: 560, margin: { l: LEFT, r: RIGHT, t: NARROW.matches ? 46 : 30, b: 14 }, hovermode: "x unified", dragmode: "zoom",
    xaxis: axis(t, { range, anchor: "y2", hoverformat: ".3f", spikecolor: t.soft, spikethickness: 1, spikedash: "solid", ticksuffix: " " + TIME[0], showticklabels: false }),
    yaxis: axis(t, { domain: [0.5 + gap, 1], ...yaxis }), yaxis2: axis(t, { domain: [0, 0.5 - gap], ...yaxis }), shapes, annotations: notes,
  }), CONFIG);
  legend("legend", names(by), paint);
  const dotted = make("span", "what the compiled step needs");
  dotted.prepend(make("i", "", "dotted"));
  $("legend").append(dotted);
}

function legend(id, names, paint) {
  $(id).replaceChildren(...names.map((n) => {
    const node = make("span", n), dot = make("i");
    dot.style.background = paint[n];
    node.prepend(dot);
    return node;
  }));
}

function lanes() {
  const t = tone(), used = Object.keys(LANES).filter((c) => data.spans.some((s) => s.category === c));
  const rows = ["in", "out", "compute"].filter((lane) => lane === "compute" || data.spans.some((s) => s.lane === lane));
  const traces = used.map((category) => {
    const own = data.spans.filter((s) => s.category === category);
    return { type: "bar", orientation: "h", name: category, y: own.map((s) => s.lane), base: own.map((s) => s.begin * TIME[1]), x: own.map((s) => (s.end - s.begin) * TIME[1]), width: 0.72, marker: { color: LANES[category], line: { width: 0 } },
      customdata: own.map((s) => [s.name + (s.count > 1 ? " and " + (s.count - 1) + " more" : ""), s.line, time(s.end - s.begin), s.nbytes ? ", " + size(s.nbytes) : ""]),
      hovertemplate: "%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}%{customdata[3]}<extra>" + category + "</extra>" };
  });
  legend("lane-legend", used, LANES);
  const range = $("areas").layout.xaxis.range;
  Plotly.react("lanes", traces, layout(t, {
    height: 48 + 34 * rows.length, margin: { l: LEFT, r: RIGHT, t: 6, b: 34 }, barmode: "overlay", hovermode: "closest", dragmode: "zoom",
    xaxis: axis(t, { range, ticksuffix: " " + TIME[0] }), yaxis: axis(t, { categoryorder: "array", categoryarray: rows, fixedrange: true, showgrid: false }),
  }), CONFIG);
}

let linking = false;
function link(from, to) {
  $(from).on("plotly_relayout", (change) => {
    if (linking || !Object.keys(change).some((k) => k.startsWith("xaxis"))) return;
    linking = true;
    const range = change["xaxis.autorange"] ? [0, END * TIME[1]] : [...$(from).layout.xaxis.range];
    const both = change["xaxis.autorange"] ? [from, to] : [to];
    Promise.all(both.map((id) => Plotly.relayout(id, { "xaxis.range": range }))).then(() => { linking = false; });
  });
}

function pareto() {
  const t = tone(), points = data.points;
  if (!points.length) { $("trade").hidden = true; return; }
  const tip = (p) => [size(p.budget), time(p.seconds), p.techniques.join(", ") || "nothing changed"];
  const hovertemplate = "<b>%{customdata[0]}</b>, %{customdata[1]}<br>%{customdata[2]}<extra></extra>";
  const traces = [
    { type: "scatter", mode: "lines+markers", name: points.every((p) => p.compiled) ? "plans, compiled" : "plans, predicted", x: points.map((p) => p.budget / UNIT[1]), y: points.map((p) => p.seconds * TIME[1]), customdata: points.map(tip), hovertemplate, line: { shape: "hv", color: t.accent, width: 2 }, marker: { size: 8, color: t.accent } },
    { type: "scatter", mode: "markers", name: "plain jax.jit", x: [plain.compiled / UNIT[1]], y: [plain.seconds * TIME[1]], marker: { size: 12, symbol: "diamond", color: "#9aa5b1" }, hovertemplate: "plain jax.jit: " + size(plain.compiled) + ", " + time(plain.seconds) + "<extra></extra>" },
    { type: "scatter", mode: "markers", name: "the chosen plan", x: [plan.compiled / UNIT[1]], y: [plan.seconds * TIME[1]], marker: { size: 15, symbol: "star", color: "#f2994a", line: { color: t.card, width: 1 } }, hovertemplate: "the chosen plan: " + size(plan.compiled) + ", " + time(plan.seconds) + "<extra></extra>" },
  ];
  const shapes = data.budget ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: data.budget / UNIT[1], x1: data.budget / UNIT[1], line: { color: t.bad, width: 1.5, dash: "dash" } }] : [];
  const annotations = data.budget ? [{ x: data.budget / UNIT[1], yref: "paper", y: 1, xanchor: "left", yanchor: "top", xshift: 4, showarrow: false, text: "budget", font: { color: t.bad } }] : [];
  Plotly.react("pareto", traces, layout(t, {
    height: 320, margin: { l: LEFT, r: RIGHT, t: 8, b: 44 }, hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: t.soft } }, shapes, annotations,
    xaxis: axis(t, { rangemode: "tozero", ticksuffix: " " + UNIT[0], title: { text: "bytes that the compiled step needs", font: { color: t.soft } } }), yaxis: axis(t, { ticksuffix: " " + TIME[0], ...scale(points.map((p) => p.seconds)) }),
  }), CONFIG);
}

// Where the slowest plan takes several times as long as the fastest, equal factors have equal heights.
function scale(seconds) {
  const low = Math.min(...seconds, plain.seconds, plan.seconds), high = Math.max(...seconds, plain.seconds, plan.seconds);
  return high > 3 * low ? { type: "log", dtick: high > 30 * low ? 1 : "D2" } : { rangemode: "tozero" };
}

function words() {
  $("name").textContent = data.name;
  document.title = data.name + ": memory";
  $("about").textContent = "on " + data.device + ", planned by " + data.policy;
  const share = plan.compiled / plain.compiled;
  const tiles = [
    [size(plain.compiled), "plain jax.jit needs"],
    [size(plan.compiled), "the plan needs, " + (share * 100).toFixed(0) + " % of plain"],
    [data.budget ? size(data.budget) : "none", "budget"],
    [time(plan.seconds), "predicted time of a step"],
    [signed(plan.seconds / plain.seconds - 1), "time beside plain, predicted"],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, label]) => {
    const tile = make("div", "", "tile");
    tile.append(make("b", value), make("span", label));
    return tile;
  }));
  if (data.sub_batches > 1) $("parts").textContent = "The batch runs in " + data.sub_batches + " parts, one after another; one is drawn, over the time of all.";
  data.panels.forEach((panel, i) => {
    $("where" + i).textContent = size(panel.peak.nbytes) + " live at " + panel.peak.where;
    $("peak" + i).replaceChildren(...panel.peak.holders.map((h) => {
      const row = make("div", "", "hold"), name = make("div", h.label + (h.layer ? "  ·  " + h.layer : "")), bar = make("div", "", "bar"), part = make("i");
      name.title = name.textContent;
      part.style.width = (100 * h.nbytes) / panel.peak.nbytes + "%";
      bar.append(part);
      row.append(name, make("div", size(h.nbytes)), bar);
      return row;
    }));
  });
  const times = data.costs === "measured" ? "Times are predicted from measured steps" + (data.error === null ? "" : ", with a median error of " + (100 * data.error).toFixed(0) + " %") + "." : "Times are a roofline’s: nothing was measured.";
  $("footer").textContent = times + " Bytes over time are predicted; the needs beside the titles are the compiler’s, and have XLA’s heap in them.";
}

const COLUMNS = [["Value", "label"], ["Bytes", "nbytes"], ["Made at", "layer"], ["Live range", ""], ["Decision", "decision"], ["Reason", "reason"]];
let sorted = ["nbytes", -1];
function table() {
  const wanted = $("filter").value.toLowerCase(), [key, sign] = sorted;
  const rows = data.values.filter((v) => [v.label, v.layer, v.line, v.decision, ...v.also, v.kind].join(" ").toLowerCase().includes(wanted));
  rows.sort((a, b) => sign * (a[key] > b[key] ? 1 : a[key] < b[key] ? -1 : 0));
  const head = make("tr");
  for (const [title, field] of COLUMNS) {
    const cell = make("th", title + (field && field === key ? (sign < 0 ? " ↓" : " ↑") : ""));
    if (field) {
      cell.tabIndex = 0;
      cell.onclick = () => { sorted = [field, field === key ? -sign : field === "nbytes" ? -1 : 1]; table(); };
      cell.onkeydown = (event) => { if (event.key === "Enter") cell.onclick(); };
    }
    head.append(cell);
  }
  $("values").tHead.replaceChildren(head);
  $("values").tBodies[0].replaceChildren(...rows.map((v) => {
    const row = make("tr"), name = path(v.label), where = path(v.layer), live = make("td"), range = make("div", "", "range"), decision = make("td");
    name.append(make("small", v.kind));
    where.append(make("small", v.line));
    for (const [begin, end] of v.spans) {
      const part = make("i");
      part.style.cssText = "left:" + (100 * begin) / plan.seconds + "%;width:" + (100 * (end - begin)) / plan.seconds + "%;background:" + DECISIONS[v.decision];
      range.append(part);
    }
    range.title = v.spans.map(([a, b]) => time(a) + " to " + time(b)).join(", ");
    live.append(range);
    for (const each of [v.decision, ...v.also]) {
      const chip = make("span", each, "chip"), dot = make("i");
      dot.style.background = DECISIONS[each];
      chip.prepend(dot);
      decision.append(chip);
    }
    row.append(name, make("td", size(v.nbytes), "number"), where, live, decision, make("td", v.reason));
    return row;
  }));
}

function press(id, value) {
  for (const button of $(id).children) button.setAttribute("aria-pressed", String(Object.values(button.dataset)[0] === value));
}
function draw() { areas(); lanes(); pareto(); }

async function main() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  press("theme", theme());
  press("by", by);
  words();
  table();
  $("filter").oninput = table;
  const packed = Uint8Array.from(atob($("plotly").textContent), (c) => c.charCodeAt(0));
  const code = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const script = document.createElement("script");
  script.textContent = code;
  document.head.append(script);
  draw();
  link("areas", "lanes");
  link("lanes", "areas");
  $("by").onclick = (event) => { if (event.target.dataset.by) { by = event.target.dataset.by; press("by", by); areas(); } };
  NARROW.onchange = areas;
  $("theme").onclick = (event) => { if (event.target.dataset.theme) { document.documentElement.dataset.theme = event.target.dataset.theme; press("theme", theme()); draw(); } };
  document.documentElement.dataset.ready = "yes";
}
main().catch((error) => { $("problem").textContent = "The charts cannot be drawn: " + error; });
