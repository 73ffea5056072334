// A small curve: the speed-up over the baseline by the number of microbatches, from the schedules' hand-written orders.

import { listen } from "./api.js";
import { make, table } from "./dom.js";
import { problem } from "./state.js";

const HEIGHT = 150;
const MARGIN = { top: 14, right: 62, bottom: 30, left: 40 };
const COUNTS = [1, 1.5, 2, 3, 4, 6, 8]; // of p
const MOST_CELLS = 4096; // ranks times microbatches: larger problems take seconds

export class Curve {
  constructor(root) {
    this.root = root;
    this.controller = null;
    this.key = "";
  }

  /** Draw the curves of some slots' configurations against the baseline's, unless they are drawn already. */
  async update(state, configs, base) {
    const isPlain = state.lengths === "equal" && configs.length && base;
    const counts = [...new Set(COUNTS.map((share) => Math.max(1, Math.round(share * state.p))))].filter((m) => m <= 512 && m * state.p <= MOST_CELLS);
    const bodies = isPlain ? [base, ...configs].map((config) => problem({ ...state, effort: "drawn" }, config)) : [];
    const key = isPlain && counts.length > 1 ? JSON.stringify([counts, bodies]) : "";
    if (key === this.key) return;
    this.key = key;
    this.controller?.abort();
    this.root.hidden = !key;
    if (!key) return;
    const controller = (this.controller = new AbortController());
    const points = [];
    try {
      for await (const event of listen("curve", { counts, baseline: bodies[0], problems: bodies.slice(1) }, controller.signal)) {
        if (event.event === "point") points.push(event);
      }
      this.draw(points, configs, state.m);
    } catch (error) {
      if (error.name !== "AbortError") this.root.hidden = true; // the slots' own searches say what is wrong
    }
  }

  draw(points, configs, m) {
    const width = 330;
    const known = points.flatMap(({ speed_ups: values }) => values.filter((value) => value !== null));
    this.root.hidden = points.length < 2 || !known.length;
    if (this.root.hidden) return;
    const x = d3.scaleLog([points[0].num_microbatches, points.at(-1).num_microbatches], [MARGIN.left, width - MARGIN.right]);
    const y = d3.scaleLinear([Math.min(1, ...known), Math.max(1.05, ...known)], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice(4);
    const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${HEIGHT}`).attr("width", width).attr("height", HEIGHT).attr("aria-hidden", "true");
    const values = points.map(({ num_microbatches: count }) => count);
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${HEIGHT - MARGIN.bottom})`).call(d3.axisBottom(x).tickValues(values).tickFormat(d3.format("d")).tickSize(3));
    svg.append("g").attr("class", "axis").attr("transform", `translate(${MARGIN.left},0)`).call(d3.axisLeft(y).ticks(4).tickSize(3));
    svg.append("text").attr("class", "caption").attr("x", MARGIN.left).attr("y", HEIGHT - 2).text("microbatches m");
    if (m >= values[0] && m <= values.at(-1)) svg.append("line").attr("class", "bound").attr("x1", x(m)).attr("x2", x(m)).attr("y1", MARGIN.top).attr("y2", HEIGHT - MARGIN.bottom);
    const ends = configs.map((_, at) => points.at(-1).speed_ups[at]);
    const order = [...configs.keys()].sort((one, other) => (ends[one] ?? 0) - (ends[other] ?? 0));
    const heights = {};
    order.forEach((at, place) => (heights[at] = Math.min(y(ends[at] ?? 1), place ? heights[order[place - 1]] - 12 : HEIGHT)));
    configs.forEach((config, at) => {
      const line = d3.line(({ num_microbatches: count }) => x(count), ({ speed_ups: all }) => y(all[at])).defined(({ speed_ups: all }) => all[at] !== null);
      svg.append("path").attr("class", `curve curve-${at}`).attr("d", line(points));
      svg.append("text").attr("class", "caption").attr("x", width - MARGIN.right + 5).attr("y", heights[at] + 4).text(config.letter + " " + config.schedule);
    });
    const rows = points.map(({ num_microbatches: count, speed_ups: all }) => [String(count), ...all.map((value) => (value === null ? "–" : value.toFixed(2)))]);
    const read = table("Speed-up by the number of microbatches", ["microbatches", ...configs.map(({ letter }) => letter)], rows);
    read.classList.add("visually-hidden");
    this.root.replaceChildren(make("figcaption", {}, "speed-up over the baseline by m, hand-written orders"), svg.node(), read);
  }
}
