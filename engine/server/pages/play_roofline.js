// The roofline slider: what does a decode step wait for, memory or arithmetic? Part 13.
//
// open(data): data is what articles/figures/13_roofline_play.py writes, whose `pieces` is the function below.
import { box, counted, element, picture, shape, text } from "./play_svg.js";

const BATCHES = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256];
const CONTEXTS = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768];
const PRICES = [0.1, 0.25, 0.5, 1, 2, 3, 5, 10];
const HEADS = { own: "as the model has", each: "one for each query head", one: "one for all" };
const BAR = 18, LEFT = 52, RIGHT = 14, TOP = 10, BOTTOM = 36, HEIGHT = 250;

export function open(data) {
  return {
    label: "Roofline: what a decode step waits for",
    choices: [
      { name: "model", label: "model", options: Object.keys(data.models).map((name) => [name, name]), start: "gpt2" },
      { name: "machine", label: "machine", options: Object.entries(data.machines).map(([name, it]) => [name, it.words]), start: "cpu" },
      { name: "bits", label: "bits of a weight", options: [32, 16, 8, 4].map((bits) => [bits, `${bits}`]), start: 32 },
      { name: "heads", label: "heads of keys and values", options: Object.entries(HEADS), start: "own" },
      { name: "batch", label: "sequences in a step", steps: BATCHES, start: 1, words: String },
      { name: "context", label: "tokens of each", steps: CONTEXTS, start: 64, words: thousands },
      { name: "price", label: "an hour of the machine", steps: PRICES, start: data.price_per_hour, words: (price) => `$${price}` },
    ],
    moments: () => 0,
    draw: (chosen, moment, width) => element(
      "div", { class: "roof" }, bars(data, chosen, width), numbers(data, chosen), chart(data, chosen, width), ...measured(data, chosen),
    ),
    words: (chosen) => sentence(data, chosen),
  };
}

// --- the arithmetic --------------------------------------------------------------------------------------------

// Seconds of each piece of a step: `weights` and `keys` wait for memory, `products` and `scores` for arithmetic.
export function pieces(data, { model, machine, batch, context, bits, heads = "own" }) {
  const it = data.models[model], on = data.machines[machine];
  const keyHeads = { own: it.key_heads, each: it.query_heads, one: 1 }[heads];
  const weights = it.weights + (keyHeads - it.key_heads) * it.key_head_weights;
  const numbers = batch * context * it.layers * it.head_dim; // of a head
  return {
    weights: (weights * bits) / 8 / on.bandwidth,
    keys: (numbers * 2 * keyHeads * on.key_bytes) / on.bandwidth,
    products: (2 * weights * batch) / on.peak,
    scores: (numbers * 4 * it.query_heads) / on.peak,
  };
}

const waits = (found) => ({ memory: found.weights + found.keys, arithmetic: found.products + found.scores });

// Seconds that a step takes at least.
const floor = (data, step) => Math.max(...Object.values(waits(pieces(data, step))));

const dollars = (data, chosen) => ((floor(data, chosen) / chosen.batch) * chosen.price * 1e6) / 3600; // a million tokens

// --- words -----------------------------------------------------------------------------------------------------

const thousands = (n) => n.toLocaleString("en");
const digits = (n) => (n >= 100 ? thousands(Math.round(n)) : String(Number(n.toPrecision(3))));
const time = (seconds) => (seconds >= 1 ? `${digits(seconds)} s` : seconds >= 1e-3 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds * 1e6)} µs`);
const money = (amount) => `$${amount >= 1 ? amount.toFixed(2) : Number(amount.toPrecision(2))}`;
function amount(n, unit) { // 4.22e12, "B/s" -> "4.22 TB/s"
  const [by, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([size]) => n >= size) ?? [1, ""];
  return `${digits(n / by)} ${letter}${unit}`;
}

function sentence(data, chosen) {
  const { memory, arithmetic } = waits(pieces(data, chosen));
  const longest = data.models[chosen.model].longest;
  const late = chosen.context > longest ? ` ${chosen.model} sees ${thousands(longest)} tokens at most: this is what more of them would cost.` : "";
  const [waited, other] = memory >= arithmetic ? ["memory", "the arithmetic"] : ["arithmetic", "the bytes"];
  const least = Math.max(memory, arithmetic), rest = Math.min(memory, arithmetic);
  return `A step of ${counted(chosen.batch, "sequence")} waits for ${waited}: ${time(least)} at least, and ${other} would be done in ${time(rest)}. ` +
    `So it gives ${digits(chosen.batch / least)} tokens a second at most.${late}`;
}

function numbers(data, chosen) {
  const least = floor(data, chosen);
  const said = {
    "a step, at least": time(least),
    "tokens a second, at most": digits(chosen.batch / least),
    "for each sequence": digits(1 / least),
    "a million tokens, at least": money(dollars(data, chosen)),
  };
  return element("dl", { class: "roof-numbers" }, ...Object.entries(said).map(
    ([words, value]) => element("div", {}, element("dt", {}, words), element("dd", {}, value)),
  ));
}

// --- what is seen ----------------------------------------------------------------------------------------------

function bars(data, chosen, width) {
  const found = pieces(data, chosen), wait = waits(found), least = Math.max(wait.memory, wait.arithmetic);
  const scale = (seconds) => (seconds / least) * width;
  const below = width < 440 ? 18 : 0; // where a line is too short for both, a bar's pieces are named below it
  const rows = [["memory", [["weights", "weights"], ["keys", "keys and values"]]], ["arithmetic", [["products", "products"], ["scores", "scores"]]]];
  const shapes = rows.flatMap(([name, parts], row) => {
    const y = row * (BAR + 30 + below), bar = [];
    let x = 0;
    for (const [part] of parts) {
      bar.push(box(x, y + 20, scale(found[part]), BAR, `roof-${part}`));
      x += scale(found[part]);
    }
    const split = parts.map(([part, words]) => `${words} ${time(found[part])}`).join(" · ");
    return [
      text(0, y + 14, `${name} ${time(wait[name])}`, wait[name] === least ? "roof-longest" : null),
      text(width, y + 14 + (below && BAR + below + 2), split, "soft end"), ...bar,
    ];
  });
  const label = `Two bars: ${time(wait.memory)} for memory, ${time(wait.arithmetic)} for arithmetic`;
  return picture(width, 2 * (BAR + below) + 54, label, ...shapes);
}

// Milliseconds of a step against the number of sequences, both on logarithmic scales, with what was measured.
function chart(data, chosen, width) {
  const curve = BATCHES.map((batch) => [batch, waits(pieces(data, { ...chosen, batch }))]);
  const dots = dotsOf(data, chosen);
  const all = [...curve.flatMap(([, wait]) => Object.values(wait)), ...dots.flatMap((dot) => [dot.ms / 1e3, dot.least])];
  const top = Math.ceil(Math.log10(Math.max(...all))), low = Math.max(Math.floor(Math.log10(Math.min(...all))), top - 5);
  const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
  const x = (batch) => LEFT + (Math.log2(batch) / 8) * (right - LEFT);
  const y = (seconds) => Math.min(bottom, TOP + ((top - Math.log10(seconds)) / (top - low)) * (bottom - TOP));
  const shapes = [];
  for (let power = low; power <= top; power++) {
    const at = y(10 ** power);
    shapes.push(shape("path", { d: `M${LEFT} ${at}H${right}`, class: "line" }), text(LEFT - 6, at + 4, time(10 ** power), "soft end"));
  }
  for (let power = 0; power <= 8; power += width < 480 ? 2 : 1) {
    shapes.push(text(x(2 ** power), bottom + 16, `${2 ** power}`, "soft middle"));
  }
  shapes.push(text((LEFT + right) / 2, HEIGHT - 4, "sequences in a step", "soft middle"));
  for (const name of ["memory", "arithmetic"]) {
    const points = curve.map(([batch, wait]) => `${x(batch)},${y(wait[name])}`).join(" ");
    shapes.push(shape("polyline", { points, class: `roof-line roof-${name}` }));
  }
  const here = floor(data, chosen);
  shapes.push(shape("path", { d: `M${x(chosen.batch)} ${TOP}V${bottom}`, class: "frame" }), shape("circle", { cx: x(chosen.batch), cy: y(here), r: 4, class: "roof-here" }));
  for (const dot of dots) {
    const mark = shape("circle", { cx: x(dot.batch), cy: y(dot.ms / 1e3), r: 5, class: dot.bits === chosen.bits ? "roof-dot" : "roof-dot roof-other" });
    mark.append(shape("title", {}, row(dot)));
    shapes.push(shape("path", { d: `M${x(dot.batch)} ${y(dot.least)}V${y(dot.ms / 1e3)}`, class: "frame" }), mark);
  }
  const label = `Time of a step for 1 to 256 sequences: at least the upper of two lines, memory and arithmetic; ${counted(dots.length, "measured step")}`;
  return picture(width, HEIGHT, label, ...shapes);
}

// The measured steps of this model on this machine, with what each would have taken at least, in seconds.
const dotsOf = (data, { model, machine }) => data.dots
  .filter((dot) => dot.model === model && dot.machine === machine)
  .map((dot) => ({ ...dot, least: floor(data, dot) }));

const row = (dot) => `${counted(dot.batch, "sequence")} of ${thousands(dot.context)} tokens, ${dot.bits} bits (${dot.what}): ${time(dot.ms / 1e3)}, ` +
  `at least ${time(dot.least)} (${Math.round((100 * dot.least * 1e3) / dot.ms)}%); ${dot.record}`;

function measured(data, chosen) {
  const dots = dotsOf(data, chosen), on = data.machines[chosen.machine];
  const legend = [["roof-memory", "memory"], ["roof-arithmetic", "arithmetic"], ["roof-dot", "measured, with these bits"], ["roof-dot roof-other", "with others"]];
  const said = dots.length ? "Measured, and the line down to what it takes at least:" : "Of this model, nothing was measured on this machine.";
  return [
    element("p", { class: "roof-legend" }, ...legend.map(([kind, words]) => element("span", {}, element("i", { class: kind }), words))),
    element("p", {}, said),
    element("ul", { class: "roof-rows" }, ...dots.map((dot) => element("li", {}, row(dot)))),
    element("p", { class: "roof-source" }, `${on.words}: ${amount(on.bandwidth, "B/s")}, ${amount(on.peak, "FLOP/s")}, ${on.source}.`),
  ];
}
