// The Pareto front, bubble vs. memory: the best bubble for every memory limit, as a curve whose points can be chosen.

import { listen } from "./api.js";
import { make, table } from "./dom.js";
import { bubbles } from "./metrics.js";
import { milliseconds, percent } from "./numbers.js";
import { problem, slot } from "./state.js";

const LIMITS = [0.34, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 2];
const HEIGHT = 260;
const MARGIN = { top: 12, right: 18, bottom: 40, left: 52 };

export class Pareto {
  /** `parts`: {root, button, status}; `choose` gets a point. */
  constructor(parts, { state, choose }) {
    Object.assign(this, parts);
    this.state = state;
    this.choose = choose;
    this.points = [];
    this.controller = null;
    this.button.addEventListener("click", () => (this.controller ? this.controller.abort() : this.run()));
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  /** Mark the curve as outdated: the problem in the form has changed. */
  outdate() {
    this.controller?.abort();
    if (this.points.length) this.setStatus("the problem has changed since this front was found");
    this.root.classList.toggle("old", this.points.length > 0);
  }

  async run() {
    const controller = new AbortController();
    this.controller = controller;
    this.points = [];
    this.nothing = [];
    this.root.classList.remove("old");
    this.button.textContent = "Stop";
    const body = { ...problem(this.state, slot("auto")), memory_limits: LIMITS };
    try {
      for await (const event of listen("pareto", body, controller.signal)) {
        if (event.event === "point") this.add(event);
        this.setStatus(`${this.points.length + this.nothing.length} of ${LIMITS.length} points${event.message ? `; ${event.message}` : ""}`);
      }
      const none = this.nothing.length ? `; no schedule fits within ${this.nothing.join(", ")}` : "";
      this.setStatus(`${this.points.length} plans${none}`);
    } catch (error) {
      this.setStatus(error.name === "AbortError" ? `stopped after ${this.points.length} points` : error.message);
    } finally {
      this.controller = null;
      this.button.textContent = "Find the Pareto front";
    }
  }

  add(event) {
    if (event.plan) this.points.push(event);
    else this.nothing.push(event.memory_limit);
    this.draw();
  }

  setStatus(text) {
    this.status.textContent = text;
  }

  draw() {
    if (!this.points.length) return this.root.replaceChildren();
    const width = Math.max(260, Math.min(900, this.root.clientWidth || 260));
    const isSpan = this.state.objective === "span";
    const svg = d3
      .create("svg")
      .attr("viewBox", `0 0 ${width} ${HEIGHT}`)
      .attr("width", width)
      .attr("height", HEIGHT)
      .attr("role", "group")
      .attr("aria-label", "Pareto front, bubble vs. memory limit");
    const x = d3.scaleLinear([0.25, 2.05], [MARGIN.left, width - MARGIN.right]);
    const objective = isSpan ? "span" : "makespan";
    const bubble = ({ metrics }) => bubbles(metrics, objective)[0];
    const bound = ({ metrics }) => bubbles(metrics, objective)[1];
    const label = `bubble of the ${objective}`;
    const most = d3.max(this.points, bubble) || 0.01;
    const y = d3.scaleLinear([0, most * 1.1], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice();
    axes(svg, x, y, width, label);
    const line = (take) => d3.line((point) => x(point.memory_limit), (point) => y(take(point)))(this.points);
    svg.append("path").attr("class", "bound").attr("d", line(bound));
    svg.append("path").attr("class", "curve").attr("d", line(bubble));
    const words = (point) =>
      `memory at most ${point.memory_limit}: ${point.title}, ${label} ${percent(bubble(point))}, ` +
      `${isSpan ? "span" : "makespan"} ${milliseconds(isSpan ? point.metrics.span_ms : point.metrics.makespan_ms)}`;
    const points = svg
      .selectAll("g.point")
      .data(this.points)
      .join("g")
      .attr("class", "point")
      .attr("transform", (point) => `translate(${x(point.memory_limit)},${y(bubble(point))})`)
      .attr("tabindex", 0)
      .attr("role", "button")
      .attr("aria-label", words)
      .on("click", (_, point) => this.choose(point))
      .on("keydown", (event, point) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        this.choose(point);
      });
    points.append("circle").attr("class", "target").attr("r", 14);
    points.append("circle").attr("class", "dot").attr("r", 5.5);
    points.append("title").text(words);
    const rows = this.points.map((point) => [point.memory_limit.toFixed(3), point.title, percent(bubble(point)), percent(bound(point))]);
    const wasOpen = this.root.querySelector("details")?.open;
    const head = ["memory limit", "schedule", label, "lower bound"];
    const details = make("details", wasOpen ? { open: true } : {}, make("summary", {}, "As a table"), make("div", { class: "scroll" }, table("Pareto front, bubble vs. memory", head, rows)));
    return this.root.replaceChildren(svg.node(), details);
  }
}

function axes(svg, x, y, width, label) {
  const bottom = svg.append("g").attr("class", "axis").attr("transform", `translate(0,${HEIGHT - MARGIN.bottom})`);
  bottom.call(d3.axisBottom(x).ticks(Math.min(8, width / 70)));
  svg.append("g").attr("class", "axis").attr("transform", `translate(${MARGIN.left},0)`).call(d3.axisLeft(y).ticks(5, "%"));
  svg
    .append("text")
    .attr("class", "caption")
    .attr("x", width - MARGIN.right)
    .attr("y", HEIGHT - 6)
    .attr("text-anchor", "end")
    .text("memory limit (1.0 = 1F1B on rank 0)");
  svg.append("text").attr("class", "caption").attr("x", MARGIN.left + 8).attr("y", MARGIN.top + 6).text(`${label} (dashed: lower bound)`);
}
