// The problem from a model: presets, sizes and a GPU, from which the planner estimates the times of the form.

import { ask } from "./api.js";
import { byId, fill, make, seen } from "./dom.js";
import { brief } from "./numbers.js";

/** The form's figures by the names of a request. */
export const FIGURES = { f: "forward_ms", b: "backward_ms", w: "wgrad_ms", c: "comm_ms", a: "activation_after_backward" };
const EXPERTS = ["moe_router_topk", "moe_ffn_hidden_size", "expert_model_parallel_size"];
const HAND = "by hand";
const OWN = "own sizes";
const FILE = "layers of a file";

export class ModelForm {
  /** `changed()` after a model was chosen or changed; `adopted()` when its figures are in the state; `fail(message)`. */
  constructor(root, offers, { state, changed, adopted, fail }) {
    Object.assign(this, { root, offers, state, changed, adopted, fail });
    this.select = make("select", { "aria-label": "model", change: () => this.choose(this.select.value) });
    this.sizes = byId("model-sizes");
    const group = (label, names) => make("optgroup", { label }, ...names.map((name) => make("option", { value: name }, name)));
    this.select.append(
      make("option", { value: HAND }, "times by hand"),
      group("published times", Object.keys(offers.published)),
      group("estimated from sizes", [...Object.keys(offers.shapes), OWN]),
      group("estimated by layers", Object.keys(offers.layered)),
    );
    root.prepend(this.select);
    this.balanced = make("select", { change: () => this.set("is_balanced", Number(this.balanced.value)) });
    this.balanced.append(make("option", { value: 0 }, "as many in each"), make("option", { value: 1 }, "by their work"));
    this.gpu = make("select", { change: () => this.chooseGpu() });
    this.gpu.append(...[...Object.keys(offers.gpus), "other"].map((name) => make("option", { value: name }, name)));
    this.device = this.number("device_gib", { least: 1, most: 4096, is_whole: false });
    this.inputs = Object.fromEntries(Object.entries(offers.fields).map(([name, field]) => [name, this.number(name, field)]));
    const fields = Object.entries(this.inputs).map(([name, input]) => make("label", { "data-size": name }, offers.fields[name].label, " ", input));
    this.sizes.append(
      make(
        "div",
        { class: "fields two" },
        make("label", {}, "layers per stage ", this.balanced),
        make("label", {}, "GPU ", this.gpu),
        make("label", {}, "GPU memory, GiB ", this.device),
        ...fields,
      ),
    );
    this.render();
  }

  number(name, { least, most, is_whole: isWhole }) {
    const input =
      isWhole && most === 1
        ? make("select", {}, make("option", { value: 0 }, "no"), make("option", { value: 1 }, "yes"))
        : make("input", { type: "number", min: least, max: most, step: isWhole ? 1 : "any", required: true });
    input.addEventListener("change", () => {
      if (!input.checkValidity()) return this.fail(`${name}: ${input.validationMessage}`);
      seen(input);
      return this.set(name, Number(input.value));
    });
    return input;
  }

  /** The name of what the state has. */
  get name() {
    const { model } = this.state;
    if (model?.layers) return FILE;
    if (model) return model.preset ?? this.named(this.offers.shapes, ({ model: sizes }) => same(sizes, model)) ?? OWN;
    return this.named(this.offers.published, ({ p, m, ...figures }) => same(figures, this.state)) ?? HAND;
  }

  named(presets, fits) {
    return Object.keys(presets).find((name) => fits(presets[name]));
  }

  choose(name) {
    const { published, shapes, layered } = this.offers;
    const preset = published[name] ?? shapes[name] ?? layered[name] ?? {};
    const sizes = shapes[name]?.model ?? (name === OWN ? this.fields() : layered[name] ? { preset: name } : null);
    const { model, ...figures } = preset;
    const kept = this.state.model ? { device_gib: this.state.model.device_gib, is_balanced: this.state.model.is_balanced } : {};
    Object.assign(this.state, figures, { model: sizes && { device_gib: this.offers.gpus.H100.device_gib, is_balanced: 0, ...kept, ...sizes }, own: "", table: null });
    this.update();
  }

  /** Plan for the layers of a file. */
  open(layers) {
    Object.assign(this.state, { model: { device_gib: this.offers.gpus.H100.device_gib, is_balanced: 0, layers }, own: "", table: null });
    this.update();
  }

  fields() {
    const usual = Object.fromEntries(Object.entries(this.offers.fields).map(([name, { usual: value }]) => [name, value]));
    return { ...usual, ...(this.state.model?.preset || this.state.model?.layers ? {} : this.state.model) };
  }

  chooseGpu() {
    const gpu = this.offers.gpus[this.gpu.value];
    if (!gpu || !this.state.model) return;
    for (const [name, value] of Object.entries(gpu)) if (name in this.state.model) this.state.model[name] = value;
    this.update();
  }

  set(name, value) {
    this.state.model[name] = value;
    this.update();
  }

  update() {
    this.render();
    this.changed();
    this.estimate();
  }

  /** Take the figures of the model into the form, except those that the user has replaced. */
  async estimate() {
    const { state } = this;
    if (!state.model) return;
    const asked = (this.asked = {});
    try {
      const { figures } = await ask("figures", { num_ranks: state.p, num_microbatches: state.m, schedule: "1f1b", model: state.model });
      if (asked !== this.asked || !state.model) return;
      for (const [name, key] of Object.entries(FIGURES)) if (!state.own.includes(name)) state[name] = brief(figures[key]);
      this.adopted();
    } catch (error) {
      if (asked === this.asked) this.fail(error.message);
    }
  }

  /** The costs of 2p stages. */
  async stages() {
    const { stages } = await ask("figures", request(this.state));
    const { comm_ms: _, ...kinds } = stages;
    return kinds;
  }

  render() {
    const { model } = this.state;
    const { name } = this;
    this.select.querySelector("[data-file]")?.remove();
    if (name === FILE) this.select.prepend(make("option", { value: FILE, "data-file": "yes" }, FILE));
    this.select.value = name;
    this.sizes.hidden = !model;
    if (!model) return;
    this.balanced.value = model.is_balanced;
    fill(this.device, model.device_gib);
    for (const [size, input] of Object.entries(this.inputs)) {
      input.closest("label").hidden = !(size in model) || (EXPERTS.includes(size) && !model.num_experts);
      fill(input, model[size] ?? "");
    }
    const fits = (gpu) => Object.entries(gpu).every(([size, value]) => !(size in model) || model[size] === value);
    this.gpu.value = this.named(this.offers.gpus, fits) ?? "other";
  }

  /** What the words beside the figures mean. */
  get remark() {
    if (this.error) return `assumed: estimated for the GPU's peak and the share of it that is reached, ± ${100 * this.error} % until a run is profiled`;
    return this.state.model || this.name === HAND ? "" : "published: arXiv 2401.10241, Table 9";
  }

  /** How sure a figure of the form is, in words. */
  source(name) {
    const { model, own, table } = this.state;
    if (table) return "per stage";
    if (model) return own.includes(name) ? "entered" : model.layers ? "measured" : "assumed";
    if (this.name !== HAND) return "published";
    return "";
  }

  /** How far the times may be off, as a share; 0 if they are not estimated. */
  get error() {
    const { model, own, table } = this.state;
    return model && !model.layers && !table && !["f", "b", "w"].every((name) => own.includes(name)) ? this.offers.error : 0;
  }
}

/** Whether tokens may travel between experts: not in a dense model, nor where each rank has all experts. Unknown of a list of layers. */
export function hasAllToAlls({ model }) {
  return !model || Boolean(model.layers || model.preset) || (model.num_experts > 0 && model.expert_model_parallel_size > 1);
}

/** The part of a request that is about the model. */
export function request({ p, m, model, own, ...state }) {
  const times = Object.fromEntries([...own].map((name) => [FIGURES[name], state[name]]));
  return { num_ranks: p, num_microbatches: m, schedule: "1f1b", model, times };
}

/** Whether all values of one are those of the other. */
function same(one, other) {
  return Object.entries(one).every(([name, value]) => other[name] === value);
}
