// The table of costs per stage. It is off until it is filled: from the fields above it, or from a dropped file.

import { make, table } from "./dom.js";
import { brief } from "./numbers.js";
import { TABLE_KINDS } from "./state.js";

const HEADS = ["stage", "F ms", "B ms", "W ms", "M_B", "M_W"];

export class Stages {
  /** `parts`: {box, fill, clear, note}; `usual()` promises the costs of a new table. */
  constructor(parts, { state, usual, changed }) {
    Object.assign(this, parts);
    this.state = state;
    this.changed = changed;
    this.fill.addEventListener("click", async () => this.set(await usual()));
    this.clear.addEventListener("click", () => this.set(null));
    this.render();
  }

  /** Set the table, {kind: values}, or null for uniform costs. */
  set(values) {
    this.state.table = values;
    this.render();
    this.changed();
  }

  render() {
    const values = this.state.table;
    this.clear.disabled = !values;
    this.note.textContent = values ? `(${values.forward_ms.length} stages)` : "";
    if (!values) return this.box.replaceChildren();
    const rows = values.forward_ms.map((_, stage) => [
      String(stage),
      ...TABLE_KINDS.map((kind, column) =>
        make("input", {
          type: "number",
          min: 0,
          step: "any",
          value: brief(values[kind][stage]),
          "aria-label": `${HEADS[column + 1]} of stage ${stage}`,
          change: (event) => {
            values[kind][stage] = Number(event.target.value);
            this.changed();
          },
        }),
      ),
    ]);
    return this.box.replaceChildren(table("Costs per stage", HEADS, rows));
  }
}

/** Uniform costs: the times of a rank are split evenly over its stages. */
export function uniform(state, numStages) {
  const share = state.p / numStages;
  const all = (value) => new Array(numStages).fill(round(value * share));
  return {
    forward_ms: all(state.f),
    backward_ms: all(state.b),
    wgrad_ms: all(state.w),
    activation: all(1),
    activation_after_backward: all(state.a),
  };
}

function round(value) {
  return Number(value.toPrecision(6));
}
