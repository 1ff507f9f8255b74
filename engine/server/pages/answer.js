// One answer on the page: its thoughts, its words or its tokens, its calls of tools, and what it took.

const SENTENCES = /^[^]*(?:[.!?…]["'”’)]*(?=\s)|[。！？\n])/; // what is complete of a text

export const page = (id) => document.getElementById(id);
export const copy = (id) => page(id).content.firstElementChild.cloneNode(true);

export function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

export class Answer {
  constructor(scored) {
    this.scored = scored; // whether each token comes with its probability
    this.root = copy("answer");
    this.words = this.root.querySelector(".text");
    this.text = this.words.appendChild(document.createTextNode(""));
    this.took = this.root.querySelector(".took");
    [this.thoughts, this.list] = [".thoughts", ".calls"].map((part) => this.root.querySelector(part));
    this.content = "";
    this.calls = []; // of tools, as a message has them
    this.drawn = this.spoken = 0; // characters of it
    this.entries = []; // tokens to be drawn
    this.decoder = new TextDecoder(); // a character may be made of several tokens
    this.start = performance.now();
    this.first = this.last = this.tokens = this.reason = null;
  }

  take(chunk) {
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    for (const choice of chunk.choices) {
      this.reason = choice.finish_reason ?? this.reason;
      const { content, reasoning, tool_calls: calls } = choice.delta;
      if (content || reasoning || calls) {
        this.last = performance.now() - this.start;
        this.first ??= this.last;
      }
      this.content += content ?? "";
      if (reasoning) this.thoughts.append(reasoning);
      for (const { index, function: part, ...first } of calls ?? []) {
        this.calls[index] ??= { ...first, function: { name: part.name, arguments: "" } };
        this.calls[index].function.arguments += part.arguments;
      }
      this.entries.push(...(choice.logprobs?.content ?? []));
    }
  }

  draw() {
    for (const entry of this.entries.splice(0)) {
      const text = entry.bytes ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
      const token = tokenElement(entry, text);
      token.tabIndex = this.words.firstElementChild ? -1 : 0;
      this.words.append(token);
    }
    if (!this.scored) this.text.appendData(this.content.slice(this.drawn));
    this.drawn = this.content.length;
    this.thoughts.hidden = !this.thoughts.textContent;
    this.list.hidden = !this.calls.length;
    this.list.replaceChildren(...this.calls.map(({ function: made }) => element("li", "call", `${made.name}(${made.arguments})`)));
    if (this.first !== null) this.took.textContent = this.measures().join(" · ");
  }

  measures() {
    const said = this.first === null ? [] : [`first word after ${this.first.toFixed(0)} ms`];
    const speed = (1e3 * (this.tokens - 1)) / (this.last - this.first);
    if (this.tokens > 1 && Number.isFinite(speed)) said.push(`${speed.toFixed(0)} tokens/s`);
    if (this.tokens !== null) said.push(`${this.tokens} tokens${this.reason === "length" ? ", all that were allowed" : ""}`);
    return said;
  }

  // For a screen reader: the sentences that have become complete; in the end, the rest.
  sentences(over) {
    const rest = this.content.slice(this.spoken);
    const said = over ? rest : (rest.match(SENTENCES)?.[0] ?? "");
    this.spoken += said.length;
    return said.trim();
  }

  // `problem`: "stopped", or what went wrong.
  end(problem) {
    const failed = problem !== "" && problem !== "stopped";
    this.root.classList.remove("running");
    this.root.removeAttribute("aria-busy");
    this.took.classList.toggle("failed", failed);
    const ending = problem || (this.content || this.calls.length ? [] : "no words");
    this.took.textContent = failed ? problem : this.measures().concat(ending).join(" · ");
  }
}

// --- the tokens view: on hover, focus or touch, what a token was chosen from

const chosen = new WeakMap(); // a token's element -> its entry in the answer's logprobs
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll(" ", "␣");

function tokenElement(entry, text) {
  const probability = Math.exp(entry.logprob);
  const rank = probability > 0.7 ? 1 : probability > 0.3 ? 2 : probability > 0.1 ? 3 : 4;
  const token = element("span", `token p${rank}`, text);
  token.setAttribute("aria-describedby", "about");
  chosen.set(token, entry);
  return token;
}

let told = null; // the token that is told of

function tell(event) {
  const about = page("about");
  if (about.contains(event.target)) return;
  told = chosen.has(event.target) ? event.target : null;
  about.hidden = !told;
  if (!told) return;
  const { top_logprobs: top, ...own } = chosen.get(told);
  const listed = top.some((one) => one.token === own.token) ? top : [...top, own];
  about.replaceChildren(
    ...listed.map((one) => {
      const row = element("p", one.token === own.token ? "chosen" : "", visible(one.token));
      row.prepend(element("b", "", percent(one.logprob)), " ");
      row.style.setProperty("--share", percent(one.logprob));
      return row;
    }),
  );
  place();
}

// Below the token, or above it; nowhere once it is scrolled out of sight.
function place() {
  if (!told) return;
  const [about, view] = [page("about"), told.closest(".turns").getBoundingClientRect()];
  const { left, top, bottom } = told.getBoundingClientRect();
  about.hidden = bottom < view.top || top > view.bottom;
  const fits = bottom + about.offsetHeight + 8 < innerHeight;
  about.style.left = `${Math.max(8, Math.min(left, innerWidth - about.offsetWidth - 8))}px`;
  about.style.top = `${fits ? bottom + 4 : top - about.offsetHeight - 4}px`;
}

// For Tab, an answer's tokens are one stop; the arrows lead from one to the next.
function rove({ target }) {
  if (!chosen.has(target)) return;
  target.parentElement.querySelector("[tabindex='0']").tabIndex = -1;
  target.tabIndex = 0;
}

function walk(event) {
  const next = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
  if (event.key === "Escape") tell({ target: document.body });
  if (!next || !chosen.has(event.target)) return;
  event.preventDefault();
  event.target[next]?.focus();
}

document.addEventListener("pointerover", tell);
document.addEventListener("focusin", tell);
document.addEventListener("focusin", rove);
document.addEventListener("keydown", walk);
document.addEventListener("scroll", place, true);
