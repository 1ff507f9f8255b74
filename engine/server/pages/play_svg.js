// What the drawings of play_*.js are made of: elements of HTML and of SVG.

const SVG = "http://www.w3.org/2000/svg";

// element("p", {class: "x"}, "words", child): an attribute that is null or false is left out, and true is empty.
export const element = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);

// The same for SVG. Styles come from play.css by class: the pages' Content-Security-Policy forbids style="...".
export const shape = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// A picture of `width` × `height` CSS pixels, which says `label` to those who do not see it.
export const picture = (width, height, label, ...shapes) =>
  shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, ...shapes);

// Whether two drawings stand beside each other: from a width of `from` pixels on, and from 480 on in a low window,
// such as a phone's on its side. There picture and buttons would not be seen together.
export const areBeside = (width, from = Infinity) => width >= (innerHeight < 500 ? 480 : from);

// Words at (x, y), on their baseline; `kind` is a class of play.css: "soft", "end", "middle".
export const text = (x, y, words, kind = null) => shape("text", { x, y, class: kind }, words);

export const box = (x, y, width, height, kind, more = {}) =>
  shape("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), class: kind, ...more });

// What the drawings' classes mean: [[class, words], ...].
export function legend(kinds) {
  const size = { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" };
  const swatch = (kind) => shape("svg", size, box(0.5, 0.5, 11, 11, kind));
  return element("div", { class: "play-legend" }, ...kinds.map(([kind, words]) => element("span", {}, swatch(kind), words)));
}

// "a", "a and b", "a, b and c"
export function listed(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

export const counted = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
