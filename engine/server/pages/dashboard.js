// The live page of Part 11: asks for /dashboard/data once a second and draws it. No library, no other host.
"use strict";

const SHOWN = 180; // seconds, as the server keeps them
const HEIGHT = 170, LEFT = 50, RIGHT = 8, TOP = 10, BOTTOM = 20;
const NO_VALUE = "–";

// --- numbers as people read them ---------------------------------------------------------------------------

const count = (v) => (v === null ? NO_VALUE : v >= 100 || Number.isInteger(v) ? Math.round(v).toLocaleString("en") : v.toFixed(1));
const percent = (v) => (v === null ? NO_VALUE : `${(100 * v).toFixed(v && v < 0.1 ? 1 : 0)}%`);
const bytes = (v) => (v >= 2 ** 30 ? `${(v / 2 ** 30).toFixed(1)} GiB` : `${Math.round(v / 2 ** 20)} MiB`);
function seconds(v) {
  if (v === null) return NO_VALUE;
  if (v >= 1) return `${v.toFixed(v >= 10 ? 1 : 2)} s`;
  return `${(1000 * v).toFixed(v >= 0.1 ? 0 : v >= 0.01 ? 1 : 2)} ms`;
}
// On an axis, round numbers stand without zeros behind the point.
const short = (words) => words.replace(/\.0+(?=\D|$)/, "").replace(/(\.\d*?)0+(?=\D|$)/, "$1");
function duration(v) {
  const s = Math.floor(v), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return h ? `${h} h ${m % 60} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

// --- from the server's columns to what is drawn ------------------------------------------------------------

// Counters only go up: what is drawn is by how much, in each second.
const growth = (column) => column.slice(1).map((value, i) => value - column[i]);
const last = (column) => (column.length ? column[column.length - 1] : null);
// A single second jumps: a tile shows the mean of the last five.
const recent = (column) => (column.length ? column.slice(-5).reduce((a, b) => a + b) / Math.min(5, column.length) : null);

function series(columns) {
  const steps = growth(columns.steps), sequences = growth(columns.step_sequences);
  const gauge = (name) => columns[name].slice(1);
  const percentiles = (kind) => Object.fromEntries(Object.entries(columns[kind]).map(([p, values]) => [p, values.slice(1)]));
  return {
    second: columns.second.slice(1),
    output: growth(columns.generation_tokens),
    prompt: growth(columns.prompt_tokens),
    perStep: steps.map((n, i) => (n ? sequences[i] / n : null)),
    running: gauge("running"), waiting: gauge("waiting"), kv: gauge("kv_usage"),
    ttft: percentiles("ttft"), tpot: percentiles("tpot"),
  };
}

const TILES = [
  ["Output tokens/s", (d, s) => [count(recent(s.output)), `${count(d.totals["vllm:generation_tokens"])} in all`]],
  // At the end of the last second, as in the chart's legend.
  ["Requests", (d, s) => [`${count(last(s.running))} running`, `${count(last(s.waiting))} waiting, ${count(d.ended.stop + d.ended.length)} done`]],
  ["Time to first token", (d, s) => [seconds(last(s.ttft.p50)), `median; p95 ${seconds(last(s.ttft.p95))}`]],
  ["Time per output token", (d, s) => [seconds(last(s.tpot.p50)), `median; p95 ${seconds(last(s.tpot.p95))}`]],
  ["Requests per step", (d, s) => [count(last(s.perStep)), `${count(last(s.prompt))} prompt tokens/s`]],
  ["KV cache", (d, s) => [percent(last(s.kv)), `${count(d.totals["vllm:num_preemptions"])} preemptions`]],
];
// The times above tell little of whoever left before the end.
const EARLY = (d) => `Requests without a whole answer: ${count(d.ended.abort)} aborted, ${count(d.ended.error)} failed, ${count(d.ended.reject)} refused.`;

const THREE = (kind) => (s) => [["p50", "a", s[kind].p50], ["p95", "b", s[kind].p95], ["p99", "c", s[kind].p99]];
const CHARTS = [
  { title: "Output tokens per second", unit: count, area: true, of: (s) => [["output", "a", s.output]] },
  { title: "Time to first token", unit: seconds, of: THREE("ttft") },
  { title: "Time per output token", unit: seconds, of: THREE("tpot") },
  { title: "Requests", unit: count, whole: true, of: (s) => [["running", "a", s.running], ["waiting", "b", s.waiting]] },
  { title: "Requests per step, mean", unit: count, area: true, of: (s) => [["batch size", "a", s.perStep]] },
  { title: "KV cache in use", unit: percent, area: true, top: 1, of: (s) => [["share", "a", s.kv]] },
];

// --- drawing -----------------------------------------------------------------------------------------------

function element(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}
function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// The smallest round number that `value` does not exceed.
function round(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((m) => m * power).find((m) => m >= value * 0.9999);
}

class Chart {
  constructor(about, parent) {
    this.about = about;
    this.box = element("article", { class: "chart" });
    const head = element("div", { class: "head" });
    this.legend = element("div", { class: "legend" });
    this.when = element("b"); // beside the title: the legend must not wrap because of it
    head.append(this.when, element("h2", {}, about.title), this.legend);
    this.svg = shape("svg", { role: "img", "aria-label": about.title });
    this.box.append(head, this.svg);
    parent.append(this.box);
    this.svg.addEventListener("pointermove", (event) => point(this.secondAt(event)));
    this.svg.addEventListener("pointerleave", () => point(null));
  }

  x(second) { return LEFT + ((this.width - LEFT - RIGHT) * (second - this.first)) / (SHOWN - 1); }
  secondAt(event) {
    const share = (event.offsetX - LEFT) / (this.width - LEFT - RIGHT);
    return Math.round(this.first + share * (SHOWN - 1));
  }

  draw(data, pointed) {
    const { about, svg } = this, lines = about.of(data);
    this.width = svg.clientWidth || 360;
    this.first = (last(data.second) ?? SHOWN - 1) - SHOWN + 1;
    svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const values = lines.flatMap(([, , column]) => column.filter((v) => v !== null));
    const least = about.whole ? 4 : 0;
    const top = about.top || round(Math.max(least, ...values));
    const y = (v) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - v / top);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * top);
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: at, y2: at }));
      parts.push(shape("text", { class: "end", x: LEFT - 6, y: at + 4 }, share ? short(about.unit(share * top)) : "0"));
    }
    for (const [back, words] of [[180, this.width < 330 ? "3 min" : "3 min ago"], [120, "2 min"], [60, "1 min"], [1, "now"]]) {
      const anchor = back === 1 ? "end" : back === 180 ? "start" : "middle";
      parts.push(shape("text", { class: anchor, x: this.x(this.first + SHOWN - back), y: HEIGHT - 4 }, words));
    }
    for (const [, colour, column] of lines) {
      for (const run of runs(data.second, column)) {
        const path = run.map(([second, v]) => `${this.x(second).toFixed(1)},${y(v).toFixed(1)}`).join("L");
        const [x1, x2] = [run[0][0], run[run.length - 1][0]].map((second) => this.x(second).toFixed(1));
        if (about.area) parts.push(shape("path", { class: "area", d: `M${x1},${y(0)}L${path}L${x2},${y(0)}Z` }));
        parts.push(shape("path", { class: `curve ${colour}`, d: `M${path}${run.length === 1 ? "h.1" : ""}` }));
      }
    }
    if (!values.length) parts.push(shape("text", { class: "none", x: (LEFT + this.width) / 2, y: y(top / 2) - 8 }, "nothing to show yet"));
    const at = pointed === null ? -1 : data.second.indexOf(pointed);
    if (at >= 0) parts.push(shape("line", { class: "cursor", x1: this.x(pointed), x2: this.x(pointed), y1: TOP, y2: HEIGHT - BOTTOM }));
    svg.replaceChildren(...parts);
    this.when.textContent = at >= 0 ? `${last(data.second) - pointed + 1} s ago` : "";
    this.legend.replaceChildren(...lines.map(([name, colour, column]) =>
      element("span", { class: colour }, `${name} ${about.unit(at >= 0 ? column[at] : last(column))}`)));
  }
}

// Stretches of a column without a gap, as [second, value].
function runs(second, column) {
  const found = [];
  let run = null;
  column.forEach((value, i) => {
    if (value === null) run = null;
    else {
      if (!run) found.push((run = []));
      run.push([second[i], value]);
    }
  });
  return found;
}

// --- the page ----------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);
const charts = [];
let latest = null, pointed = null;

function point(second) { // the same second is pointed at in every chart
  pointed = second;
  if (latest) for (const chart of charts) chart.draw(latest, pointed);
}

// What an extension adds: a number, what it means, and how it divides.
function panel({ title, value, note, rows }) {
  const box = element("article", { class: "tile panel" }), list = element("ul");
  for (const [label, share, text, colour] of rows) {
    const row = element("li"), bar = shape("svg", { class: "bar", "aria-hidden": "true" });
    bar.append(shape("rect", { class: colour, width: `${(100 * share).toFixed(2)}%`, height: "100%" }));
    row.append(element("span", {}, label), bar, element("span", {}, percent(share)), element("b", {}, text));
    list.append(row);
  }
  box.append(element("h2", {}, title), element("p", { class: "value" }, value), element("p", { class: "note" }, note), list);
  return box;
}

function show(answer) {
  latest = series(answer.seconds);
  $("model").textContent = answer.model_name;
  $("window").textContent = answer.window;
  $("tiles").replaceChildren(...TILES.map(([title, of]) => {
    const [value, note] = of(answer, latest), tile = element("article", { class: "tile" });
    tile.append(element("h2", {}, title), element("p", { class: "value" }, value), element("p", { class: "note" }, note));
    return tile;
  }));
  $("panels").replaceChildren(...(answer.panels ?? []).map(panel));
  $("early").textContent = EARLY(answer);
  $("early").dataset.failed = answer.ended.error > 0;
  const { memory, memory_total: total, gpus } = answer.now;
  const lines = memory === null ? [] : [`This process holds ${bytes(memory)} of the machine's ${bytes(total)}.`];
  for (const gpu of gpus) lines.push(`${gpu.device}: ${bytes(gpu.used)} of ${bytes(gpu.total)} in use.`);
  $("memory").textContent = lines.join(" ");
  for (const chart of charts) chart.draw(latest, pointed);
}

function say(state, words) {
  $("status").dataset.state = state;
  $("status").textContent = words;
}

async function ask() {
  const response = await fetch("dashboard/data", { signal: AbortSignal.timeout(10000) });
  if (!response.ok) throw new Error(`the server answers ${response.status}`);
  return response.json();
}

async function poll() {
  if (!document.hidden || !latest) {
    try {
      const answer = await ask();
      show(answer);
      say("live", `live, up for ${duration(answer.uptime)}`);
    } catch (error) {
      say("lost", `no answer: ${error instanceof TypeError ? "the server cannot be reached" : error.message}`);
    }
  }
  setTimeout(poll, 1000);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const about of CHARTS) charts.push(new Chart(about, $("charts")));
  new ResizeObserver(() => point(pointed)).observe($("charts"));
  for (const link of document.querySelectorAll("nav a")) { // pages that later parts bring, where they are served
    fetch(link.href, { method: "HEAD" }).then(({ ok }) => { link.hidden = !ok; }, () => {});
  }
  poll();
});
