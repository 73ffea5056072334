// One timeline: passes, memory under them, and both as a table and as text for readers who cannot see a canvas.

import { ask } from "./api.js";
import { make, table } from "./dom.js";
import { Passes } from "./follow.js";
import { brief, milliseconds, number } from "./numbers.js";
import { firstAbove, paintAxis, paintMemory, paintPasses } from "./paint.js";

const AXIS = 20;
const MEMORY_TOP = 18; // of its title
/** The distance from row to row: as much as there is if two timelines are to be in sight at once, at least, and at most. */
const LEAST_ROW = 2;
const MOST_ROW = { wide: 20, narrow: 16 };
/** The height of everything above the first chart, between two of them, and below. */
const AROUND = { wide: 230, narrow: 296 };
const MEMORY_HEIGHT = { wide: 84, narrow: 66 };
const LABEL = 9; // the least height of a rank's number
const NARROW = matchMedia("(max-width: 820px)");
const BIG = 2 ** 24; // more than a rank has passes
const GIB = 2 ** 30;
const FONT = "system-ui, sans-serif";

export class Panel {
  /** `shown`: {key, letter, drawing, limit, actions}. */
  constructor(shown, kinds, spans) {
    this.shown = shown;
    this.drawing = shown.drawing;
    this.kinds = kinds;
    this.spans = spans;
    this.passes = make("canvas", { class: "passes", "aria-hidden": "true" });
    this.memory = make("canvas", { class: "memory", "aria-hidden": "true" });
    this.mark = make("div", { class: "mark", hidden: true });
    this.arrows = d3.create("svg").attr("class", "arrows").attr("aria-hidden", "true");
    this.chart = make(
      "div",
      {
        class: "chart",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "timeline",
        "aria-label": `Timeline ${shown.letter}: ${this.drawing.headline}; ${this.drawing.measures}. Arrow keys go from pass to pass.`,
      },
      this.passes,
      this.memory,
      this.arrows.node(),
      this.mark,
    );
    this.chart.panel = this;
    this.emphasis = -1;
    this.isTall = false;
    const title = make("h3", { title: this.drawing.headline }, this.drawing.headline);
    const measures = make("p", { class: "measures", title: this.drawing.measures }, this.drawing.measures);
    const lines = (this.drawing.lines ?? []).map((line) => make("li", {}, line));
    this.element = make(
      "article",
      { class: "panel", "data-slot": shown.key },
      make("div", { class: "heading" }, make("span", { class: "letter" }, shown.letter), title, measures, shown.actions),
      this.drawing.lengths?.length ? make("p", { class: "measures lengths" }, this.drawing.lengths.join("; ")) : null,
      this.drawing.slots ? this.slots() : null,
      lines.length ? make("details", {}, make("summary", {}, "Report of the run"), make("ul", {}, ...lines)) : null,
      this.chart,
      this.alternative(),
    );
  }

  /** Lookups of the passes; built when they are needed. */
  get passesBy() {
    this.lookups ??= new Passes(this.drawing, this.kinds.map(({ name }) => name));
    return this.lookups;
  }

  /** Which passes are not faded: those of a microbatch, or of the critical path. null: all. */
  lit({ microbatch, isCritical }) {
    if (isCritical) {
      this.critical ??= new Set(this.passesBy.criticalPath().map(({ rank, index }) => rank * BIG + index));
      return (rank, index) => this.critical.has(rank * BIG + index);
    }
    return microbatch === null ? null : (rank, index) => this.drawing.ranks[rank].microbatches[index] === microbatch;
  }

  /** The distance from row to row. */
  get step() {
    return this.isTall ? MOST_ROW[size()] : this.shortStep;
  }

  get shortStep() {
    const room = (document.documentElement.clientHeight - AROUND[size()]) / 2 - AXIS - this.memoryHeight - 4;
    return Math.max(LEAST_ROW, Math.min(MOST_ROW[size()], Math.floor(room / this.drawing.num_ranks)));
  }

  /** Whether its rows would be higher with more room. */
  get isShort() {
    return this.shortStep < MOST_ROW[size()];
  }

  get rowHeight() {
    return this.step - this.gap;
  }

  get memoryHeight() {
    return MEMORY_HEIGHT[size()];
  }

  /** The memory of a rank that holds so much activation memory: in GiB if its bytes are known, else in units of 1F1B's on rank 0. */
  memoryOf(held, rank) {
    const { memory } = this.drawing;
    return memory ? (memory.static_bytes[rank] + held * memory.unit_bytes) / GIB : held;
  }

  /** What the dashed line in the memory means: {value, text}; null: there is none. */
  get line() {
    const { memory } = this.drawing;
    if (memory) return memory.device_bytes === null ? null : { value: memory.device_bytes / GIB, text: `GPU ${brief(memory.device_bytes / GIB)} GiB` };
    const { limit } = this.shown;
    return limit === null || limit === undefined ? null : { value: limit, text: `limit ${limit.toFixed(2)}` };
  }

  get mostMemory() {
    return Math.max(this.line?.value ?? 0, ...this.drawing.table.map(({ peak_memory: peak }, rank) => this.memoryOf(peak, rank)));
  }

  get gap() {
    return this.step > 12 ? 3 : this.step > LEAST_ROW ? 1 : 0;
  }

  get rowsHeight() {
    return this.drawing.num_ranks * this.step;
  }

  /** The table of ranks, and the timeline in letters; built when it is opened, as it may be long. */
  alternative() {
    const details = make("details", { class: "alternative" }, make("summary", {}, "As a table and as text"));
    details.addEventListener("toggle", async () => {
      if (!details.open || details.children.length > 1) return;
      const text = make("pre", { tabindex: 0, "aria-label": "the timeline in letters" });
      const rows = this.drawing.table.map((rank, index) => [
        `rank ${index}`,
        number(rank.peak_memory),
        String(rank.live),
        String(rank.pending),
        number(rank.busy_ms),
        number(rank.idle_ms),
        number(rank.starts_after_ms),
        number(rank.ends_before_ms),
      ]);
      const head = ["", "peak activation memory", "live microbatches", "pending W", "busy ms", "idle ms", "starts after ms", "ends before ms"];
      details.append(
        make("div", { class: "scroll" }, table(`Ranks of timeline ${this.shown.letter}`, head, rows)),
        text,
      );
      const { plan } = this.drawing;
      text.textContent = this.drawing.text ?? (await ask("export", { plan, form: "text" })).text;
    });
    return details;
  }

  /** Which microbatch of the data runs in which slot of the plan; built when it is opened. */
  slots() {
    const { indices, tokens } = this.drawing.slots;
    const details = make("details", { class: "slots" }, make("summary", {}, "Microbatches of the data in the slots of the plan"));
    details.addEventListener("toggle", () => {
      if (!details.open || details.children.length > 1) return;
      const rows = indices.map((index, slot) => [String(slot), String(index), tokens.length ? String(tokens[slot]) : "–"]);
      details.append(make("div", { class: "scroll" }, table("Microbatches in slots", ["slot", "microbatch of the data", "tokens"], rows)));
    });
    return details;
  }

  /** The microbatch of a pass in words. */
  microbatch(slot) {
    if (!this.drawing.slots) return `microbatch ${slot}`;
    const { indices, tokens } = this.drawing.slots;
    return `slot ${slot}: microbatch ${indices[slot]} of the data${tokens.length ? `, ${tokens[slot]} tokens` : ""}`;
  }

  /** Paint under a scale `x` (time -> px of the chart), between `left` and `left + width`. */
  paint(x, left, width, ink, mostMemory, ticks, shown) {
    const rows = this.rowsHeight;
    const view = {
      x,
      from: x.invert(left),
      to: x.invert(left + width),
      end: this.drawing.length_ms,
      left,
      width,
      rowHeight: this.rowHeight,
      gap: this.gap,
      family: FONT,
      axisFont: `11px ${FONT}`,
      fontSize: Math.min(11, this.rowHeight - 3),
    };
    this.view = view;
    const passes = prepare(this.passes, left + width, rows + AXIS);
    paintAxis(passes, ticks, view, ink, rows);
    this.clipped(passes, view, rows, () => paintPasses(passes, this.drawing, view, ink, this.kinds, this.spans, this.lit(shown)));
    this.labels(passes, left, ink);
    this.paintHeld(view, ink, mostMemory, ticks);
  }

  /** Draw the chain of a pass, and arrows from what it needs and to what needs it; null: none. */
  follow(place) {
    this.arrows.selectAll("path").remove();
    if (!place) return;
    const { x, left, width } = this.view;
    const height = (rank) => rank * this.step + this.rowHeight / 2;
    const clip = (px) => Math.max(left - 9, Math.min(left + width + 9, px));
    const end = ({ rank, index }) => [clip(x(this.drawing.ranks[rank].ends[index])), height(rank)];
    const start = ({ rank, index }) => [clip(x(this.drawing.ranks[rank].starts[index])), height(rank)];
    const passes = this.passesBy;
    const chain = passes.chain(place).flatMap((each) => [start(each), end(each)]);
    this.arrows.append("path").attr("class", "chain").attr("d", d3.line()(chain));
    const input = passes.input(place);
    const pairs = [...(input ? [[input, place]] : []), ...passes.outputs(place).map((output) => [place, output])];
    for (const [one, other] of pairs) this.arrows.append("path").attr("class", "arrow").attr("d", arrow(end(one), start(other)));
  }

  paintHeld(view, ink, most, ticks) {
    const height = this.memoryHeight;
    const context = prepare(this.memory, view.left + view.width, height + 4);
    const y = (value) => height - (value / (most || 1)) * (height - MEMORY_TOP);
    paintAxis(context, { ...ticks, format: () => "" }, { ...view, top: MEMORY_TOP }, ink, height - 3);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of d3.ticks(0, most || 1, 3)) {
      context.fillStyle = ink.soft;
      context.fillText(String(value), view.left - 6, y(value));
      context.fillStyle = ink.line;
      context.fillRect(view.left, Math.round(y(value)), view.width, 1);
    }
    const { line } = this;
    this.clipped(context, view, height + 4, () => {
      paintMemory(context, this.drawing, view, ink, y, this.emphasis, line?.value ?? Infinity, (held, rank) => this.memoryOf(held, rank));
      if (!line) return;
      context.setLineDash([6, 4]);
      context.strokeStyle = ink.bad;
      context.beginPath();
      context.moveTo(view.left, y(line.value));
      context.lineTo(view.left + view.width, y(line.value));
      context.stroke();
      context.setLineDash([]);
    });
    this.paintTitle(context, view, ink, line);
  }

  /** The title of the memory, and the legend of its colors. */
  paintTitle(context, view, ink, line) {
    const last = this.drawing.num_ranks - 1;
    const title = this.drawing.memory ? "memory, GiB" : NARROW.matches ? "activation memory" : "activation memory, 1 = 1F1B on rank 0";
    const entries = [[ink.ranks(0), "rank 0"], ...(last ? [[ink.ranks(1), `rank ${last}`]] : []), ...(line ? [[ink.bad, line.text]] : [])];
    context.font = view.axisFont;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = ink.soft;
    context.fillText(title, view.left, 7);
    let x = view.left + context.measureText(title).width + 16;
    for (const [color, text] of entries) {
      context.fillStyle = color;
      context.fillRect(x, 6, 12, 3);
      context.fillStyle = ink.soft;
      context.fillText(text, x + 16, 7);
      x += 28 + context.measureText(text).width;
    }
  }

  clipped(context, view, height, action) {
    context.save();
    context.beginPath();
    context.rect(view.left, 0, view.width, height);
    context.clip();
    action();
    context.restore();
  }

  labels(context, left, ink) {
    context.fillStyle = ink.soft;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(LABEL / this.step);
    const px = Math.min(11, every * this.step);
    context.font = `${px}px ${FONT}`;
    for (let rank = 0; rank < this.drawing.num_ranks; rank += every) {
      context.fillText(String(rank), left - 6, Math.max(px / 2, rank * this.step + this.rowHeight / 2 + 0.5));
    }
  }

  /** The pass at a point of the chart, or null. */
  at(px, py) {
    const rank = Math.floor(py / this.step);
    if (!this.view || rank < 0 || rank >= this.drawing.num_ranks || px < this.view.left) return null;
    const time = this.view.x.invert(px);
    const { starts, ends } = this.drawing.ranks[rank];
    const index = firstAbove(ends, time);
    if (index >= starts.length || starts[index] > time) return null;
    const isLower = py - rank * this.step > this.rowHeight / 2;
    return { rank, index: index + (isLower && this.drawing.ranks[rank].seconds.includes(index + 1) ? 1 : 0) };
  }

  /** A pass in words. */
  describe({ rank, index }) {
    const row = this.drawing.ranks[rank];
    const name = this.kinds[row.kinds[index]].name;
    const chunk = this.drawing.num_chunks > 1 ? `, chunk ${row.chunks[index]}` : "";
    return [
      `${name} of ${this.microbatch(row.microbatches[index])}${this.drawing.num_slices > 1 ? `, slice ${row.slices[index]}` : ""}`,
      `rank ${rank}, stage ${row.stages[index]}${chunk}`,
      `${milliseconds(row.starts[index])} to ${milliseconds(row.ends[index])}`,
      this.memoryText(rank, index),
    ];
  }

  /** The memory of a rank after a pass. */
  memoryText(rank, index) {
    const held = this.drawing.ranks[rank].held[index];
    const whole = this.drawing.memory ? `, ${number(this.memoryOf(held, rank))} GiB with weights, gradients and optimizer state` : "";
    return `activation memory ${number(held)} of 1F1B's${whole}`;
  }

  /** Frame a pass, or nothing. Returns where it is: {left, top, bottom} in px of the chart. */
  select(place) {
    this.mark.hidden = place === null;
    const emphasis = place === null ? -1 : place.rank;
    const changed = emphasis !== this.emphasis;
    this.emphasis = emphasis;
    this.follow(place);
    if (place === null) return { changed };
    const { starts, ends } = this.drawing.ranks[place.rank];
    const { x, left, width } = this.view;
    const from = Math.max(left, x(starts[place.index]));
    const to = Math.min(left + width, x(ends[place.index]));
    const top = place.rank * this.step;
    this.mark.hidden = to < from;
    Object.assign(this.mark.style, {
      left: `${from - 1}px`,
      top: `${top - 1}px`,
      width: `${Math.max(to - from, 1) + 2}px`,
      height: `${this.rowHeight + 2}px`,
    });
    return { changed, left: from, top, bottom: top + this.rowHeight };
  }
}

function size() {
  return NARROW.matches ? "narrow" : "wide";
}

/** A line with a head at its end. */
function arrow([x1, y1], [x2, y2]) {
  const angle = Math.atan2(y2 - y1, x2 - x1);
  const head = (turn) => `M${x2},${y2}L${x2 - 7 * Math.cos(angle + turn)},${y2 - 7 * Math.sin(angle + turn)}`;
  return `M${x1},${y1}L${x2},${y2}${head(0.45)}${head(-0.45)}`;
}

/** Size a canvas for the screen's pixels, and empty it. */
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
