// What a pass depends on: its inputs, the chain of its microbatch, and the critical path of a whole timeline.

const EARLIER = 1e-4; // ms: times are rounded to 1e-5

/** Lookups of a drawing's passes by stage, kind, microbatch and slice; `names`: the kinds' names in the order of their indices. */
export class Passes {
  constructor(drawing, names) {
    this.drawing = drawing;
    this.names = names;
    this.numStages = drawing.costs.forward_ms.length;
    this.places = new Map();
    // Its microbatch and slice as one number: what depends on what is the same for every slice, but for the keys of earlier ones.
    this.piece = ({ microbatches, slices }, index) => microbatches[index] * drawing.num_slices + slices[index];
    drawing.ranks.forEach((row, rank) => {
      row.kinds.forEach((kind, index) => this.places.set(this.key(row.stages[index], names[kind], this.piece(row, index)), { rank, index }));
    });
  }

  key(stage, name, piece) {
    return (this.names.indexOf(name) * this.numStages + stage) * this.drawing.num_microbatches * this.drawing.num_slices + piece;
  }

  /** A pass as {stage, name, microbatch}, with the number of its slice in place of the microbatch's where those are cut. */
  at({ rank, index }) {
    const row = this.drawing.ranks[rank];
    return { stage: row.stages[index], name: this.names[row.kinds[index]], microbatch: this.piece(row, index) };
  }

  get(stage, name, microbatch) {
    return this.places.get(this.key(stage, name, microbatch)) ?? null;
  }

  backward(stage, microbatch) {
    return this.get(stage, "B", microbatch) ?? this.get(stage, "BW", microbatch);
  }

  /** The pass whose result it needs; null: none. */
  input(place) {
    const { stage, name, microbatch } = this.at(place);
    if (name === "F") return stage ? this.get(stage - 1, "F", microbatch) : null;
    if (name === "W") return this.get(stage, "B", microbatch);
    return stage < this.numStages - 1 ? this.backward(stage + 1, microbatch) : this.get(stage, "F", microbatch);
  }

  /** The passes that need its result. */
  outputs(place) {
    const { stage, name, microbatch } = this.at(place);
    if (name === "W") return [];
    if (name === "F") return [stage < this.numStages - 1 ? this.get(stage + 1, "F", microbatch) : this.backward(stage, microbatch)].filter(Boolean);
    return [stage ? this.backward(stage - 1, microbatch) : null, name === "B" ? this.get(stage, "W", microbatch) : null].filter(Boolean);
  }

  /** From the first F of its microbatch to the last backward pass. */
  chain(place) {
    const { microbatch } = this.at(place);
    const stages = Array.from({ length: this.numStages }, (_, stage) => stage);
    return [...stages.map((stage) => this.get(stage, "F", microbatch)), ...stages.reverse().map((stage) => this.backward(stage, microbatch))].filter(Boolean);
  }

  /** The passes that the end of the last one waits for, the last one first: none of them can end later without delaying it. */
  criticalPath() {
    const { ranks } = this.drawing;
    const end = ({ rank, index }) => ranks[rank].ends[index];
    const last = ranks.map(({ ends }, rank) => ({ rank, index: ends.length - 1 })).filter(({ index }) => index >= 0);
    let place = last.reduce((one, other) => (end(other) > end(one) ? other : one), last[0] ?? null);
    const path = [];
    while (place) {
      path.push(place);
      const { rank, index } = place;
      const before = index ? { rank, index: index - 1 } : null;
      const isNext = before && ranks[rank].starts[index] - end(before) <= EARLIER;
      place = isNext ? before : (this.input(place) ?? before);
    }
    return path;
  }
}
