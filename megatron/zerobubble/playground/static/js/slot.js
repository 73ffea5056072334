// One schedule on the page: its options in the form, its search, and the best plan so far.

import { listen } from "./api.js";
import { make } from "./dom.js";
import { problem } from "./state.js";

const LEAST_LIMIT = 0.1;
const MOST_LIMIT = 2.5;

export class Slot {
  /** Callbacks: `changed` after the options changed, `arrived` when there is something new to show, `removed` to remove the slot. */
  constructor(key, choices, config, { changed, arrived, removed }) {
    Object.assign(this, { key, choices, config, changed, arrived });
    this.drawing = null;
    this.commands = null;
    this.error = "";
    this.verdict = "";
    this.controller = null;
    this.file = null;
    const names = choices.schedules.map(({ name, title, description }) => make("option", { value: name, title: description }, title));
    this.select = make("select", { "aria-label": "schedule", change: () => this.take() }, ...names);
    this.limited = make("input", { type: "checkbox", change: () => this.take() });
    this.range = make("input", {
      type: "range", min: LEAST_LIMIT, max: MOST_LIMIT, step: 0.01, "aria-label": "memory limit", input: () => this.take(),
    });
    this.output = make("output", {});
    this.chunks = make("input", { type: "number", min: 1, max: choices.limits.chunks, step: 1, placeholder: "2", change: () => this.take() });
    this.slices = make("input", { type: "number", min: 1, max: choices.limits.slices, step: 1, placeholder: "1", change: () => this.take() });
    this.pending = make("input", { type: "text", size: 4, placeholder: "1p", pattern: "[0-9]+p?", change: () => this.take() });
    this.fileOption = make("option", { value: "" });
    this.iteration = make("select", { change: () => this.pick(Number(this.iteration.value)) });
    this.limitRow = make("label", { class: "row limit" }, this.limited, "memory limit", this.range, this.output);
    this.letter = make("span", { class: "letter" });
    this.status = make("p", { class: "status", role: "status" });
    this.bar = make("progress", { max: 1, hidden: true, "aria-label": "search" });
    this.stopper = make("button", { type: "button", class: "stop", hidden: true, click: () => this.stop() }, "Stop");
    this.description = make("p", { class: "hint" });
    this.options = make("div", { class: "fields two" });
    this.element = make(
      "div",
      { class: "slot", "data-slot": key },
      make(
        "div",
        { class: "row" },
        this.letter,
        this.select,
        make("button", { type: "button", class: "remove", "aria-label": "remove this schedule", click: removed }, "×"),
      ),
      this.description,
      this.limitRow,
      this.options,
      make("div", { class: "row" }, this.bar, this.stopper),
      this.status,
    );
    this.render();
  }

  /** Whether it shows a file instead of a search. */
  get isOpened() {
    return this.file !== null;
  }

  get name() {
    return this.file?.name ?? this.config.schedule;
  }

  /** The memory limit of its plan; null: the schedule's own. */
  get limit() {
    if (this.isOpened) return null;
    if (this.config.limit !== null || this.config.schedule !== "auto") return this.config.limit;
    return this.choices.auto_memory_limit;
  }

  get info() {
    return this.choices.schedules.find(({ name }) => name === this.config.schedule);
  }

  /** Copy the form into the state. */
  take() {
    const { schedule } = this.config;
    if (!this.select.value) return; // still the file
    this.config.schedule = this.select.value;
    this.file = null;
    this.config.limit = this.limited.checked ? Number(this.range.value) : null;
    this.config.chunks = this.chunks.value && this.info.num_chunks === null ? Number(this.chunks.value) : null;
    this.config.slices = this.slices.value && this.info.takes_slices ? Number(this.slices.value) : null;
    this.config.pending = this.info.takes_max_pending_backward ? this.pending.value.trim() : "";
    if (schedule !== this.config.schedule && !this.info.is_searched) this.config.limit = null;
    this.render();
    this.changed();
  }

  /** Copy the state into the form. */
  render() {
    const { schedule, limit, chunks, pending, slices } = this.config;
    this.limitRow.hidden = this.isOpened;
    if (this.isOpened) {
      this.fileOption.textContent = this.file.name;
      this.select.prepend(this.fileOption);
      this.select.value = "";
      this.description.textContent = "from a file; choose a schedule to plan again";
      const several = this.file.drawings.length > 1;
      this.options.replaceChildren(...(several ? [make("label", {}, "iteration ", this.iteration)] : []));
      return;
    }
    this.fileOption.remove();
    this.select.value = schedule;
    this.limited.checked = limit !== null;
    this.range.disabled = limit === null;
    this.reach();
    if (limit !== null) this.range.value = limit;
    else if (!this.range.dataset.touched || this.limit !== null) this.range.value = this.limit ?? 1;
    this.range.dataset.touched = "yes";
    this.showLimit();
    this.description.textContent = this.info.description;
    this.chunks.value = chunks ?? "";
    this.pending.value = pending;
    this.slices.value = slices ?? "";
    const options = [];
    if (this.info.num_chunks === null) options.push(make("label", { class: "wide" }, "virtual stages (VPP) per rank ", this.chunks));
    if (this.info.takes_max_pending_backward) options.push(make("label", { class: "wide", title: "1p, 2p or a number" }, "max pending backward ", this.pending));
    const cut = "cut each microbatch along its sequence; of a model the slices have equal work, otherwise they are equal parts";
    if (this.info.takes_slices) options.push(make("label", { class: "wide", title: cut }, "slices per microbatch ", this.slices));
    const inside = this.options.querySelector(":focus");
    if (!inside) this.options.replaceChildren(...options);
  }

  /** Offer limits as far as the plan on the page needs memory, and as the one that is chosen. */
  reach() {
    const peak = Math.max(...(this.drawing?.metrics.peak_memory ?? []), 0);
    this.range.max = Math.max(MOST_LIMIT, Math.ceil(peak), this.limit ?? 0);
  }

  showLimit() {
    this.reach();
    this.output.textContent = this.limit === null ? "none" : this.limit.toFixed(2);
    this.range.setAttribute("aria-valuetext", this.limit === null ? "no limit" : `${this.limit.toFixed(2)} of 1F1B on rank 0`);
  }

  setLetter(letter) {
    this.letter.textContent = letter;
    this.element.setAttribute("aria-label", `schedule ${letter}`);
    this.element.setAttribute("role", "group");
  }

  /** Show a file instead of a search: {name, drawings}; of several iterations the last one, until another is picked. */
  open(file) {
    this.cancel();
    this.file = file;
    const last = file.drawings.length - 1;
    const options = file.drawings.map(({ iteration }, index) => make("option", { value: index }, String(iteration)));
    this.iteration.replaceChildren(...options);
    this.iteration.value = String(last);
    this.render();
    this.pick(last);
  }

  pick(index) {
    this.setStatus("");
    this.adopt({ drawing: this.file.drawings[index] });
  }

  adopt({ drawing, commands }) {
    this.drawing = drawing;
    if (!this.isOpened) this.showLimit();
    this.commands = commands ?? null;
    this.error = "";
    this.arrived();
  }

  /** Start a search, and abort the one before. */
  async run(state) {
    this.controller?.abort();
    const controller = new AbortController();
    this.controller = controller;
    this.verdict = "";
    this.progress(0);
    try {
      let spent = 0;
      for await (const event of listen("search", problem(state, this.config), controller.signal)) {
        if (controller !== this.controller) return; // it was on its way when a newer search began
        if (event.event === "best") {
          spent = event.spent;
          this.verdict = event.verdict;
          if (event.drawing) this.adopt(event);
        }
        if (event.event === "stopped") this.verdict = event.message;
        this.progress(spent, event);
      }
      this.setStatus(this.verdict);
    } catch (error) {
      if (controller !== this.controller) return; // a newer search has begun
      if (error.name === "AbortError") this.setStatus("stopped; this is the best so far");
      else this.fail(error.message);
    } finally {
      if (controller === this.controller) {
        this.controller = null;
        this.bar.hidden = this.stopper.hidden = true;
        this.arrived();
      }
    }
  }

  /** Abort the search and ignore its plan. */
  cancel() {
    const controller = this.controller;
    this.error = "";
    this.controller = null;
    controller?.abort();
    this.bar.hidden = this.stopper.hidden = true;
    this.element.classList.remove("wrong");
  }

  /** Stop the search and keep its best plan. */
  stop() {
    this.controller?.abort();
  }

  progress(spent, event) {
    this.bar.hidden = this.stopper.hidden = false;
    this.element.classList.remove("wrong");
    // Rungs are far apart: in between the bar goes on at the speed so far. Before the first one there is none.
    const elapsed = event?.elapsed_s ?? 0;
    if (event?.event === "best") this.pace = { spent, at: this.pace?.now ?? 0 };
    else if (!event) this.pace = null;
    if (this.pace && elapsed) this.pace.now = elapsed;
    if (!spent) this.bar.removeAttribute("value");
    else this.bar.value = Math.min(0.97, Math.max(spent, (spent * elapsed) / Math.max(this.pace?.at ?? 0, 0.2)));
    if (event?.state === "queued") this.setStatus("waiting for another search");
    else if (event?.elapsed_s) this.setStatus(`searching for ${event.elapsed_s.toFixed(0)} s; showing the best so far`);
  }

  fail(message) {
    this.error = message;
    this.drawing = null;
    this.element.classList.add("wrong");
    this.setStatus(message);
    this.arrived();
  }

  setStatus(text) {
    this.status.textContent = text ?? "";
  }
}
