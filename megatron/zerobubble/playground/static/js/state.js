// The state of the form, and its encoding in the hash of a link, which no server sees.

import { FIGURES, hasAllToAlls, request } from "./model.js";

export const MOST_SLOTS = 3;
export const TABLE_KINDS = ["forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward"];

const TIMES = { p: 8, m: 24, f: 1, b: 1, w: 1, c: 0, a: 1 };
const EXPERTS = { ep: 0 }; // share of all-to-alls in F and in B
const STEP = { reduce: 0, gather: 0, optimizer: 0, snapshot: 0 }; // ms of a rank and iteration, around the passes
const SCALARS = { ...TIMES, ...EXPERTS, ...STEP };
// The objective is that of a run without --enable-optimizer-post-validation.
const WORDS = { objective: "makespan", effort: "fast" };

/** The names of the form's fields that are numbers and choices. */
export const NUMBERS = Object.keys(SCALARS);
export const CHOICES = Object.keys(WORDS);

/** The state of a new page. */
export function defaults() {
  return { ...SCALARS, ...WORDS, model: null, own: "", table: null, baseline: 0, slots: [slot("1f1b"), slot("zbv")] };
}

/** A schedule to plan. With `limit` null the memory limit is the schedule's own. */
export function slot(schedule, limit = null, chunks = null, pending = "", slices = null) {
  return { schedule, limit, chunks, pending, slices };
}

/** The hash that restores a state, without the values that equal the defaults. */
export function toQuery(state) {
  const query = new URLSearchParams();
  for (const [name, usual] of Object.entries({ ...SCALARS, ...WORDS })) {
    const isEstimated = state.model && name in FIGURES && !state.own.includes(name);
    if (state[name] !== usual && !isEstimated) query.set(name, String(state[name]));
  }
  for (const { schedule, limit, chunks, pending, slices } of state.slots) {
    query.append("s", [schedule, limit ?? "", chunks ?? "", pending, slices ?? ""].join("~").replace(/~+$/, ""));
  }
  if (state.model) query.set("model", JSON.stringify(state.model));
  if (state.model && state.own) query.set("own", state.own);
  if (state.baseline) query.set("base", String(state.baseline));
  if (state.table) query.set("t", TABLE_KINDS.map((kind) => state.table[kind].join("_")).join("~"));
  return query.toString();
}

/** The state in the hash of an address. Invalid values become defaults; the server checks the rest. */
export function fromQuery(search, { schedules, objectives, efforts }) {
  const query = new URLSearchParams(search);
  const state = defaults();
  for (const name of Object.keys(SCALARS)) state[name] = numberOr(query.get(name), state[name]);
  if (objectives.some(({ name }) => name === query.get("objective"))) state.objective = query.get("objective");
  if (efforts.includes(query.get("effort"))) state.effort = query.get("effort");
  const known = new Set(schedules.map((schedule) => schedule.name));
  const slots = query.getAll("s").map((text) => text.split("~")).filter(([name]) => known.has(name));
  if (slots.length) {
    state.slots = slots
      .slice(0, MOST_SLOTS)
      .map(([name, limit, chunks, pending, slices]) =>
        slot(name, numberOr(limit, null), numberOr(chunks, null), pending ?? "", numberOr(slices, null)),
      );
  }
  const baseline = numberOr(query.get("base"), 0);
  state.baseline = baseline in state.slots ? baseline : 0;
  state.model = readModel(query.get("model"));
  state.own = state.model ? (query.get("own") ?? "").replace(/[^fbwca]/g, "") : "";
  state.table = readTable(query.get("t"));
  return state;
}

/** The request body of the planner for one schedule. */
export function problem(state, { schedule, limit, chunks, pending, slices }) {
  const body = {
    num_ranks: state.p,
    num_microbatches: state.m,
    schedule,
    objective: state.objective,
    effort: state.effort,
    memory_limit: limit,
    num_chunks: chunks,
    num_slices: slices ?? 1,
    max_pending_backward: pending || null,
  };
  if (state.ep && hasAllToAlls(state)) body.all_to_all = state.ep;
  const step = Object.keys(STEP).filter((name) => state[name]);
  if (step.length) body.step = Object.fromEntries(step.map((name) => [`${name}_ms`, state[name]]));
  if (state.model) Object.assign(body, { model: state.model, times: request(state).times });
  if (state.table) return { ...body, stages: { ...state.table, comm_ms: state.c } };
  if (state.model) return body;
  const times = {
    forward_ms: state.f,
    backward_ms: state.b,
    wgrad_ms: state.w,
    comm_ms: state.c,
    activation_after_backward: state.a,
  };
  return { ...body, times };
}

/** An object of numbers and names, or with layers; the planner checks the rest. */
function readModel(text) {
  try {
    const model = JSON.parse(text ?? "null");
    return model && typeof model === "object" && !Array.isArray(model) ? model : null;
  } catch {
    return null;
  }
}

function readTable(text) {
  if (!text) return null;
  const lists = text.split("~").map((list) => list.split("_").map(Number));
  const fits = lists.length === TABLE_KINDS.length && lists.every((list) => list.length === lists[0].length);
  if (!fits || lists.flat().some((value) => !Number.isFinite(value))) return null;
  return Object.fromEntries(TABLE_KINDS.map((kind, index) => [kind, lists[index]]));
}

function numberOr(text, otherwise) {
  return text === null || text === undefined || text === "" || !Number.isFinite(Number(text)) ? otherwise : Number(text);
}
