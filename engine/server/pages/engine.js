// The page /engine: reads the stream of snapshots, and draws each with the functions of the articles' figures. Nothing
// is kept beyond the page; the API key least of all.
import { drawCells, drawMemory, memoryLegend } from "./engine_memory.js";
import { drawFill, drawLanes } from "./play_steps.js";
import { counted, element, legend } from "./play_svg.js";
import { ask, events } from "./stream.js";

const RETRY = 2000; // milliseconds until a stream that has ended is asked for again
const STEPS = 64; // bars
const UNITS = { block: "block", slot: "slot", token: "token" };
const $ = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en");
const percent = (part, whole) => `${whole ? Math.round((100 * part) / whole) : 0}%`;

let stopping = null; // of the stream, while it is read
let snapshot = null, before = null; // the newest one, and the one before
let rows = []; // labels of requests, or null: a request keeps its row until it ends
let chosen = null; // the number of a row

// --- what is said ------------------------------------------------------------------------------------------------

function tiles({ running, waiting, seats, budget, memory, steps }) {
  const last = steps.at(-1), sum = (key) => steps.reduce((total, step) => total + step[key], 0);
  const kept = sum("kept"), refused = sum("refused"), { blocks } = memory;
  const rows = [
    ["Requests", seats ? `${number(running)} of ${number(seats)} seats` : number(running), `${number(waiting)} wait`],
    ["Last step", last ? counted(tokensOf(last), "token") : "–", budget ? `of a budget of ${number(budget)}` : "no budget"],
    ["Steps a second", rate(), last ? `step ${number(last.number)}` : ""],
    ["Drafts that stood", kept + refused ? percent(kept, kept + refused) : "–", kept + refused ? `${number(kept)} of ${number(kept + refused)}, in ${counted(steps.length, "step")}` : "nothing was drafted"],
    ["Memory", percent(memory.tokens_held, memory.tokens_total), `room for ${number(memory.tokens_total)} tokens`],
    ["Set aside, unused", percent(memory.tokens_unused, memory.tokens_held), `${counted(memory.tokens_unused, "token")}${blocks?.shared ? `; ${number(blocks.shared)} shared` : ""}`],
  ];
  return rows.map(([title, value, note]) => element("article", { class: "tile" },
    element("h2", {}, title), element("p", { class: "value" }, value), element("p", { class: "note" }, note)));
}

const tokensOf = (step) => step.prompt + step.again + step.output + step.kept + step.refused;

// Steps a second between this snapshot and the one before.
function rate() {
  const now = snapshot.steps.at(-1), then = before?.steps.at(-1), seconds = snapshot.time - (before?.time ?? 0);
  if (!now || !then || seconds <= 0) return "–";
  return number(Math.round((now.number - then.number) / seconds));
}

function memoryWords({ unit, unit_tokens: tokens, tokens_held: held, tokens_total: total, blocks }) {
  if (!blocks) return `${number(held)} of ${number(total)} tokens are set aside for requests. This cache does not say where.`;
  const said = [`${number(blocks.total)} ${UNITS[unit]}s of ${counted(tokens, "token")}: ${number(blocks.used)} in use`];
  if (blocks.shared) said.push(`${number(blocks.shared)} of them shared`);
  if (unit === "block") said.push(`${number(blocks.kept)} free that the prefix cache finds`);
  const square = blocks.cell_size > 1 ? ` A square stands for ${blocks.cell_size} blocks, and is filled as they are.` : "";
  return `${said.join(", ")}.${square}`;
}

function stepWords(step) {
  if (!step) return "No step in the last seconds.";
  const reads = step.prompt + step.again, drafts = step.kept + step.refused;
  const said = [`Step ${number(step.number)} took ${(1000 * step.seconds).toFixed(1)} ms for ${counted(step.requests, "request")}`];
  said.push(`${counted(tokensOf(step), "token")}${step.budget ? ` of a budget of ${number(step.budget)}` : ""}`);
  if (reads) said.push(`${number(reads)} of prompts${step.again ? ` (${number(step.again)} once more, after a preemption)` : ""}`);
  if (drafts) said.push(`${number(step.kept)} of ${counted(drafts, "draft")} stood`);
  return `${said.join("; ")}.${step.failed ? " It failed: its tokens do not count." : ""}`;
}

function oneWords(request) {
  if (!request) return chosen === null ? "Choose a request to see where its tokens lie." : "This row has no request now.";
  const { label, blocks, held, prompt, output, cached, drafts, adapter, table, preemptions } = request, { memory } = snapshot;
  const said = [`Request ${label}: ${counted(prompt, "token")} of prompt, ${number(output)} of output, ${number(held)} in memory`];
  if (blocks && memory.unit === "block") {
    const places = memory.blocks.cell_size > 1 ? "squares" : "blocks";
    const shown = table.slice(0, 12).join(", ") + (table.length > 12 ? " …" : "");
    said.push(`${counted(blocks, "block")}, in ${places} ${shown}`);
  } else if (blocks && memory.unit === "slot") said.push(`slot ${table[0]}`);
  if (cached) said.push(`${number(cached)} were found when it came`);
  if (drafts) said.push(`${counted(drafts, "draft")} to be checked next`);
  if (preemptions) said.push(`preempted ${counted(preemptions, "time")}`);
  if (adapter) said.push(`adapter ${adapter}`);
  return `${said.join("; ")}.`;
}

const MOVES = {
  fork: ({ blocks }) => `${counted(blocks, "block")} copied: samples of one prompt go apart`,
  out: ({ blocks }) => `${counted(blocks, "block")} copied out to the swap space`,
  in: ({ blocks }) => `${counted(blocks, "block")} copied back from the swap space`,
  preempt: ({ label }) => `request ${label} preempted: another one needs its memory`,
};

function moves({ events: list, time }) {
  return list.toReversed().map((move) => element("li", {},
    element("time", {}, `${(time - move.time).toFixed(1)} s ago`), element("span", {}, MOVES[move.kind](move))));
}

// --- what is drawn -----------------------------------------------------------------------------------------------

const KINDS = [
  ["cell prompt", "prompt"], ["cell output", "output"], ["cell output fresh", "computed in the newest step"],
  ["cell newest", "said, not computed"],
  ["cell draft", "draft that stands"], ["cell refused", "draft refused"],
];
const NOTHING = { name: "", prompt: 0, said: 0, held: 0, now: 0, drafts: 0, lost: 0, state: "ended" };
const NOTES = { waiting: "waits", preempted: "preempted", swapped: "swapped" };

function lane(request, last) {
  if (!request) return NOTHING;
  const isNow = request.step === last?.number;
  return {
    name: request.label, prompt: request.prompt, said: request.output, held: request.held,
    now: isNow ? request.now : 0, spoke: isNow ? request.new : 0, drafts: isNow ? request.checked : 0, lost: 0,
    state: request.state === "running" ? "runs" : "waits", note: NOTES[request.state] ?? `${request.output} of ${request.limit}`,
  };
}

// Tokens on the axis: a power of two, so that the picture keeps its scale for a while.
function longest(requests) {
  const most = Math.max(...requests.map(({ prompt, output, checked }) => prompt + output + checked));
  return 2 ** Math.ceil(Math.log2(Math.max(most, 64)));
}

// Gives the requests that have come the rows of those that have ended, so that no other row moves.
function seat(requests) {
  const labels = requests.map(({ label }) => label);
  rows = rows.map((label) => (labels.includes(label) ? label : null));
  for (const label of labels.filter((one) => !rows.includes(one))) {
    const free = rows.indexOf(null);
    rows[free < 0 ? rows.length : free] = label;
  }
  while (rows.length > Math.max(1, (chosen ?? 0) + 1) && rows.at(-1) === null) rows.pop();
}

function draw() {
  const { memory, requests, steps } = snapshot, last = steps.at(-1);
  seat(requests);
  const inRow = rows.map((name) => requests.find(({ label }) => label === name)), one = inRow[chosen];
  inRow.forEach((request, row) => request && Object.assign(request, { row }));
  $("model").textContent = snapshot.model;
  $("tiles").replaceChildren(...tiles(snapshot));
  $("memory-words").textContent = memoryWords(memory);
  $("memory-legend").replaceChildren(memoryLegend(memory));
  show("memory", (width) => memory.blocks && drawMemory(memory, requests, { before: before?.memory, chosen: one }, width));
  $("swap").hidden = !memory.swap;
  if (memory.swap) $("swap-words").textContent = `${number(memory.swap.used)} of ${counted(memory.swap.total, "block")} hold keys and values of preempted requests.`;
  const inSwap = { label: "The blocks of the swap space", before: before?.memory.swap };
  show("swap-cells", (width) => memory.swap && drawCells(memory.swap, inSwap, width));
  choices();
  $("one").textContent = oneWords(one);

  $("step-words").textContent = stepWords(last);
  const bars = steps.slice(-STEPS).map((step) => [step.prompt + step.again, step.output + step.kept + step.refused]);
  const most = Math.max(8, ...bars.map(([prompt, output]) => prompt + output)), budget = last?.budget <= 4 * most ? last.budget : null;
  const axes = { now: bars.length, last: STEPS, first: (steps.at(-STEPS) ?? steps[0])?.number ?? 1, most: Math.max(most, budget ?? 0), budget };
  show("fill", (width) => drawFill(bars, axes, width));

  const { running, waiting } = snapshot, hidden = running + waiting - requests.length;
  $("request-words").textContent = `${number(running)} run, ${number(waiting)} wait${hidden ? `; ${number(hidden)} of them are not drawn` : ""}.`;
  show("lanes", (width) => requests.length && drawLanes(inRow.map((request) => lane(request, last)), width, longest(requests)));

  $("events").replaceChildren(...moves(snapshot));
  $("no-events").hidden = snapshot.events.length > 0;
}

// Draws into the element `id`, as wide as it is; nothing, if there is nothing to draw.
function show(id, drawn) {
  const made = $(id).clientWidth ? drawn($(id).clientWidth) : null;
  $(id).replaceChildren(...(made ? [made] : []));
}

// A button for each row, which stays where it is, so that the focus does.
function choices() {
  const buttons = $("labels");
  while (buttons.children.length > rows.length) buttons.lastChild.remove();
  for (let row = buttons.children.length; row < rows.length; row += 1) {
    const button = element("button", { type: "button" });
    button.addEventListener("click", () => {
      chosen = chosen === row ? null : row;
      draw();
    });
    buttons.append(button);
  }
  rows.forEach((label, row) => {
    const button = buttons.children[row], words = label === null ? "no request" : `request ${label}`;
    button.textContent = label ?? "–";
    button.setAttribute("aria-label", `row ${row + 1}: ${words}`);
    button.setAttribute("aria-pressed", chosen === row);
  });
}

// --- the stream --------------------------------------------------------------------------------------------------

function say(state, words) {
  if ($("status").textContent !== words) $("status").textContent = words; // else it would be read out again
  $("status").dataset.state = state;
}

async function watch() {
  if (stopping) return;
  const stream = (stopping = new AbortController());
  try {
    const response = await ask("engine/events", $("key").value.trim(), { signal: stream.signal });
    $("ask").hidden = true;
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      [before, snapshot] = [snapshot, event];
      draw();
      say("live", "live");
    }
    throw new Error("the server has ended the stream");
  } catch (error) {
    if (stream.signal.aborted) return;
    stopping = null;
    say("lost", `no answer: ${error.message}`);
    $("ask").hidden = error.status !== 401;
    if (error.status !== 401) setTimeout(() => wanted() && watch(), RETRY);
  }
}

function stop() {
  stopping?.abort();
  stopping = null;
}

const wanted = () => !document.hidden && $("pause").getAttribute("aria-pressed") === "false";

function changed() {
  if (wanted()) watch();
  else {
    stop();
    say("waiting", "paused");
  }
}

$("pause").addEventListener("click", () => {
  const isPaused = $("pause").getAttribute("aria-pressed") === "true";
  $("pause").setAttribute("aria-pressed", !isPaused);
  changed();
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  watch();
});
document.addEventListener("visibilitychange", changed);
new ResizeObserver(() => snapshot && draw()).observe(document.querySelector("main"));
$("lanes-legend").append(legend(KINDS));
changed();
