// The memory of the engine on the page /engine: a cell for each block, or for several neighbours.
//
// `blocks` is what engine/telemetry/live_memory.py sends: total, cell_size (blocks in a cell), used, shared, known,
// kept, and in `cells` the same for each cell.
import { box, element, picture, shape } from "./play_svg.js";

const LARGE = 20, SMALL = 11; // pixels of a cell, with its gap
const FEW = 256; // cells, which can be large
const KINDS = [["shared", "shared"], ["used", "in use"], ["kept", "free, but the prefix cache finds it"], ["free", "free"]];

// `before`: the blocks of the last picture, or null; `chosen`: numbers of the cells to be marked.
export function drawCells(blocks, { label, before = null, chosen = [] }, width) {
  const { cells, total, cell_size: size } = blocks, count = cells.used.length;
  const pixels = count <= FEW ? LARGE : SMALL, columns = Math.max(1, Math.floor(width / pixels)), side = pixels - 2;
  const at = (i) => [(i % columns) * pixels + 1, Math.floor(i / columns) * pixels + 1];
  const inside = { shared: "", used: "", kept: "", free: "" }, around = { changed: "", chosen: "" };
  for (let i = 0; i < count; i += 1) {
    const [x, y] = at(i), inCell = Math.min(size, total - i * size);
    let bottom = y + side; // from the bottom up: shared, in use by one, found by the prefix cache
    const put = (kind, blocksOfIt) => {
      const height = (side * blocksOfIt) / inCell;
      if (blocksOfIt) inside[kind] += `M${x} ${(bottom - height).toFixed(1)}h${side}v${height.toFixed(1)}h${-side}z`;
      bottom -= height;
    };
    inside.free += `M${x} ${y}h${side}v${side}h${-side}z`;
    put("shared", cells.shared[i]);
    put("used", cells.used[i] - cells.shared[i]);
    put("kept", cells.kept[i]);
    const isNew = before?.total === total && (before.cells.used[i] !== cells.used[i] || before.cells.shared[i] !== cells.shared[i]);
    if (isNew) around.changed += `M${x} ${y}h${side}v${side}h${-side}z`;
  }
  for (const i of chosen) {
    const [x, y] = at(i);
    around.chosen += `M${x} ${y}h${side}v${side}h${-side}z`;
  }
  const order = [["free", inside.free], ["kept", inside.kept], ["used", inside.used], ["shared", inside.shared], ...Object.entries(around)];
  const shapes = order.map(([kind, d]) => shape("path", { class: `cell ${kind}`, d }));
  return picture(width, Math.ceil(count / columns) * pixels + 2, label, ...shapes);
}

export const cellsLegend = () => [...KINDS, ["changed", "changed since the last picture"], ["chosen", "of the chosen request"]].map(([kind, words]) =>
  element("span", {}, picture(12, 12, "", box(1.5, 1.5, 9, 9, `cell ${kind}`)), words));
