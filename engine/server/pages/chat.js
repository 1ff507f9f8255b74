// A chat page on OpenAI's API: any number of conversations side by side, each with an answer under way.
// What a model says is text: it is never made into elements.

const page = (id) => document.getElementById(id);
const knobs = page("knobs");
const conversations = new Set();
let model = null;
let made = 0;

function status(text, state = "live") {
  page("status").textContent = text;
  page("status").dataset.state = state;
}

function headers() {
  const key = knobs.elements.key.value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function findModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await messageOf(response));
    model = (await response.json()).data[0].id;
    page("model").textContent = model;
    status("ready");
  } catch (error) {
    model = null;
    status(error instanceof TypeError ? "the server cannot be reached" : error.message, "lost");
  }
}

// The data of each server-sent event, up to OpenAI's mark of the end.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function wishes() {
  const wishes = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_completion_tokens", "seed"]) {
    const value = knobs.elements[name].value;
    if (value !== "") wishes[name] = Number(value);
  }
  if (knobs.elements.tokens.checked) Object.assign(wishes, { logprobs: true, top_logprobs: 5 });
  return wishes;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1).padStart(5)}%`;
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll(" ", "␣");

// One token as it stands in the text; on hover, focus or touch, what it was chosen from.
function tokenElement(entry, about) {
  const probability = Math.exp(entry.logprob);
  const rank = probability > 0.7 ? 1 : probability > 0.3 ? 2 : probability > 0.1 ? 3 : 4;
  const token = element("span", `token p${rank}`, entry.token);
  token.tabIndex = 0;
  const tell = () => {
    const others = entry.top_logprobs.map((top) => `${percent(top.logprob)}  ${visible(top.token)}`);
    about.textContent = [`${percent(entry.logprob)}  ${visible(entry.token)}   chosen`, ...others].join("\n");
    about.hidden = false;
  };
  token.addEventListener("pointerenter", tell);
  token.addEventListener("focus", tell);
  return token;
}

// What has come is drawn once a frame, however fast it comes.
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.planned = null;
  }
  plan() {
    this.planned ??= requestAnimationFrame(() => this.now());
  }
  now() {
    cancelAnimationFrame(this.planned);
    this.planned = null;
    this.draw();
  }
}

class Conversation {
  constructor() {
    made += 1;
    this.turns = [];
    this.number = made;
    this.root = page("conversation").content.firstElementChild.cloneNode(true);
    this.part = (selector) => this.root.querySelector(selector);
    this.part("h2").textContent = `Conversation ${made}`;
    this.part("textarea").setAttribute("aria-label", `message of conversation ${made}`);
    this.part(".turns").setAttribute("aria-label", `turns of conversation ${made}`);
    this.part(".close").setAttribute("aria-label", `Close conversation ${made}`);
    this.part(".close").addEventListener("click", () => this.close());
    this.part(".stop").addEventListener("click", () => this.stop());
    this.part(".ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.part("textarea").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    conversations.add(this);
    page("conversations").append(this.root);
    this.part("textarea").focus();
  }

  close() {
    this.stop();
    conversations.delete(this);
    this.root.remove();
    if (!conversations.size) new Conversation();
  }

  stop() {
    this.underWay?.abort();
  }

  submit() {
    const text = this.part("textarea").value.trim();
    if (!text) return;
    const asked = knobs.elements.all.checked ? [...conversations] : [this];
    const free = asked.filter((one) => !one.underWay);
    if (free.includes(this)) this.part("textarea").value = "";
    for (const one of free) one.ask(text);
  }

  show(turn, follow = true) {
    const list = this.part(".turns");
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    if (turn) list.append(turn);
    if (atEnd && follow) list.scrollTop = list.scrollHeight;
  }

  // Ask, and show the answer as it comes. An answer that was stopped stays as far as it came; one that failed
  // can be asked for again.
  async ask(text) {
    const question = element("li", "user");
    question.append(element("p", "text", text));
    this.show(question);
    this.turns.push({ role: "user", content: text });
    await this.answer();
  }

  async answer() {
    const system = knobs.elements.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.turns];
    const turn = element("li", "assistant running");
    const words = element("p", "text");
    const took = element("p", "took", "waiting …");
    const about = element("pre", "about");
    about.hidden = true;
    turn.append(words, about, took);
    turn.setAttribute("aria-busy", "true");
    this.show(turn);
    const control = (this.underWay = new AbortController());
    this.part(".send").hidden = true;
    this.part(".stop").hidden = false;
    const start = performance.now();
    let [content, first, last, tokens, reason, problem] = ["", null, null, null, null, null];
    let [drawn, entries] = [0, []];
    const drawing = new Drawing(() => {
      if (entries.length) words.append(...entries.map((entry) => tokenElement(entry, about)));
      else if (!words.childElementCount) words.append(content.slice(drawn));
      words.childElementCount || words.normalize();
      [drawn, entries] = [content.length, []];
      if (first !== null) took.textContent = `first word after ${first.toFixed(0)} ms`;
      this.show(null);
    });
    try {
      if (!model) await findModel();
      const body = JSON.stringify({ model, messages, ...wishes() });
      const options = { method: "POST", headers: headers(), body, signal: control.signal };
      const response = await fetch("v1/chat/completions", options);
      if (!response.ok) throw new Error(await messageOf(response));
      for await (const chunk of events(response.body)) {
        if (chunk.error) throw new Error(chunk.error.message);
        tokens = chunk.usage?.completion_tokens ?? tokens;
        for (const choice of chunk.choices) {
          reason = choice.finish_reason ?? reason;
          const piece = choice.delta.content ?? "";
          if (piece) {
            last = performance.now() - start;
            first ??= last;
            content += piece;
          }
          if (choice.logprobs) entries.push(...choice.logprobs.content);
          drawing.plan();
        }
      }
      if (reason === null) throw new TypeError();
      status("ready");
    } catch (error) {
      if (error.name === "AbortError") problem = "stopped";
      else if (error instanceof TypeError) problem = "the connection to the server broke off";
      else problem = error.message;
    }
    drawing.now();
    this.underWay = null;
    this.part(".send").hidden = false;
    this.part(".stop").hidden = true;
    turn.classList.remove("running");
    turn.removeAttribute("aria-busy");
    const speed = tokens > 1 && last > first ? `, ${((1e3 * (tokens - 1)) / (last - first)).toFixed(0)} tokens/s` : "";
    const total = tokens === null ? "" : `, ${tokens} tokens${reason === "length" ? " (all that were allowed)" : ""}`;
    if (first !== null) took.textContent = `first word after ${first.toFixed(0)} ms${speed}${total}`;
    if (problem === "stopped") {
      took.textContent += first === null ? "" : ", ";
      took.textContent = first === null ? "stopped" : `${took.textContent}stopped`;
    } else if (problem) {
      took.textContent = problem;
      took.classList.add("failed");
      const again = element("button", "again", "Try again");
      again.type = "button";
      again.addEventListener("click", () => {
        turn.remove();
        model = null;
        this.answer();
      });
      turn.append(again);
      this.show(null);
      return;
    }
    this.turns.push({ role: "assistant", content });
    this.show(null);
  }
}

page("new").addEventListener("click", () => new Conversation());
knobs.addEventListener("submit", (event) => event.preventDefault());
knobs.elements.key.addEventListener("change", findModel);
new Conversation();
findModel();
