// The page: a form, up to three slots with a search each, and their results.

import { ask, choices as askChoices } from "./api.js";
import { byId, debounced, fill, make, seen } from "./dom.js";
import { acceptFiles } from "./files.js";
import { results, verdict } from "./metrics.js";
import { FIGURES, ModelForm, hasAllToAlls } from "./model.js";
import { brief } from "./numbers.js";
import { Pareto } from "./pareto.js";
import { Slot } from "./slot.js";
import { Stages, uniform } from "./stages.js";
import { CHOICES, MOST_SLOTS, NUMBERS, fromQuery, slot as slotConfig, toQuery } from "./state.js";
import { copy, takeAlong } from "./downloads.js";
import { Timelines } from "./timelines.js";

const WAIT_MS = 250;

class Playground {
  constructor(choices) {
    this.choices = choices;
    this.state = fromQuery(location.hash.slice(1) || location.search, choices);
    this.form = byId("form");
    this.slots = [];
    this.rest = [];
    this.numKeys = 0;
    this.waiting = new Set();
    this.runWaiting = debounced(() => this.runAll([...this.waiting]), WAIT_MS);
    const root = byId("timelines");
    const parts = { root, legend: byId("legend"), tip: byId("tip"), announcer: byId("announcer"), tall: byId("tall") };
    this.timelines = new Timelines(parts, choices);
    this.pareto = new Pareto(
      { root: byId("pareto"), button: byId("pareto-run"), status: byId("pareto-status") },
      { state: this.state, choose: (point) => this.choosePoint(point) },
    );
    this.stages = new Stages(
      { box: byId("stages-table"), fill: byId("stages-fill"), clear: byId("stages-clear"), note: byId("stages-note") },
      { state: this.state, usual: () => this.usualStages(), changed: () => this.changed() },
    );
    this.model = new ModelForm(byId("model"), choices.models, {
      state: this.state,
      changed: () => this.adoptModel(),
      adopted: () => this.render(),
      fail: (message) => this.notify(message),
    });
    this.fillForm();
    this.listen();
    this.begin();
  }

  /** Plan what the state has. */
  begin() {
    for (const config of this.state.slots) this.addSlot(config);
    this.baseline = this.slots[this.state.baseline];
    this.keepLink();
    // The first picture as soon as possible: the other searches begin when it is there.
    const [first, ...rest] = this.slots;
    this.rest = rest;
    for (const slot of rest) this.waiting.add(slot);
    this.runAll([first]);
    this.model.estimate();
  }

  /** Begin the searches that waited for the first picture. */
  runRest() {
    const { rest } = this;
    this.rest = [];
    if (rest.length) this.runAll(rest.filter((slot) => this.waiting.has(slot)));
  }

  /** The address was changed by a link of the page or by hand: begin again with it. */
  again() {
    for (const slot of this.slots) {
      slot.cancel();
      slot.element.remove();
    }
    this.slots = [];
    this.rest = [];
    this.waiting.clear();
    Object.assign(this.state, fromQuery(location.hash.slice(1), this.choices));
    this.notify("");
    this.render();
    this.stages.render();
    this.pareto.outdate();
    this.begin();
  }

  fillForm() {
    const { efforts, objectives } = this.choices;
    this.form.objective.replaceChildren(...objectives.map(({ name, label }) => make("option", { value: name }, label)));
    const names = { drawn: "hand-written schedule, no search" };
    this.form.effort.replaceChildren(...efforts.map((value) => make("option", { value }, names[value] ?? value)));
    this.render();
  }

  /** Copy the state into the form. */
  render() {
    for (const name of [...NUMBERS, ...CHOICES]) fill(this.form[name], this.state[name]);
    this.model.render();
    this.showSources();
    this.disable();
  }

  /** Fields whose values are not in force are disabled: a table of costs per stage replaces those of a rank. */
  disable() {
    for (const name of ["f", "b", "w", "a"]) this.form[name].disabled = this.state.table !== null;
    this.form.ep.disabled = !hasAllToAlls(this.state);
  }

  /** Say of each figure how sure it is. */
  showSources() {
    for (const badge of this.form.querySelectorAll("[data-source]")) badge.textContent = this.model.source(badge.dataset.source);
    byId("remark").textContent = this.model.remark;
  }

  listen() {
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => {
      if (event.target.name) this.take(event.target.name);
    });
    byId("add").addEventListener("click", () => {
      const names = new Set(this.slots.map(({ config }) => config.schedule));
      const next = ["zb-h1", "zbv", "auto"].find((name) => !names.has(name)) ?? "v-half";
      this.runAll([this.addSlot(slotConfig(next))]);
      this.keepLink();
    });
    byId("baseline").addEventListener("change", (event) => {
      this.baseline = this.slots.find(({ key }) => key === event.target.value);
      this.keepLink();
      this.show();
    });
    byId("zoom-in").addEventListener("click", () => this.timelines.scaleBy(1.6));
    byId("zoom-out").addEventListener("click", () => this.timelines.scaleBy(1 / 1.6));
    byId("fit").addEventListener("click", () => this.timelines.fit());
    byId("critical").addEventListener("click", () => {
      const isCritical = byId("critical").getAttribute("aria-pressed") === "false";
      byId("critical").setAttribute("aria-pressed", String(isCritical));
      this.timelines.light({ isCritical });
    });
    byId("find").addEventListener("input", () => this.timelines.light({ microbatch: this.found }));
    byId("find").addEventListener("keydown", (event) => event.key === "Enter" && this.found !== null && this.timelines.nextOf(this.found));
    window.addEventListener("hashchange", () => this.again());
    byId("link").addEventListener("click", () =>
      copy(location.href).then(
        () => this.notify(`The link is copied. ${isOwn() ? HERE : "It opens for everybody who reaches this site."}`, "good"),
        (error) => this.notify(error.message),
      ),
    );
    byId("more").addEventListener("click", () => this.more(byId("more").getAttribute("aria-expanded") === "false"));
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the address is the state of the form
      this.form.focus();
    });
    this.listenToTheme();
    acceptFiles({
      mostBytes: this.choices.limits.body_bytes,
      opened: (answer, name) => this.opened(answer, name),
      fail: (message) => this.notify(message),
    });
  }

  listenToTheme() {
    const root = document.documentElement;
    const button = byId("theme");
    const name = () => (button.textContent = root.dataset.theme === "dark" ? "Light" : "Dark");
    name();
    button.addEventListener("click", () => {
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
      localStorage.setItem("theme", root.dataset.theme);
      name();
      this.timelines.repaint();
    });
  }

  /** Copy the form into the state after a field changed. A value that the browser rejects is left out until it is valid. */
  take(changed) {
    for (const name of NUMBERS) {
      const field = this.form[name];
      if (!field.checkValidity()) return this.notify(`${field.closest("label").textContent.trim()}: ${field.validationMessage}`);
      this.state[name] = Number(field.value);
      seen(field);
    }
    this.state.objective = this.form.objective.value;
    this.state.effort = this.form.effort.value;
    this.notify("");
    if (this.state.model && changed in FIGURES && !this.state.own.includes(changed)) this.state.own += changed;
    if (this.state.model && (changed === "p" || changed === "m")) this.model.estimate();
    this.model.render();
    this.showSources();
    return this.changed();
  }

  /** A model was chosen or changed. */
  adoptModel() {
    this.notify("");
    this.render();
    this.stages.render();
    this.changed();
  }

  /** The problem has changed: plan all slots again that are not files. */
  changed(slots = this.slots) {
    this.keepLink();
    this.disable();
    if (slots === this.slots) this.pareto.outdate();
    for (const slot of slots) if (!slot.isOpened) this.waiting.add(slot);
    this.runWaiting();
    this.updateBusy();
  }

  runAll(slots) {
    for (const slot of slots) {
      this.waiting.delete(slot);
      if (this.slots.includes(slot) && !slot.isOpened) slot.run(this.state);
    }
    this.updateBusy();
  }

  /** Mark the results as busy while a search runs or is about to. */
  updateBusy() {
    const isBusy = this.waiting.size > 0 || this.slots.some((slot) => slot.controller);
    byId("results").setAttribute("aria-busy", String(isBusy));
  }

  addSlot(config) {
    const slot = new Slot(`slot-${this.numKeys++}`, this.choices, config, {
      changed: () => this.changed([slot]),
      arrived: () => {
        this.show();
        this.runRest();
      },
      removed: () => this.removeSlot(slot),
    });
    this.slots.push(slot);
    byId("slots").append(slot.element);
    this.count();
    return slot;
  }

  removeSlot(slot) {
    slot.cancel();
    slot.element.remove();
    this.slots = this.slots.filter((each) => each !== slot);
    this.waiting.delete(slot);
    this.runRest();
    if (this.baseline === slot) this.baseline = this.slots[0];
    this.count();
    this.keepLink();
    this.show();
  }

  count() {
    this.slots.forEach((slot, index) => slot.setLetter("ABC"[index]));
    byId("add").disabled = this.slots.length >= MOST_SLOTS;
    for (const button of document.querySelectorAll(".slot .remove")) button.disabled = this.slots.length < 2;
  }

  /** Keep the form and the chosen schedules in the address; opened files are not part of it. */
  keepLink() {
    const planned = this.slots.filter((slot) => !slot.isOpened);
    this.state.slots = planned.map(({ config }) => config);
    this.state.baseline = Math.max(0, planned.indexOf(this.baseline));
    history.replaceState(null, "", `${location.pathname}#${toQuery(this.state)}`);
  }

  show() {
    const shown = this.slots
      .filter(({ drawing }) => drawing)
      .map(({ key, letter, name, drawing, commands, limit, isOpened }) => {
        return { key, letter: letter.textContent, name: isOpened ? name : titleOf(drawing), drawing, commands, limit };
      });
    const panels = shown.map(({ key, letter, drawing, commands, limit }) => ({
      key,
      letter,
      drawing,
      limit,
      actions: takeAlong({ drawing, commands }, (message) => this.notify(message)),
    }));
    this.updateBusy();
    this.timelines.show(panels);
    const base = shown.find(({ key }) => key === this.baseline?.key) ?? shown[0];
    const sentence = shown.length ? verdict(shown, base, this.state.objective) : "";
    if (byId("verdict").textContent !== sentence) byId("verdict").textContent = sentence;
    byId("metrics").replaceChildren(...this.mistakes(), ...(shown.length ? results(shown, base, this.state.objective, this.model.error) : []));
    this.offerBaselines(shown, base);
  }

  /** The microbatch that is looked for; null: none. */
  get found() {
    const text = byId("find").value.trim();
    return /^\d+$/.test(text) ? Number(text) : null;
  }

  /** Show all metrics, or only the first ones. */
  more(isOpen) {
    byId("more").setAttribute("aria-expanded", String(isOpen));
    byId("more").textContent = isOpen ? "Less" : "More";
    byId("metrics").classList.toggle("all", isOpen);
  }

  /** Why schedules are not shown, once for all that have the same reason: their own messages may be out of sight. */
  mistakes() {
    const letters = new Map();
    for (const { error, letter } of this.slots) {
      if (error) letters.set(error, [...(letters.get(error) ?? []), letter.textContent]);
    }
    return [...letters].map(([error, of]) => make("p", { class: "bad" }, `${of.join(", ")}: ${error}`));
  }

  /** Keep the select as it is while it offers the same: it may be open. */
  offerBaselines(shown, base) {
    const select = byId("baseline");
    const texts = shown.map(({ letter, name }) => `${letter}: ${name}`);
    const isSame = select.options.length === texts.length && texts.every((text, i) => select.options[i].text === text && select.options[i].value === shown[i].key);
    if (!isSame) select.replaceChildren(...shown.map(({ key }, i) => make("option", { value: key }, texts[i])));
    if (base) select.value = base.key;
  }

  /** The costs of a new table, with the most stages of any schedule; costs of fewer stages are derived from them. */
  async usualStages() {
    if (this.state.model) return this.model.stages();
    const planned = this.slots.filter(({ drawing }) => drawing?.num_ranks === this.state.p);
    return uniform(this.state, Math.max(this.state.p, ...planned.map(({ drawing }) => drawing.costs.forward_ms.length)));
  }

  /** Show a file that the server has read. */
  opened(answer, name) {
    if (answer.kind === "costs") return this.adoptCosts(answer, name);
    if (answer.kind === "model") {
      this.model.open(answer.layers);
      return this.notify(`${name}: ${answer.num_layers} layers.`, "good");
    }
    this.place().open({ name, drawings: answer.drawings });
    const { num_ranks, num_microbatches, costs } = answer.drawings[answer.drawings.length - 1];
    const given = { num_ranks, num_microbatches, costs };
    if (answer.kind === "trace") {
      this.adoptCosts(given, name); // so that the baseline is that of the run
      this.notify(`${name}: opened. The schedules are planned for its costs.`, "good");
    } else this.notify(`${name}: opened.`, "good", ["Plan for its costs", () => this.adoptCosts(given, name)]);
    this.keepLink();
    return undefined;
  }

  /** Choose the slot for something new: a free one, or the last one that shows no file, if possible not the baseline. */
  place() {
    if (this.slots.length < MOST_SLOTS) return this.addSlot(slotConfig("zbv"));
    const slot = this.planned() ?? this.slots.findLast((each) => !each.isOpened) ?? this.slots[MOST_SLOTS - 1];
    this.waiting.delete(slot);
    return slot;
  }

  /** The last slot that plans something and is not the baseline. */
  planned() {
    return this.slots.findLast((each) => !each.isOpened && each !== this.baseline);
  }

  /** Plan with measured costs. */
  adoptCosts({ costs, num_ranks: p, num_microbatches: m, schedule, from }, name) {
    const { comm_ms: c, microbatches, links, all_to_all: [ofF, ofB] = [0, 0], wgrad_beside: _, ...kinds } = costs;
    Object.assign(this.state, { model: null, own: "", ep: (ofF + ofB) / 2, c: brief(c) }, p ? { p } : {}, m ? { m } : {});
    this.render();
    byId("stages").open = true;
    const isPlanned = this.slots.some((each) => !each.isOpened && each.config.schedule === schedule);
    const info = this.choices.schedules.find((known) => known.name === schedule);
    // The measured schedule takes a place beside the baseline, never the baseline's.
    const target = isPlanned || !info ? null : this.slots.length < MOST_SLOTS ? this.place() : this.planned();
    if (target) {
      Object.assign(target.config, slotConfig(schedule));
      if (info.num_chunks === null) target.config.chunks = kinds.forward_ms.length / this.state.p;
      target.render();
    }
    const means = microbatches || links ? "; its microbatches or links are unequal, so their means count" : "";
    const lost = ofF === ofB ? means : `${means}; all-to-alls take different shares of F and of B, so their mean counts`;
    this.notify(`${name}: times of ${kinds.forward_ms.length} stages${from ? ` from ${from}` : ""}${lost}.`, "good");
    this.stages.set(kinds);
  }

  /** Show the plan of a point of the Pareto front, and set the slot's options to those that lead to it. */
  async choosePoint(point) {
    const slot = this.planned() ?? this.place();
    slot.file = null;
    Object.assign(slot.config, slotConfig(point.schedule, point.memory_limit, null, ""));
    if (slot.info.num_chunks === null) slot.config.chunks = point.num_chunks;
    if (!slot.info.is_searched) slot.config.limit = null;
    slot.cancel();
    this.waiting.delete(slot);
    slot.render();
    this.keepLink();
    try {
      const { derived_from, memory, commands } = point;
      const { drawing } = await ask("show", { plan: point.plan });
      slot.adopt({ drawing: { ...drawing, derived_from, memory }, commands });
      slot.setStatus(`plan of the Pareto front at memory limit ${point.memory_limit}`);
    } catch (error) {
      slot.fail(error.message);
    }
  }

  /** Show a message at the top; "" removes it. `offer`: [text, action] of a button beside it. */
  notify(message, kind = "bad", offer = null) {
    const button = offer && make("button", { type: "button", click: offer[1] }, offer[0]);
    byId("notes").replaceChildren(message ? make("p", { class: kind }, message, button) : "");
  }
}

const HERE = "It opens on this machine while this playground runs; behind # it fits any other playground's address.";

/** Whether only this machine can open the page. */
const isOwn = () => /^(localhost$|127\.|\[::1\])/.test(location.hostname) || location.protocol === "file:";

/** A plan's schedule as its paper calls it, with the number of virtual stages where that is a choice. */
function titleOf({ title, placement, num_chunks: v }) {
  return placement === "loop" && v > 1 ? `${title}, v = ${v}` : title;
}

const choices = await askChoices();
byId("version").textContent = `megatron-zerobubble ${choices.version}`;
new Playground(choices);
