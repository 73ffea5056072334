// Lengths of the microbatches, links of the ranks and all-to-alls of experts: what the form shows of them, what a request takes, and what a file has.

const MOST_RANKS = 64; // the server refuses more, out of an address they may be any number
const MOST_MICROBATCHES = 512;
const BYTES_PER_MS = 1e6; // in 1 GB/s

/** The words of a text, separated by white space, commas or semicolons; numbers as numbers, so that the server can name the others. */
function words(text) {
  return text.split(/[\s,;[\]]+/).filter(Boolean).map((word) => (Number.isFinite(Number(word)) ? Number(word) : word));
}

/** A matrix out of a text: one line per row. */
function rows(text) {
  return text.split("\n").map(words).filter((row) => row.length);
}

function text(matrix) {
  return matrix.map((row) => row.join(" ")).join("\n");
}

/** 0 to count - 1. */
function sequence(count, most) {
  return Array.from({ length: Math.min(count, most) }, (_, index) => index);
}

/** The latencies between p ranks: `within` a node of `size` consecutive ranks, and `between` nodes. */
function nodes(p, size, within, between) {
  const all = sequence(p, MOST_RANKS);
  const node = (rank) => Math.floor(rank / size);
  return all.map((one) => all.map((other) => (one === other ? 0 : node(one) === node(other) ? within : between)));
}

/** The number of lengths in the list. */
export function countOf({ tokens }) {
  return words(tokens).length;
}

/** Whether tokens may travel between experts: not in a dense model, nor where each rank has all experts. Unknown of a list of layers. */
function hasAllToAlls({ model }) {
  return !model || Boolean(model.layers || model.preset) || (model.num_experts > 0 && model.expert_model_parallel_size > 1);
}

/** The fields of a request. */
export function unequal(state) {
  const body = {};
  if (state.lengths === "list") body.microbatch_tokens = words(state.tokens);
  if (state.lengths === "log-normal") body.microbatch_tokens = { mean: state.mean, variation: state.cv, seed: state.seed };
  if (state.lengths !== "equal") body.attention_share = state.share;
  if (state.links === "nodes") body.links = { latency_ms: nodes(state.p, state.node, state.c, state.between) };
  if (state.links === "matrix") {
    body.links = { latency_ms: rows(state.latency) };
    if (state.bandwidth.trim()) body.links.gigabytes_per_s = rows(state.bandwidth);
    body.bytes_per_token = state.bytes;
  }
  if (state.ep && hasAllToAlls(state)) body.all_to_all = state.ep;
  return body;
}

/** The state for a file's costs; without `m` in the file equal microbatches are as good as those in the form. */
export function adopted({ microbatches, links, comm_ms: c }, share, m) {
  const tokens = microbatches?.tokens ?? [];
  const found = { c, links: "one" };
  if (tokens.length) Object.assign(found, { lengths: "list", tokens: tokens.join(" "), share: share ?? 0, m: tokens.length });
  else if (microbatches || m) found.lengths = "equal";
  return links ? { ...found, ...adoptedLinks(links, tokens) } : found;
}

/** The state for a file's links; `tokens`: the lengths in the same file. */
export function adoptedLinks(links, tokens = []) {
  return { links: "matrix", p: links.latency_ms.length, ...matrices(links, tokens) };
}

function matrices({ latency_ms: latency, gigabytes_per_s: bandwidth, message_bytes: sizes }, tokens) {
  if (bandwidth && tokens.length && sizes.length === tokens.length) {
    return { latency: text(latency), bandwidth: text(bandwidth), bytes: sizes[0] / tokens[0] };
  }
  if (bandwidth && !sizes.some(Boolean)) return { latency: text(latency), bandwidth: text(bandwidth) }; // bytes as in the form
  // Messages of one size: their time on the link is part of the latency.
  const size = bandwidth ? sizes.reduce((sum, each) => sum + each, 0) / sizes.length : 0;
  const time = (ms, one, other) => (one === other ? 0 : ms + (size ? size / (bandwidth[one][other] * BYTES_PER_MS) : 0));
  return { latency: text(latency.map((row, one) => row.map((ms, other) => time(ms, one, other)))), bandwidth: "", bytes: 0 };
}

export class Unequal {
  /** `drawnTokens()`: the lengths that the page shows, as the data came; empty if there are none. */
  constructor(form, { state, drawnTokens }) {
    this.form = form;
    this.state = state;
    this.drawnTokens = drawnTokens;
  }

  /** The user has changed the form: begin a list or a matrix, when it is chosen, with what was there before; take m from a list. */
  take() {
    const { state } = this;
    if (state.lengths === "list" && this.lengths !== "list" && !state.tokens.trim()) {
      const drawn = this.drawnTokens();
      state.tokens = (drawn.length ? drawn : sequence(state.m, MOST_MICROBATCHES).map(() => state.mean)).join(" ");
      this.form.tokens.value = state.tokens;
    }
    if (state.links === "matrix" && this.links !== "matrix" && !state.latency.trim()) {
      const between = this.links === "nodes" ? state.between : state.c;
      state.latency = text(nodes(state.p, state.node, state.c, between));
      this.form.latency.value = state.latency;
    }
    if (state.lengths === "list") state.m = countOf(state) || state.m;
    this.render();
  }

  /** Show the fields of what is chosen. */
  render() {
    const { form, state } = this;
    this.lengths = state.lengths;
    this.links = state.links;
    for (const name of ["lengths", "links"]) {
      for (const element of form.querySelectorAll(`[data-${name}]`)) {
        element.hidden = !element.dataset[name].split(" ").includes(state[name]);
      }
    }
    form.m.readOnly = state.lengths === "list";
    if (form.m.readOnly) form.m.value = state.m;
    form.c.disabled = state.links === "matrix";
    form.ep.disabled = !hasAllToAlls(state);
  }
}
