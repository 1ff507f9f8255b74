// The memory of the engine on the page /engine. A few blocks are drawn token by token, as in Part 12's figure. Of more,
// each is a cell, or several neighbours are.
//
// `blocks` is what engine/telemetry/live_memory.py sends: total, cell_size (blocks in a cell), used, shared, known,
// kept, and in `cells` the same for each cell.
import { drawBlocks } from "./play_blocks.js";
import { element, legend, picture, shape } from "./play_svg.js";

const FEW = 24; // blocks that are drawn token by token
const LONG = 32; // tokens of a block that is not
const LARGE = 20, SMALL = 11; // pixels of a cell, with its gap
const MANY = 256; // cells, which are small
const HUES = 6; // of play.css
const CELLS = [
  ["cell shared", "shared"], ["cell used", "in use by one"], ["cell kept", "free, but the prefix cache finds it"], ["cell free", "free"],
  ["cell changed", "changed since the last picture"], ["cell chosen", "of the chosen request"],
];
const PLACES = [
  ["place hue-0", "a token of a request"], ["place aside", "set aside, unused"], ["place kept", "free, can be found"], ["place free", "free"],
];

const isDetailed = ({ unit, unit_tokens: tokens, blocks }) => unit === "block" && blocks.total <= FEW && tokens <= LONG;

// `requests` have the number of their `row`, for their colours. `before` is the memory in the last picture, `chosen` one
// of the requests; both may be missing.
export function drawMemory(memory, requests, { before, chosen }, width) {
  if (!isDetailed(memory)) {
    return drawCells(memory.blocks, { label: "The blocks of the memory", before: before?.blocks, chosen: chosen?.table }, width);
  }
  const drawn = drawBlocks(plan(memory, requests), width);
  if (chosen) for (const place of drawn.querySelectorAll(`[data-sequence="${chosen.label}"]`)) place.classList.add("lit");
  return drawn;
}

// The memory as play_blocks.js has it.
function plan({ unit_tokens: size, blocks }, requests) {
  const known = blocks.cells.known.flatMap((isKnown, block) => (isKnown ? [block] : []));
  const sequences = requests.filter(({ blocks: count }) => count).map(({ label, held, prompt, output, given_back: gone, table, row }) => (
    { name: label, computed: held, known: prompt + output, table: [...Array(gone).fill(-1), ...table], hue: row % HUES }));
  return { block_size: size, references: blocks.cells.references, known, sequences, absent: [] };
}

export function drawCells(blocks, { label, before = null, chosen = [] }, width) {
  const { cells, total, cell_size: size } = blocks, count = cells.used.length;
  const pixels = count > MANY ? SMALL : LARGE, columns = Math.max(1, Math.floor(width / pixels)), side = pixels - 2;
  const paths = { free: "", kept: "", used: "", shared: "", changed: "", chosen: "" }; // one for all cells of a kind
  const put = (kind, i, from, to) => { // from and to: shares of the cell, from its bottom
    const x = (i % columns) * pixels + 1, y = Math.floor(i / columns) * pixels + 1, height = side * (to - from);
    if (height) paths[kind] += `M${x} ${(y + side * (1 - to)).toFixed(1)}h${side}v${height.toFixed(1)}h${-side}z`;
  };
  for (let i = 0; i < count; i += 1) {
    const share = 1 / Math.min(size, total - i * size), shared = cells.shared[i] * share, used = cells.used[i] * share;
    put("free", i, 0, 1);
    put("shared", i, 0, shared);
    put("used", i, shared, used);
    put("kept", i, used, used + cells.kept[i] * share);
    if (before?.total === total && ["used", "shared"].some((state) => before.cells[state][i] !== cells[state][i])) put("changed", i, 0, 1);
  }
  for (const i of chosen) put("chosen", i, 0, 1);
  const shapes = Object.entries(paths).map(([kind, d]) => shape("path", { class: `cell ${kind}`, d }));
  return picture(width, Math.ceil(count / columns) * pixels + 2, label, ...shapes);
}

export function memoryLegend(memory) {
  if (!memory.blocks) return "";
  if (!isDetailed(memory)) return legend(CELLS);
  const drawn = legend(PLACES);
  drawn.append(element("span", {}, "# the prefix cache finds it"), element("span", {}, "×2 in two tables"));
  return drawn;
}
