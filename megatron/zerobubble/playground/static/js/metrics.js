// The metrics of all schedules side by side. Only columns of the baseline's problem are compared with it: the same p, m and costs.

import { make, table } from "./dom.js";
import { milliseconds, number, percent } from "./numbers.js";

const TOLERANCE = 1e-6;

/** Iteration time for an objective: of the plan that was made for it, if there was such a search, else of the plan on the page. */
const time = (m, objective) => m.times_ms?.[objective] ?? m[`${objective}_ms`];
const peak = (m) => Math.max(...m.peak_memory);

/**
 * Label, value from the metrics and the baseline's (undefined: unknown), format, which value is the best: least, most, or none;
 * and whether the row is left out where no plan has a value, because all microbatches and links are equal.
 */
const ROWS = [
  ["speed-up, synchronous optimizer", (m, base) => base && time(base, "makespan") / time(m, "makespan"), (value) => `${value.toFixed(2)}×`, "most"],
  ["speed-up with post-validation", (m, base) => base && time(base, "span") / time(m, "span"), (value) => `${value.toFixed(2)}×`, "most"],
  ["iteration time with the synchronous optimizer (makespan)", (m) => m.makespan_ms, milliseconds, "least"],
  ["makespan above its lower bound", (m) => m.makespan_gap, percent, ""],
  ["iteration time with post-validation (span)", (m) => m.span_ms, milliseconds, "least"],
  ["span above its lower bound", (m) => m.span_gap, percent, ""],
  ["bubble rate", (m) => m.bubble_rate, percent, "least"],
  ["bubble rate, lower bound", (m) => m.bound_bubble_rate, percent, ""],
  ["idle share of the makespan", (m) => m.idle_share, percent, "least", true],
  ["idle share in its own order with the data as it came", (m) => m.came_idle_share, percent, "", true],
  ["speed-up over its own order with the data as it came", (m) => m.came_makespan_ms / m.makespan_ms, (value) => `${value.toFixed(2)}×`, "", true],
  ["peak activation memory (1.0 = 1F1B on rank 0)", peak, number, "least"],
  ["P2P messages per iteration", (m) => m.num_messages, (value) => value.toLocaleString("en"), "least"],
  ["P2P messages relative to 1F1B", (m) => m.relative_messages, (value) => `${value.toFixed(2)}×`, ""],
];

/** Why two drawings cannot be compared, in words; "" if they can. */
export function difference({ problem: one }, { problem: other }) {
  const close = (a, b) => Math.abs(a - b) <= TOLERANCE * Math.max(1e-3, Math.abs(a), Math.abs(b));
  const same = (key) => close(one[key], other[key]);
  const alike = (key) => one[key].length === other[key].length && one[key].every((value, i) => close(value, other[key][i]));
  if (!same("num_ranks")) return `p = ${one.num_ranks} instead of ${other.num_ranks}`;
  if (!same("num_microbatches")) return `m = ${one.num_microbatches} instead of ${other.num_microbatches}`;
  if (!alike("microbatches")) return "other lengths of microbatches";
  if (!alike("links")) return "other links";
  return Object.keys(one).every((key) => Array.isArray(one[key]) || same(key)) ? "" : "other costs";
}

/** The results of `shown`, a list of {letter, name, drawing}; `base` is the one that the others are compared with. */
export function results(shown, base) {
  const apart = new Map(shown.map((each) => [each, difference(each.drawing, base.drawing)]));
  const alike = shown.filter((each) => !apart.get(each));
  const head = ["", ...shown.map((each) => `${each.letter}  ${each.name}${each === base ? " (baseline)" : ""}`)];
  const isUnequal = shown.some(({ drawing }) => drawing.metrics.idle_share !== undefined);
  const rows = ROWS.filter((row) => isUnequal || !row[4]).map(([name, take, write, wanted]) => {
    const values = new Map(shown.map((each) => [each, known(take(each.drawing.metrics, apart.get(each) ? null : base.drawing.metrics))]));
    const best = bestOf(alike.map((each) => values.get(each)), wanted);
    return [name, ...shown.map((each) => cell(values.get(each), write, best, alike.length > 1 && alike.includes(each), wanted))];
  });
  const others = alike.filter((each) => each !== base);
  return [
    ...others.map((each) => make("p", { class: "speed" }, sentence(each, base))),
    ...shown.filter((each) => apart.get(each)).map((each) => make("p", { class: "apart" }, `${titled(each)} is not compared with ${titled(base)}: ${apart.get(each)}.`)),
    make("div", { class: "scroll" }, table("Metrics of the schedules", head, rows)),
    ...shown.flatMap((each) => caveats(each.drawing).map((text) => make("p", { class: "hint" }, `${each.letter}: ${text}.`))),
  ];
}

/** What is not measured about a drawing. */
export function caveats({ derived_from: given, costs, memory_is_assumed: isAssumed, memory_limit: limit, metrics }) {
  const stages = costs.forward_ms.length;
  const found = [];
  if (given) found.push(`costs of ${stages} stages, derived from those of ${given}: each is the sum of ${given / stages} consecutive ones`);
  if (isAssumed) found.push("activation memory is not in the trace; this assumes equal stages that keep all of it until W");
  if (metrics.came_peak_memory > (limit ?? Infinity)) {
    found.push(`its own order with the data as it came needs ${number(metrics.came_peak_memory)} of 1F1B's memory, more than the limit`);
  }
  return found;
}

function titled({ letter, name }) {
  return `${name} (${letter})`;
}

function known(value) {
  return Number.isFinite(value) ? value : undefined;
}

function sentence(each, base) {
  const [mine, theirs] = [each.drawing.metrics, base.drawing.metrics];
  const ratio = (one, other) => (other > 0 ? (one / other).toFixed(2) : "–");
  return (
    `${titled(each)} is ${ratio(time(theirs, "makespan"), time(mine, "makespan"))} times as fast as ${titled(base)}, ` +
    `${ratio(time(theirs, "span"), time(mine, "span"))} with post-validation, at ${ratio(peak(mine), peak(theirs))} times its memory.`
  );
}

function bestOf(values, wanted) {
  const numbers = values.filter((value) => value !== undefined);
  return wanted === "most" ? Math.max(...numbers) : Math.min(...numbers);
}

function cell(value, write, best, isCompared, wanted) {
  if (value === undefined) return "–";
  const isBest = isCompared && wanted && Math.abs(value - best) <= 1e-9 * Math.max(Math.abs(best), 1e-9);
  return make(isBest ? "strong" : "span", {}, write(value));
}
