// The metrics of all schedules side by side. Only columns of the baseline's problem are compared with it: the same p, m and costs.

import { make, table } from "./dom.js";
import { gibibytes, milliseconds, number, percent } from "./numbers.js";
import { explained } from "./words.js";

const TOLERANCE = 1e-6;
const TIE = 1e-3;
const UNEVEN = 1.2;

/** Iteration time of a plan, with what surrounds the passes where that is known. */
const time = (m, objective) => m[`step_${objective}_ms`] ?? m[`${objective}_ms`];
const peak = (m) => Math.max(...m.peak_memory);
const times = (value) => `${value.toFixed(2)}×`;

/**
 * Label, value of a drawing and the baseline's metrics (undefined: unknown), format, which value is the best: least, most, or none.
 * The first ones are always there, all others after "More". A row where no plan has a value is left out.
 */
const FIRST = [
  ["speed-up, synchronous optimizer", ({ metrics: m }, base) => base && time(base, "makespan") / time(m, "makespan"), times, "most"],
  ["speed-up with post-validation", ({ metrics: m }, base) => base && time(base, "span") / time(m, "span"), times, "most"],
  ["bubble: idle share of the iteration", ({ metrics: m }, base, objective) => bubbles(m, objective)[0], percent, "least"],
  ["memory of the fullest rank", (drawing) => fullest(drawing)?.bytes, gibibytes, "least"],
  ["peak activation memory (1.0 = 1F1B on rank 0)", ({ metrics: m }) => peak(m), number, "least"],
];
const MORE = [
  ["iteration time with the synchronous optimizer (makespan)", ({ metrics: m }) => m.makespan_ms, milliseconds, "least"],
  ["with the synchronous optimizer, and what surrounds the passes", ({ metrics: m }) => m.step_makespan_ms, milliseconds, "least"],
  ["makespan above its lower bound", ({ metrics: m }) => m.makespan_gap, percent, ""],
  ["iteration time with post-validation (span)", ({ metrics: m }) => m.span_ms, milliseconds, "least"],
  ["with post-validation, and what surrounds the passes", ({ metrics: m }) => m.step_span_ms, milliseconds, "least"],
  ["span above its lower bound", ({ metrics: m }) => m.span_gap, percent, ""],
  ["bubble, lower bound", ({ metrics: m }, base, objective) => bubbles(m, objective)[1], percent, ""],
  ["idle share of the makespan", ({ metrics: m }) => m.idle_share, percent, "least"],
  ["P2P messages per iteration", ({ metrics: m }) => m.num_messages, (value) => value.toLocaleString("en"), "least"],
  ["P2P messages relative to 1F1B", ({ metrics: m }) => m.relative_messages, times, ""],
];

/** Idle share of an iteration time on the bottleneck rank, and that of its lower bound: of the span or the makespan. */
export function bubbles(metrics, objective) {
  const work = metrics.span_ms * (1 - metrics.bubble_rate);
  const idle = (time) => (time > 0 ? Math.max(0, 1 - work / time) : time);
  return [idle(metrics[`${objective}_ms`]), idle(metrics[`bound_${objective}_ms`])];
}

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

/**
 * The results of `shown`, a list of {letter, name, drawing}; `base` is the one that the others are compared with; `objective`: the
 * iteration time that bubbles are shares of; `error`: how far times may be off, as a share.
 */
export function results(shown, base, objective, error = 0) {
  const apart = apartFrom(shown, base);
  const alike = shown.filter((each) => !apart.get(each));
  const head = ["", ...shown.map((each) => `${each.letter}  ${each.name}${each === base ? " (baseline)" : ""}`)];
  const hasBytes = shown.some(({ drawing }) => drawing.memory);
  const rows = (list) =>
    list.flatMap(([name, take, write, wanted]) => {
      const values = new Map(shown.map((each) => [each, known(take(each.drawing, apart.get(each) ? null : base.drawing.metrics, objective))]));
      if ([...values.values()].every((value) => value === undefined)) return [];
      const isTime = write === milliseconds && error;
      const told = isTime ? (value) => `${write(value)} ± ${100 * error} %` : write;
      const best = bestOf(alike.map((each) => values.get(each)), wanted);
      return [[make("span", {}, ...explained(name)), ...shown.map((each) => cell(values.get(each), told, best, alike.length > 1 && alike.includes(each), wanted, each))]];
    });
  const first = rows(FIRST.filter((_, at) => at !== (hasBytes ? 4 : 3)));
  const whole = table("Metrics of the schedules", head, [...first, ...rows([...(hasBytes ? FIRST.slice(4) : []), ...MORE])]);
  whole.querySelectorAll("tbody tr").forEach((row, at) => row.classList.toggle("further", at >= first.length));
  return [
    ...shown.filter((each) => apart.get(each)).map((each) => make("p", { class: "apart" }, `${titled(each)} is not compared with ${titled(base)}: ${apart.get(each)}.`)),
    make("div", { class: "scroll" }, whole),
    ...(error ? [make("p", { class: "hint" }, `Times are estimated from the model, ± ${100 * error} %, until a run is profiled: drop its report.json.`)] : []),
    ...shown.flatMap((each) => caveats(each.drawing).map((text) => make("p", { class: "hint" }, `${each.letter}: ${text}.`))),
  ];
}

function apartFrom(shown, base) {
  return new Map(shown.map((each) => [each, difference(each.drawing, base.drawing)]));
}

/**
 * One sentence about the best schedule. The fastest one is the best; of those that are as fast the one with the fewest messages,
 * of those the one with the least memory, of those the one that is faster with the other kind of optimizer step.
 */
export function verdict(shown, base, objective) {
  const apart = apartFrom(shown, base);
  const alike = shown.filter((each) => !apart.get(each));
  const other = objective === "span" ? "makespan" : "span";
  const measures = [
    (each) => time(each.drawing.metrics, objective),
    (each) => each.drawing.metrics.num_messages,
    (each) => peak(each.drawing.metrics),
    (each) => time(each.drawing.metrics, other),
  ];
  const [best, ...rest] = ranked(alike, measures);
  const misfit = fullest(best.drawing)?.excess > 0 ? ` It does not fit: ${misfits(best.drawing)}.` : "";
  if (shown.length === 1) return `${titled(base)} takes ${milliseconds(measures[0](base))}, with a bubble of ${percent(bubbles(base.drawing.metrics, objective)[0])}.${misfit}`;
  if (!rest.length) return `Nothing is compared with ${titled(base)}: see below.`;
  if (best === base) return `No schedule here is better than ${titled(base)}.${misfit}`;
  const tied = rest.find((each) => isTie(measures[0](each), measures[0](best)));
  const because = tied && tied !== base ? ` ${titled(tied)} is as fast, ${costs(tied, best)}.` : "";
  return `${sentence(best, base, objective)}${misfit}${because}`;
}

/** Ordered by the first measure, those that tie in it by the second, and so on. */
function ranked(list, [first, ...others]) {
  if (list.length < 2 || !first) return list;
  const least = Math.min(...list.map(first));
  const tied = list.filter((each) => isTie(first(each), least));
  const behind = list.filter((each) => !tied.includes(each));
  return [...ranked(tied, others), ...ranked(behind, [first, ...others])];
}

function isTie(one, other) {
  return Math.abs(one - other) <= TIE * Math.max(Math.abs(one), Math.abs(other));
}

/** What a schedule that is as fast as another one needs more than that. */
function costs(each, best) {
  const [mine, theirs] = [each.drawing.metrics, best.drawing.metrics];
  const messages = ratio(mine.num_messages, theirs.num_messages);
  return `with ${messages} times the messages and ${ratio(peak(mine), peak(theirs))} times the activation memory`;
}

/** The rank of a drawing that needs most bytes, {rank, bytes, excess}; undefined if bytes are not known. */
export function fullest({ memory, metrics }) {
  if (!memory) return undefined;
  const bytes = metrics.peak_memory.map((held, rank) => memory.static_bytes[rank] + held * memory.unit_bytes);
  const rank = bytes.indexOf(Math.max(...bytes));
  return { rank, bytes: bytes[rank], excess: memory.device_bytes === null ? 0 : bytes[rank] - memory.device_bytes };
}

function misfits(drawing) {
  const { rank, bytes } = fullest(drawing);
  return `rank ${rank} needs ${gibibytes(bytes)}, and the GPU has ${gibibytes(drawing.memory.device_bytes)}`;
}

/** What is not measured about a drawing. */
export function caveats(drawing) {
  const { derived_from: given, costs, memory_is_assumed: isAssumed } = drawing;
  const stages = costs.forward_ms.length;
  const found = imbalance(drawing);
  if (given) found.push(`costs of ${stages} stages, derived from those of ${given}: each is the sum of ${given / stages} consecutive ones`);
  if (isAssumed) found.push("activation memory is not in the trace; this assumes equal stages that keep all of it until W");
  return found;
}

/** The rank with the most work, if it has much more than another one. */
function imbalance({ table: ranks }) {
  const work = ranks.map(({ busy_ms: busy }) => busy);
  const [most, least] = [Math.max(...work), Math.min(...work)];
  const at = (value) => work.indexOf(value);
  return most > UNEVEN * least ? [`rank ${at(most)} has ${ratio(most, least)} times rank ${at(least)}'s work: divide the layers by their work`] : [];
}

function titled({ letter, name }) {
  return `${name} (${letter})`;
}

function known(value) {
  return Number.isFinite(value) ? value : undefined;
}

function ratio(one, other) {
  return other > 0 ? (one / other).toFixed(2) : "–";
}

function sentence(each, base, objective) {
  const [mine, theirs] = [each.drawing.metrics, base.drawing.metrics];
  const faster = (which) => ratio(time(theirs, which), time(mine, which));
  const both =
    objective === "span"
      ? `${faster("span")} times as fast as ${titled(base)} with post-validation, ${faster("makespan")} without`
      : `${faster("makespan")} times as fast as ${titled(base)}, ${faster("span")} with post-validation`;
  const [held, other] = [fullest(each.drawing), fullest(base.drawing)];
  const memory =
    held && other
      ? `with ${gibibytes(held.bytes)} on the fullest rank in place of ${gibibytes(other.bytes)}`
      : `at ${ratio(peak(mine), peak(theirs))} times its activation memory`;
  return `${titled(each)} is ${both}, ${memory}.`;
}

function bestOf(values, wanted) {
  const numbers = values.filter((value) => value !== undefined);
  return wanted === "most" ? Math.max(...numbers) : Math.min(...numbers);
}

function cell(value, write, best, isCompared, wanted, { drawing }) {
  if (value === undefined) return "–";
  const isBest = isCompared && wanted && Math.abs(value - best) <= 1e-9 * Math.max(Math.abs(best), 1e-9);
  const isMisfit = write === gibibytes && fullest(drawing).excess > 0;
  const text = isMisfit ? `${write(value)}: does not fit ${write(drawing.memory.device_bytes)}` : write(value);
  return make(isBest ? "strong" : "span", isMisfit ? { class: "bad" } : {}, text);
}
