// A cache in blocks: sequences with their block tables, and whose tokens lie in which block. Part 12.
//
// A memory is the plan of a cache at one moment:
//   block_size: tokens of a block, P
//   references: for each block, in how many tables it stands
//   known: numbers of the blocks that the prefix cache can find
//   sequences: [{name, computed, known, table, words, hue}]: how many of its first tokens have keys and values, how
//     many are known, its blocks in order, the text of each token (may be left out), and a colour, 0 to 6
//   absent: [[name, words], ...]: who has no blocks, and why
import { areBeside, box, counted, element, legend, listed, picture, shape, text } from "./play_svg.js";

const NAME = 30, CELL = 14, GAP = 4, ROW = 40, HEAD = 15; // pixels
const ACROSS = 16; // cells of a block beside each other, at most
const HUES = 7;
const KINDS = [
  ["place hue-0", "a token, coloured by sequence"], ["place uncomputed", "known, not computed"],
  ["place aside", "set aside, unused"], ["place kept", "free, can be found (#)"], ["place free", "free"],
];
const SIDE_BY_SIDE = 640; // pixels of width from which tables and blocks stand beside each other

// --- drawings ----------------------------------------------------------------------------------------------------

// A row for each sequence: its tokens, in groups of a block, and below them the block's number. `longest` is how
// many tokens there is room for.
export function drawTables({ block_size: P, sequences, absent }, width, longest) {
  const blocks = Math.ceil(longest / P), cell = Math.min(CELL, (width - NAME - blocks * GAP) / (blocks * P));
  const x = (i) => NAME + i * cell + Math.floor(i / P) * GAP;
  const shapes = sequences.flatMap((sequence, row) => {
    const { name, table, computed, known, hue, words = [] } = sequence, y = row * ROW + 2;
    const places = Array.from({ length: Math.max(table.length * P, known) }, (_, i) => {
      const block = table[Math.floor(i / P)], where = { "data-cell": block === undefined ? null : `${block}:${i % P}` };
      if (i >= known) return box(x(i), y, cell - 1, CELL - 1, "place aside", where);
      return box(x(i), y, cell - 1, CELL - 1, `place ${i < computed ? `hue-${hue}` : "uncomputed"}`, {
        ...where, "data-sequence": name, "data-token": i, role: "button", tabindex: -1,
        "aria-label": `token ${i} of ${name}${words[i] ? `: ${words[i].trim()}` : ""}`,
      });
    });
    const entries = table.map((block, k) => shape("text", {
      x: x(k * P) + (P * cell) / 2, y: y + CELL + 12, class: "middle entry", "data-entry": `${name}:${k}`,
    }, block));
    return [text(0, y + 11, name), ...places, ...entries];
  });
  absent.forEach(([name, words], i) => {
    const y = sequences.length * ROW + 13 + i * 18;
    shapes.push(text(0, y, name, "soft"), text(NAME, y, words, "soft"));
  });
  const height = sequences.length * ROW + absent.length * 18 + 8;
  const drawn = picture(width, height, "Sequences and their block tables", ...shapes);
  drawn.setAttribute("role", "group"); // its tokens are reached by keys
  drawn.querySelector("[data-token]")?.setAttribute("tabindex", 0);
  return drawn;
}

// The blocks in the order of their numbers: whose tokens lie in them, references above one, and # if it is known.
export function drawBlocks(memory, width) {
  const { block_size: P, references, known } = memory;
  const across = Math.min(P, ACROSS), down = Math.ceil(P / ACROSS);
  const cell = Math.min(CELL, (width - 2) / across), wide = across * cell, high = down * CELL;
  const columns = Math.max(1, Math.floor((width + 8) / (wide + 8)));
  const owners = tokensIn(memory), found = new Set(known);
  const shapes = references.flatMap((count, block) => {
    const left = (block % columns) * (wide + 8), top = Math.floor(block / columns) * (high + HEAD + 8) + HEAD;
    const marks = [found.has(block) ? "#" : "", count > 1 ? `×${count}` : ""].filter(Boolean).join(" ");
    const places = Array.from({ length: P }, (_, i) => {
      const [owner] = owners.get(`${block}:${i}`) ?? [];
      const kind = owner ? `hue-${owner.hue}` : count ? "aside" : found.has(block) ? "kept" : "free";
      const x = left + (i % across) * cell, y = top + Math.floor(i / across) * CELL;
      return box(x, y, cell - 1, CELL - 1, `place ${kind}`, {
        "data-cell": `${block}:${i}`, "data-sequence": owner?.name ?? null, "data-token": owner?.token ?? null,
      });
    });
    return [text(left, top - 3, block, count ? null : "soft"), text(left + wide - 1, top - 3, marks, "end"), ...places];
  });
  const rows = Math.ceil(references.length / columns);
  return picture(width, rows * (high + HEAD + 8), "The blocks of the memory", ...shapes);
}

// "block:place" -> [{name, token, hue}, ...]: the tokens whose keys and values lie there.
function tokensIn({ block_size: P, sequences }) {
  const there = new Map();
  for (const { name, table, computed, hue } of sequences) {
    for (let token = 0; token < Math.min(computed, table.length * P); token += 1) {
      const at = `${table[Math.floor(token / P)]}:${token % P}`;
      there.set(at, [...(there.get(at) ?? []), { name, token, hue }]);
    }
  }
  return there;
}

// [set aside, in use] in tokens: a block that is shared counts once.
export function room(memory) {
  const held = memory.references.filter((count) => count > 0).length;
  return [held * memory.block_size, tokensIn(memory).size];
}

// Where the token under pointer, finger or keys lies is lit in `drawn`, and `say` gets it as a sentence. Returns a
// function that lights token `i` of the sequence `name`, if it is there.
export function lightUp(drawn, memory, say) {
  const { block_size: P, sequences } = memory;
  const all = (selector) => [...drawn.querySelectorAll(selector)];
  const tokens = (name) => all(`[data-sequence="${CSS.escape(name)}"][data-token][role]`); // in the tables
  function light(name, i) {
    for (const lit of all(".lit")) lit.classList.remove("lit");
    const sequence = sequences.find((one) => one.name === name);
    if (!sequence || i >= sequence.known) return;
    const k = Math.floor(i / P), block = sequence.table[k], word = sequence.words?.[i];
    const token = tokens(name)[i];
    for (const one of all("[tabindex='0']")) one.setAttribute("tabindex", -1);
    token.setAttribute("tabindex", 0); // where the Tab key leads
    const place = all(`[data-cell="${block}:${i % P}"]`), entry = all(`[data-entry="${CSS.escape(name)}:${k}"]`);
    for (const one of [token, ...place, ...entry]) one.classList.add("lit");
    const which = `Token ${i} of ${name}${word ? `, “${word.trim()}”` : ""}: ${i} // ${P} = ${k}, ${i} % ${P} = ${i % P}.`;
    const where = block === undefined ? "It has no block yet" : `table[${k}] is block ${block}, place ${i % P}`;
    say(`${which} ${where}${block === undefined || i < sequence.computed ? "" : "; not computed yet"}.`, name, i);
  }
  const over = (event) => {
    const { sequence, token } = event.target.dataset ?? {};
    if (token !== undefined) light(sequence, Number(token));
  };
  for (const event of ["pointerover", "focusin", "click"]) drawn.addEventListener(event, over);
  drawn.addEventListener("keydown", (event) => {
    if (!event.target.matches?.("[role='button'][data-token]")) return;
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0;
    const down = { ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0;
    if (!along && !down) return;
    const { sequence, token } = event.target.dataset, at = sequences.findIndex(({ name }) => name === sequence);
    event.preventDefault();
    event.stopPropagation();
    const target = sequences[at + down], i = Math.min(Number(token) + along, (target?.known ?? 0) - 1);
    if (target && i >= 0) tokens(target.name)[i].focus();
  });
  return light;
}

// --- a recording -------------------------------------------------------------------------------------------------
//
// {words: {name: [text of each token, ...]}, runs: [{memory, block_size, prefix, num_blocks, moments}, ...]}. A moment
// is what a step did and the plan behind it, and leaves out what is empty:
//   work: {name: tokens computed}, copies: [[kind, source blocks, target blocks], ...], preempted, ended: [name, ...]
//   sequences: {name: [computed, known, table]}, known: [block, ...], waiting: [name, ...], swapped: {name: [block, ...]}

const NOTHING = { work: {}, sequences: {}, known: [], waiting: [], swapped: {}, copies: [], preempted: [], ended: [] };

export function memoryAt(data, run, moment) {
  const { sequences, known, waiting, swapped } = moment ? { ...NOTHING, ...run.moments[moment - 1] } : NOTHING;
  const names = Object.keys(data.words);
  const references = Array(run.num_blocks).fill(0);
  const shown = Object.entries(sequences).map(([name, [computed, numKnown, table]]) => {
    for (const block of table) references[block] += 1;
    return { name, computed, known: numKnown, table, words: data.words[name], hue: names.indexOf(name) % HUES };
  });
  const absent = waiting.map((name) => [
    name, swapped[name] ? `waits; ${counted(swapped[name].length, "block")} in the swap space` : "waits",
  ]);
  return { block_size: run.block_size, references, known, sequences: shown, absent };
}

export function open(data) {
  const run = ({ memory, size, prefix }) => data.runs.find((one) => one.memory === memory
    && (memory === "slots" || (one.block_size === size && one.prefix === (prefix === "on"))));
  const paged = ({ memory }) => memory === "pages";
  const most = (key) => Math.max(...data.runs.flatMap(({ moments }) => moments.map(key)));
  const longest = most(({ sequences }) => Math.max(0, ...Object.values(sequences).map(([, known]) => known)));
  const rows = most(({ sequences, waiting = [] }) => Object.keys(sequences).length * ROW + waiting.length * 18) + 8;
  let lit = null; // [name, token]: stays lit from step to step
  return {
    label: data.label,
    choices: [
      { name: "memory", label: "Memory", options: [["pages", "pages"], ["slots", "slots"]], start: "pages" },
      { name: "size", label: "Tokens in a block", options: [[4, "4"], [16, "16"]], start: 4, applies: paged },
      { name: "prefix", label: "Prefix cache", options: [["on", "on"], ["off", "off"]], start: "on", applies: paged },
    ],
    moments: (chosen) => run(chosen).moments.length,
    draw(chosen, moment, width) {
      const memory = memoryAt(data, run(chosen), moment), beside = areBeside(width, SIDE_BY_SIDE);
      const half = beside ? Math.floor((width - 24) / 2) : width;
      const tables = drawTables(memory, half, longest);
      tables.setAttribute("height", rows); // so that nothing jumps
      tables.setAttribute("viewBox", `0 0 ${half} ${rows}`);
      const said = element("p", { class: "play-lit", role: "status" }, "Point at a token, or touch it: where does it lie?");
      const drawn = element("div", {},
        legend(KINDS),
        element("div", { class: beside ? "play-columns" : null }, tables, drawBlocks(memory, half)), said);
      const light = lightUp(drawn, memory, (words, ...which) => { said.textContent = words; lit = which; });
      if (lit) light(...lit);
      return drawn;
    },
    words: (chosen, moment) => sentence(data, run(chosen), moment),
  };
}

const verb = (list, one, many) => (list.length === 1 ? one : many);
const blocksOf = (numbers) => `${numbers.length === 1 ? "block" : "blocks"} ${listed(numbers)}`;

// What has happened in a step, from the plans before and after it.
function sentence(data, run, moment) {
  const memory = memoryAt(data, run, moment), [aside, used] = room(memory), unused = aside - used;
  const kind = run.memory === "slots" ? "slot" : "block";
  if (!moment) return `${counted(run.num_blocks, kind)} of ${run.block_size} tokens, all free.`;
  const before = { ...NOTHING, ...run.moments[moment - 2] }, now = { ...NOTHING, ...run.moments[moment - 1] };
  const same = Object.keys(now.work).filter((name) => before.sequences[name] && now.sequences[name]);
  const admitted = Object.keys(now.sequences).filter((name) => !before.sequences[name]);
  const lost = before.known.filter((block) => !now.known.includes(block));
  const filled = now.known.filter((block) => !before.known.includes(block));
  const said = [
    same.length ? `Step ${moment}: ${listed(same)} ${verb(same, "goes", "go")} on.` : `Step ${moment}.`,
    ...now.preempted.map((name) => preemption(name, now)),
    ...admitted.map((name) => admission(name, run, before, now)),
  ];
  if (lost.length) said.push(`What ${blocksOf(lost)} held is forgotten: ${verb(lost, "it is", "they are")} needed.`);
  if (filled.length) said.push(`Full, and hashed: ${blocksOf(filled)}.`);
  if (now.ended.length) said.push(`${listed(now.ended)} ${verb(now.ended, "has", "have")} ended.`);
  if (aside) said.push(`Set aside: ${counted(aside, "token")}, unused: ${unused} (${Math.round((100 * unused) / aside)}%).`);
  return said.join(" ");
}

function preemption(name, { copies, swapped }) {
  const isCopied = swapped[name] && copies.some(([kind]) => kind === "out");
  if (!isCopied) return `${name} is preempted, and will compute its tokens again.`;
  return `${name} is preempted: its blocks are copied to ${blocksOf(swapped[name])} of the swap space.`;
}

function admission(name, run, before, { sequences, work, copies }) {
  const [computed, , table] = sequences[name], found = computed - (work[name] ?? 0);
  const [kind, source, target] = copies.find(([, , blocks]) => blocks.every((block) => table.includes(block))) ?? [];
  if (kind === "in" && before.swapped[name]) return `${name} comes back from the swap space, into ${blocksOf(target)}.`;
  if (kind === "fork") return `${name} shares its prompt, and ${blocksOf(target)} is its copy of ${blocksOf(source)}, which was not full.`;
  if (!found) return `${name} is admitted.`;
  const shared = table.slice(0, Math.ceil(found / run.block_size));
  return `${name} is admitted: ${found} tokens are found, in ${blocksOf(shared)}.`;
}
