// The steps of an engine: a lane per request with a cell per token, and how full each step was. Part 8.
//
// A lane is one request after a step:
//   name, prompt, said: tokens of the prompt, and of the output so far
//   held: how many of its first tokens have keys and values in the cache
//   now: tokens that this step computed for it, drafts included; spoke: tokens that it said in this step
//   drafts: how many drafts this step verified for it (Part 16); the first spoke - 1 of them stand
//   lost: tokens that it held when it was preempted, until it holds them again; else 0
//   limit: tokens that its output may have; may be left out
//   state: "waits", "runs" or "ended"; note: words at the end of the lane
import { areBeside, box, counted, element, legend, listed, picture, shape, text } from "./play_svg.js";

const ROW = 18, NAME = 26, LETTER = 8, NOTE = 64, CHART = 84, AXIS = 30; // pixels
const APART = 4; // pixels: wider cells are drawn one by one
const BETWEEN = 24; // pixels between drawings beside each other, as .play-columns has them

// --- drawings ----------------------------------------------------------------------------------------------------

// A row for each lane; `longest` is how many tokens the longest may have.
export function drawLanes(lanes, width, longest) {
  const left = Math.max(NAME, ...lanes.map(({ name }) => LETTER * name.length + 4));
  const cell = (width - left - NOTE) / longest;
  const rows = lanes.flatMap((lane, row) => drawLane(lane, left, row * ROW, cell, width));
  return picture(width, lanes.length * ROW + 2, "Requests and their tokens", ...rows);
}

function drawLane(lane, left, y, cell, width) {
  const { prompt, said, held, now, drafts, lost } = lane, known = prompt + said;
  const before = held - (drafts ? lane.spoke : now); // held before this step
  const shapes = [text(0, y + 13, lane.name, lane.state === "runs" ? null : "soft")];
  const put = (from, to, kind) => shapes.push(...cells(from, to, kind, left, y + 3, cell));
  put(0, prompt, "planned prompt");
  put(prompt, prompt + (lane.limit ?? said), "planned output");
  put(held, lost, "lost");
  put(0, Math.min(held, prompt), "prompt");
  put(prompt, held, "output");
  if (now) put(before, held, "fresh");
  if (drafts) {
    put(known - lane.spoke, known - 1, "draft"); // what stands
    put(known - 1, known - lane.spoke + drafts, "refused");
  }
  if (said) put(known - 1, known, "newest"); // only the next step computes it
  shapes.push(text(width, y + 13, lane.note ?? "", "soft end"));
  return shapes;
}

// The tokens from:to of a lane, one by one where there is room to tell them apart.
function cells(from, to, kind, left, y, cell) {
  const rect = (start, count) =>
    box(left + start * cell, y, count * cell - (cell >= APART ? 1 : 0), ROW - 5, `cell ${kind}`);
  if (to <= from) return [];
  if (cell < APART) return [rect(from, to - from)];
  return Array.from({ length: to - from }, (_, i) => rect(from + i, 1));
}

// A bar for each step: how many tokens of prompts and of outputs it computed. `steps` has [prompt, output] for
// each, the first of step `first`, `now` is how many there are; `most` tokens and `last` steps give the axes their lengths.
export function drawFill(steps, { first = 1, now, last, most, budget }, width) {
  const x = (step) => AXIS + ((step - 1) * (width - AXIS)) / last, bar = (width - AXIS) / last;
  const y = (tokens) => 6 + CHART * (1 - tokens / most);
  const shapes = [shape("path", { class: "line", d: `M${AXIS} ${y(0)}H${width}` })];
  steps.forEach(([prompt, output], i) => {
    const kind = i + 1 === now ? " current" : "", left = x(i + 1), wide = bar - (bar >= APART ? 1 : 0);
    shapes.push(box(left, y(output), wide, y(0) - y(output), `cell output${kind}`));
    shapes.push(box(left, y(output + prompt), wide, y(output) - y(output + prompt), `cell prompt${kind}`));
  });
  if (budget) {
    shapes.push(shape("path", { class: "budget", d: `M${AXIS} ${y(budget)}H${width}` }));
    shapes.push(text(AXIS - 4, y(budget) + 4, budget, "end"));
  }
  if (!budget || budget < most * 0.8) shapes.push(text(AXIS - 4, y(most) + 8, most, "soft end"));
  shapes.push(text(AXIS - 4, y(0), "0", "soft end"), text(AXIS, y(0) + 15, `step ${first}`, "soft"));
  shapes.push(text(width, y(0) + 15, first + last - 1, "soft end"));
  const label = `Tokens in each step${budget ? `, of a budget of ${budget}` : ""}`;
  return picture(width, CHART + 26, label, ...shapes);
}

// --- a recording -------------------------------------------------------------------------------------------------
//
// {choice, requests: [[name, prompt, output, arrives], ...], runs: [{name, words, seats, budget, marks, steps}, ...]}:
// a request arrives when `arrives` steps are done; a reader who predicts is asked before the steps of `marks`. A step
// is {work: {name: [tokens computed, tokens said, drafts among those computed (0 if left out)]}, preempted: [name, ...]}.

// The lanes after `moment` steps of a run.
export function lanesAt(requests, run, moment) {
  const nothing = { said: 0, held: 0, now: 0, spoke: 0, drafts: 0, lost: 0, first: null };
  const lanes = requests.map(([name, prompt, limit, arrives]) => ({ name, prompt, limit, arrives, ...nothing }));
  const named = Object.fromEntries(lanes.map((lane) => [lane.name, lane]));
  run.steps.slice(0, moment).forEach(({ work, preempted = [] }, i) => {
    for (const lane of lanes) Object.assign(lane, { now: 0, spoke: 0, drafts: 0, thrown: false });
    for (const name of preempted) {
      const lane = named[name];
      Object.assign(lane, { lost: Math.max(lane.lost, lane.held), held: 0, thrown: true });
    }
    for (const [name, numbers] of Object.entries(work)) advance(named[name], i + 1, ...numbers);
  });
  for (const lane of lanes) describe(lane, moment);
  return lanes;
}

function advance(lane, step, computed, spoke, drafts = 0) {
  Object.assign(lane, { now: computed, spoke, drafts });
  lane.said += spoke;
  // The token said last is not computed yet, and neither are drafts that were refused.
  lane.held = spoke ? lane.prompt + lane.said - 1 : lane.held + computed;
  if (lane.held >= lane.lost) lane.lost = 0;
  if (spoke && lane.first === null) lane.first = step;
}

function describe(lane, moment) {
  lane.there = lane.arrives <= moment;
  lane.ended = lane.said >= lane.limit;
  lane.state = lane.ended ? "ended" : lane.held ? "runs" : "waits";
  lane.wait = (lane.first ?? moment) - lane.arrives; // steps from its arrival to its first word
  if (!lane.there) lane.note = `after ${lane.arrives}`;
  else if (lane.ended) lane.note = "done";
  else if (lane.state === "waits") lane.note = lane.said ? "put back" : `waits ${lane.wait}`;
  else lane.note = lane.now ? `+${lane.now}` : "";
}

export function open(data) {
  const { requests, runs } = data;
  const run = (chosen) => runs.find(({ name }) => name === chosen.run);
  const longest = Math.max(...requests.map(([, prompt, output]) => prompt + output));
  const tokens = ({ work }) => Object.values(work).reduce((sum, [computed]) => sum + computed, 0);
  const options = runs.map(({ name, words }) => [name, words]);
  const last = Math.max(...runs.map(({ steps }) => steps.length));
  return {
    label: data.label,
    choices: [{ name: "run", label: data.choice, options, start: runs[0].name }],
    moments: (chosen) => run(chosen).steps.length,
    draw(chosen, moment, width) {
      const { steps, budget } = run(chosen), most = Math.max(budget ?? 0, ...steps.map(tokens));
      const fill = steps.slice(0, moment).map((_, i) => split(lanesAt(requests, run(chosen), i + 1)));
      const beside = areBeside(width);
      const wide = beside ? Math.floor((width - BETWEEN) / 2) : width;
      return element("div", {},
        legend(kindsOf(runs)),
        element("div", { class: beside ? "play-columns" : null },
          drawLanes(lanesAt(requests, run(chosen), moment), wide, longest),
          drawFill(fill, { now: moment, last, most, budget }, wide)));
    },
    words: (chosen, moment) => sentence(lanesAt(requests, run(chosen), moment), run(chosen), moment),
    question: runs.some(({ marks }) => marks.length) && ((chosen, moment) => {
      const { marks, steps, budget } = run(chosen);
      if (!marks.includes(moment)) return null;
      const lanes = lanesAt(requests, run(chosen), moment - 1).filter(({ there, ended }) => there && !ended);
      const fields = lanes.map((lane) => [
        `${lane.name} ${lane.state === "waits" ? "waits, " : ""}lacks ${lane.prompt + lane.said - lane.held}`,
        steps[moment - 1].work[lane.name]?.[0] ?? 0,
      ]);
      const seats = counted(run(chosen).seats, "seat"), limit = budget ? `a budget of ${budget} tokens, and ${seats}` : seats;
      return { ask: `Step ${moment} has ${limit}. How many tokens of each are computed in it?`, fields };
    }),
  };
}

// Of one step: the tokens of prompts and of outputs, and what a preempted request computes again counts as prompt.
function split(lanes) {
  const output = lanes.reduce((sum, { now, spoke, drafts }) => sum + (spoke && now === drafts + 1 ? now : 0), 0);
  return [lanes.reduce((sum, { now }) => sum + now, 0) - output, output];
}

// What the legend of these runs has: preemption and drafts only where there are any.
function kindsOf(runs) {
  const steps = runs.flatMap((run) => run.steps);
  const kinds = [
    ["cell prompt", "prompt"], ["cell output", "output"], ["cell output fresh", "computed in this step"],
    ["cell newest", "said, not computed"],
  ];
  if (steps.some(({ preempted }) => preempted)) kinds.push(["cell lost", "lost to preemption"]);
  if (steps.some(({ work }) => Object.values(work).some(([, , drafts]) => drafts))) {
    kinds.push(["cell draft", "draft that stands"], ["cell refused", "draft refused"]);
  }
  return kinds;
}

function sentence(lanes, { budget, steps }, moment) {
  const there = lanes.filter((lane) => lane.there);
  const names = (which) => there.filter(which).map(({ name }) => name);
  const waiting = names(({ state }) => state === "waits");
  if (!moment) return `${listed(waiting)} ${waiting.length > 1 ? "are" : "is"} there, and nothing is computed yet.`;
  const total = there.reduce((sum, { now }) => sum + now, 0);
  const said = [`Step ${moment}: ${budget ? `${total} of ${budget} tokens` : counted(total, "token")}.`];
  for (const { name, lost, thrown } of there) {
    if (thrown) said.push(`${name} is preempted: ${counted(lost, "token")} must be computed again.`);
  }
  const reading = there.filter(({ now, spoke, drafts }) => now && !(spoke && now === drafts + 1));
  const reads = reading.map(({ name, now, spoke }) => `${name} reads ${now}${spoke ? " and speaks" : ""}`);
  if (reads.length) said.push(`${reads.join(", ")}.`);
  const speaking = names(({ now, spoke, drafts }) => spoke && now === 1 && !drafts);
  if (speaking.length) said.push(`${listed(speaking)} ${speaking.length > 1 ? "say a token each" : "says a token"}.`);
  for (const { name, drafts, spoke } of there) {
    if (drafts) said.push(`Of ${name}'s ${counted(drafts, "draft")}, ${spoke - 1} ${spoke === 2 ? "stands" : "stand"}.`);
  }
  if (waiting.length) said.push(`${listed(waiting)} ${waiting.length > 1 ? "wait" : "waits"}.`);
  const mean = there.reduce((sum, { wait }) => sum + wait, 0) / there.length;
  const far = moment < steps.length ? " so far" : "";
  const done = names(({ ended }) => ended).length;
  said.push(`Done: ${done} of ${lanes.length}. Mean wait for the first word${far}: ${mean.toFixed(1)} steps.`);
  return said.join(" ");
}
