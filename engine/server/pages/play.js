// <ruvon-play src="x.play.json">: a figure to play with, in place of the picture inside it. Part 8.
//
// The file names its view, and play_VIEW.js draws it: a module with a function open(data) that returns
//   label: what the figure shows, in a few words
//   choices: what stands above the picture, in order, either radio buttons or a slider:
//     {name, label, options: [[value, words], ...], start, applies: (chosen) => whether it matters now (optional)}
//     {name, label, steps: [value, ...], start, words: (value) => "..."}
//   moments(chosen): how many steps the figure has; 0 for a figure without time, which gets no buttons
//   draw(chosen, moment, width): an element, drawn for `width` CSS pixels. Moment 0 is before the first step
//   words(chosen, moment): what happened in this step, as a sentence; also for those who do not see the picture
//   question(chosen, moment): optional; {ask, fields: [[words, number], ...]} to be asked before this step is
//     shown, or null
// where `chosen` has the value of each choice by its name.
//
// The picture stays until the view has drawn, so a page without scripts or without the file shows it.
import { element } from "./play_svg.js";

const PACE = 900; // milliseconds from step to step
const TYPED = "input, button, select, textarea, summary, a";
let count = 0; // of elements so far: radio buttons are grouped by a name

class Play extends HTMLElement {
  async connectedCallback() {
    if (this.view) return; // moved within its page
    const answer = await fetch(this.getAttribute("src"));
    if (!answer.ok) return;
    const data = await answer.json();
    const { open } = await import(`./play_${data.view}.js`);
    this.show(open(data));
  }

  disconnectedCallback() { this.pause(); }

  show(view) {
    this.view = view;
    this.chosen = Object.fromEntries(view.choices.map(({ name, start }) => [name, start]));
    this.moment = 0;
    this.number = ++count;
    this.groups = []; // [radio buttons, whether they matter for what is chosen]
    this.picture = element("div", { class: "play-picture" });
    this.words = element("p", { class: "play-words", "aria-live": "polite" });
    this.question = element("form", { class: "play-question", hidden: true });
    const head = element("div", { class: "play-choices" }, ...view.choices.map((choice) => this.choice(choice)));
    const parts = [head, this.picture, this.words, this.question];
    if (view.moments(this.chosen)) parts.splice(2, 0, this.controls());
    this.setAttribute("role", "group");
    this.setAttribute("aria-label", view.label);
    this.setAttribute("tabindex", "0");
    this.replaceChildren(...parts);
    this.classList.add("play-runs");
    this.addEventListener("keydown", (event) => this.key(event));
    this.question.addEventListener("submit", (event) => this.answer(event));
    new ResizeObserver(() => {
      if (this.picture.clientWidth !== this.width) this.draw();
    }).observe(this.picture);
    this.draw();
  }

  // --- what the reader sets ------------------------------------------------------------------------------------

  choice({ name, label, options, steps, start, words, applies }) {
    const set = (value) => {
      this.chosen[name] = value;
      this.go(Math.min(this.moment, this.last), true);
    };
    if (steps) {
      const said = element("output", {}, words(start));
      const slider = element("input", { type: "range", min: 0, max: steps.length - 1, name });
      slider.value = steps.indexOf(start);
      slider.setAttribute("aria-valuetext", words(start));
      slider.addEventListener("input", () => {
        said.textContent = words(steps[slider.value]);
        slider.setAttribute("aria-valuetext", said.textContent);
        set(steps[slider.value]);
      });
      return element("label", { class: "play-slider" }, element("span", {}, label), slider, said);
    }
    const buttons = options.map(([value, said]) => {
      const button = element("input", { type: "radio", name: `play-${this.number}-${name}`, checked: value === start });
      button.addEventListener("change", () => set(value));
      return element("label", {}, button, element("span", {}, said));
    });
    const group = element("fieldset", { class: "play-options" }, element("legend", {}, label), ...buttons);
    if (applies) this.groups.push([group, applies]);
    return group;
  }

  controls() {
    const button = (label, words, does) => {
      const made = element("button", { type: "button", "aria-label": label, title: label }, words);
      made.addEventListener("click", does);
      return made;
    };
    this.player = button("Play", "▶", () => this.toggle());
    this.slider = element("input", { type: "range", min: 0, value: 0, "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.where = element("span", { class: "play-where" });
    const parts = [
      this.player,
      button("One step back", "◀|", () => this.go(this.moment - 1)),
      button("One step on", "|▶", () => this.next()),
      this.slider,
      this.where,
    ];
    if (this.view.question) {
      this.predict = element("input", { type: "checkbox" });
      this.predict.addEventListener("change", () => this.ask(null));
      parts.push(element("label", { class: "play-predict" }, this.predict, element("span", {}, "Let me predict")));
    }
    return element("div", { class: "play-controls" }, ...parts);
  }

  key(event) {
    if (event.defaultPrevented || event.target.closest(TYPED) || event.ctrlKey || event.altKey || event.metaKey) return;
    const does = {
      ArrowRight: () => this.next(), ArrowLeft: () => this.go(this.moment - 1), " ": () => this.toggle(),
      Home: () => this.go(0), End: () => this.go(this.last),
    }[event.key];
    if (!does || !this.last) return;
    event.preventDefault();
    event.stopPropagation(); // the site turns its pages by the arrow keys
    does();
  }

  // --- time ------------------------------------------------------------------------------------------------------

  get last() { return this.view.moments(this.chosen); }

  toggle() { if (this.timer) this.pause(); else this.play(); }

  play() {
    if (this.moment >= this.last) this.go(0);
    this.timer = setInterval(() => this.next(true), PACE);
    this.state();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    if (this.view) this.state();
  }

  // One step on, unless the reader wants to say first what will happen in it.
  next(playing = false) {
    if (this.moment >= this.last) return this.pause();
    const question = this.predict?.checked && this.asked !== this.moment + 1
      ? this.view.question(this.chosen, this.moment + 1) : null;
    if (question) this.ask(question);
    else this.go(this.moment + 1, playing);
  }

  go(moment, playing = false) {
    if (!playing) this.pause();
    this.moment = Math.max(0, Math.min(moment, this.last));
    this.ask(null);
    this.draw();
  }

  // --- predict ---------------------------------------------------------------------------------------------------

  // Shows the question about the next step; null takes away what is shown.
  ask(question) {
    this.asked = question ? this.moment + 1 : null;
    this.answers = question;
    this.question.hidden = !question;
    this.question.replaceChildren();
    if (!question) return;
    this.pause();
    const number = { type: "number", min: 0, required: true, inputmode: "numeric" };
    this.inputs = question.fields.map(() => element("input", number));
    const rows = question.fields.map(([words], i) =>
      element("label", {}, element("span", {}, words), this.inputs[i], element("output")));
    this.question.append(element("p", {}, question.ask), ...rows, element("button", { type: "submit" }, "Show"));
    this.inputs[0].focus();
  }

  answer(event) {
    event.preventDefault();
    if (!this.answers) return; // Enter, once more
    const { fields } = this.answers, inputs = this.inputs;
    this.answers = null;
    const right = fields.filter(([, number], i) => Number(inputs[i].value) === number).length;
    fields.forEach(([, number], i) => {
      const row = inputs[i].parentElement, hit = Number(inputs[i].value) === number;
      row.classList.add(hit ? "play-right" : "play-wrong");
      row.querySelector("output").textContent = hit ? "✓" : `it is ${number}`;
      inputs[i].readOnly = true;
    });
    this.question.querySelector("button").remove();
    this.question.append(element("p", { role: "status" }, `${right} of ${fields.length} right.`));
    this.moment += 1;
    this.draw();
    this.focus({ preventScroll: true });
  }

  // --- what is seen ----------------------------------------------------------------------------------------------

  draw() {
    this.width = this.picture.clientWidth;
    if (!this.width) return; // not laid out yet: the observer calls again
    const focused = this.picture.contains(document.activeElement); // on what is about to go
    this.picture.replaceChildren(this.view.draw(this.chosen, this.moment, this.width));
    if (focused) this.focus({ preventScroll: true });
    this.words.textContent = this.view.words(this.chosen, this.moment);
    for (const [group, applies] of this.groups) group.disabled = !applies(this.chosen);
    this.state();
  }

  state() {
    if (!this.player) return;
    const plays = Boolean(this.timer), words = `step ${this.moment} of ${this.last}`;
    this.player.textContent = plays ? "❚❚" : "▶";
    this.player.setAttribute("aria-label", plays ? "Pause" : "Play");
    this.player.title = plays ? "Pause" : "Play";
    this.words.setAttribute("aria-live", plays ? "off" : "polite");
    this.slider.max = this.last;
    this.slider.value = this.moment;
    this.slider.setAttribute("aria-valuetext", words);
    this.where.textContent = words;
  }
}

customElements.define("ruvon-play", Play);
