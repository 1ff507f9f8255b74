// One answer on the page: its words or its tokens, and what it took.

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
    this.content = "";
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
      if (choice.delta.content) {
        this.last = performance.now() - this.start;
        this.first ??= this.last;
        this.content += choice.delta.content;
      }
      this.entries.push(...(choice.logprobs?.content ?? []));
    }
  }

  draw() {
    for (const entry of this.entries.splice(0)) {
      const text = entry.bytes ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
      this.words.append(tokenElement(entry, text));
    }
    if (this.words.firstElementChild) this.words.firstElementChild.tabIndex = 0; // the arrows lead to the others
    if (!this.scored) this.text.appendData(this.content.slice(this.drawn));
    this.drawn = this.content.length;
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
    const ending = problem || (this.content ? [] : "no words");
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
  token.tabIndex = -1;
  token.setAttribute("aria-describedby", "about");
  chosen.set(token, entry);
  return token;
}

function tell(event) {
  const [about, token] = [page("about"), event.target];
  if (about.contains(token)) return;
  about.hidden = !chosen.has(token);
  if (about.hidden) return;
  const { top_logprobs: top, ...own } = chosen.get(token);
  const listed = top.some((one) => one.token === own.token) ? top : [...top, own];
  about.replaceChildren(
    ...listed.map((one) => {
      const row = element("p", one.token === own.token ? "chosen" : "", visible(one.token));
      row.prepend(element("b", "", percent(one.logprob)), " ");
      row.style.setProperty("--share", percent(one.logprob));
      return row;
    }),
  );
  const { left, top: above, bottom } = token.getBoundingClientRect();
  const fits = bottom + about.offsetHeight + 8 < innerHeight;
  about.style.left = `${Math.max(8, Math.min(left, innerWidth - about.offsetWidth - 8))}px`;
  about.style.top = `${fits ? bottom + 4 : above - about.offsetHeight - 4}px`;
}

function walk(event) {
  const next = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
  if (event.key === "Escape") page("about").hidden = true;
  if (!next || !chosen.has(event.target)) return;
  event.preventDefault();
  event.target[next]?.focus();
}

document.addEventListener("pointerover", tell);
document.addEventListener("focusin", tell);
document.addEventListener("keydown", walk);
document.addEventListener("scroll", () => (page("about").hidden = true), true);
