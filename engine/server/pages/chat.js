// The chat page: conversations side by side, each with an answer under way. What a model says is text: it never
// becomes elements. Nothing is kept beyond the page.

import { Answer, copy, element, page } from "./answer.js";
import { chat, firstModel } from "./api.js";

const SIDE_BY_SIDE = 6; // as many connections as a browser opens to one server: a seventh answer would wait

const knobs = page("knobs").elements;
const key = () => knobs.key.value.trim();
const conversations = new Set();
let model = null;
let made = 0;

function status(text, state) {
  if (page("status").textContent !== text) page("status").textContent = text; // else it would be read out again
  page("status").dataset.state = state;
}

async function findModel() {
  try {
    const card = await firstModel(key()), most = knobs.max_completion_tokens;
    model = card.id;
    if (Number(most.value) > card.max_model_len) most.value = card.max_model_len; // else each answer would be refused
    page("model").textContent = model;
    status("ready", "live");
  } catch (error) {
    model = null;
    status(error.message, "lost");
    throw error;
  }
}

function wishes() {
  const wishes = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_completion_tokens", "seed"]) {
    if (knobs[name].value !== "") wishes[name] = Number(knobs[name].value);
  }
  const tools = knobs.tools.value.trim();
  if (tools) Object.assign(wishes, { tools: parsed(tools) }, knobs.must.checked && { tool_choice: "required" });
  if (knobs.tokens.checked) Object.assign(wishes, { logprobs: true, top_logprobs: 5 });
  return wishes;
}

function parsed(tools) {
  try {
    return JSON.parse(tools);
  } catch (error) {
    throw new Error(`Settings, tools: no JSON: ${error.message}`);
  }
}

class Conversation {
  constructor() {
    this.name = `conversation ${(made += 1)}`;
    this.turns = []; // what was asked and answered; a question that failed is no part of it
    this.stopping = null; // of the answer under way
    this.follow = true; // whether its reader is at the end
    this.root = copy("conversation");
    this.root.setAttribute("aria-label", this.name);
    const part = (selector) => this.root.querySelector(selector);
    [this.list, this.box, this.send] = [part(".turns"), part("textarea"), part(".send")];
    part("h2").textContent = `Conversation ${made}`;
    this.box.setAttribute("aria-label", `message of ${this.name}`);
    this.list.setAttribute("aria-label", `turns of ${this.name}`);
    part(".close").setAttribute("aria-label", `Close ${this.name}`);
    part(".close").addEventListener("click", () => this.close());
    part(".hello").addEventListener("click", (event) => {
      if (event.target.matches("button")) this.submit(event.target.textContent);
    });
    part(".ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stop();
      else this.submit(this.box.value);
    });
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.target !== this.box || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit(this.box.value);
    });
    this.list.addEventListener("scroll", () => {
      this.follow = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    });
    conversations.add(this);
    page("conversations").append(this.root);
    page("new").disabled = conversations.size >= SIDE_BY_SIDE;
    this.toComposer();
  }

  toComposer() {
    if (!matchMedia("(pointer: coarse)").matches) this.box.focus(); // there, a keyboard would cover half the page
  }

  close() {
    this.stop();
    conversations.delete(this);
    this.root.remove();
    page("new").disabled = false;
    if (conversations.size) [...conversations].at(-1).toComposer();
    else new Conversation();
  }

  stop() {
    this.stopping?.abort();
  }

  submit(text) {
    if (!page("knobs").checkValidity()) {
      page("knobs").showPopover();
      page("knobs").reportValidity();
      return;
    }
    if (!text.trim() || this.stopping) return; // what is typed meanwhile stays where it is
    this.box.value = "";
    for (const one of knobs.all.checked ? conversations : [this]) if (!one.stopping) one.ask(text.trim());
    this.toComposer();
  }

  ask(text) {
    const question = copy("question");
    question.querySelector(".text").textContent = text;
    for (const old of this.root.querySelectorAll(".again")) old.remove();
    this.list.append(question);
    const calls = this.turns.at(-1)?.tool_calls; // if the model has called, this is what its tools answer
    this.answer(calls?.map(({ id }) => ({ role: "tool", tool_call_id: id, content: text })) ?? [{ role: "user", content: text }]);
  }

  toEnd() {
    if (this.follow) this.list.scrollTop = this.list.scrollHeight;
  }

  speak(text) {
    const listening = conversations.size === 1 || this.root.contains(document.activeElement);
    if (text && listening) this.root.querySelector(".spoken").textContent = text;
  }

  // What was stopped stays, as far as it came.
  async answer(questions) {
    const system = knobs.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.turns, ...questions];
    const answer = new Answer(knobs.tokens.checked);
    this.list.append(answer.root);
    this.follow = true;
    this.toEnd();
    this.stopping = new AbortController();
    this.send.textContent = "Stop";
    let [frame, problem] = [null, ""];
    const draw = () => {
      frame = null;
      answer.draw();
      this.toEnd();
    };
    const drawAndSpeak = () => {
      draw();
      this.speak(answer.sentences(false));
    };
    try {
      const wanted = wishes();
      if (!model) await findModel();
      for await (const chunk of chat({ model, messages, ...wanted }, key(), this.stopping.signal)) {
        answer.take(chunk);
        frame ??= requestAnimationFrame(drawAndSpeak); // once a frame, however fast it comes
      }
      status("ready", "live");
    } catch (error) {
      problem = error.name === "AbortError" ? "stopped" : error.message;
    }
    cancelAnimationFrame(frame);
    draw();
    answer.end(problem);
    this.speak([answer.sentences(true), problem].join(" ").trim());
    this.stopping = null;
    this.send.textContent = "Send";
    if (problem && problem !== "stopped") this.offer(answer, questions);
    else if (answer.content || !problem) {
      const calls = !problem && answer.calls.length && { tool_calls: answer.calls }; // what was stopped may be no call
      this.turns.push(...questions, { role: "assistant", content: answer.content, ...calls });
    }
    this.toEnd();
  }

  offer(answer, questions) {
    const again = element("button", "again", "Try again");
    again.type = "button";
    again.addEventListener("click", () => {
      answer.root.remove();
      this.answer(questions);
      this.toComposer();
    });
    answer.root.append(again);
    model = null; // another server may be there by now
  }
}

page("new").addEventListener("click", () => new Conversation());
page("knobs").addEventListener("submit", (event) => event.preventDefault());
knobs.key.addEventListener("change", () => findModel().catch(() => {}));
new Conversation();
findModel().catch(() => {});
