// The numbers of all schedules beside each other, the best of each in bold.

import { table } from "./dom.js";

const ms = (value) => `${value.toFixed(3)} ms`;
const percent = (value) => `${(100 * value).toFixed(2)} %`;

/** Heading, what to take from the metrics (undefined: not known), how to write it, whether less is better. */
const ROWS = [
  ["bubble", (m) => m.bubble_rate, percent, true],
  ["bubble, lower bound", (m) => m.bound_bubble_rate, percent, false],
  ["span (no optimizer barrier)", (m) => m.span_ms, ms, true],
  ["span above its bound", (m) => m.span_gap, percent, false],
  ["makespan (with one)", (m) => m.makespan_ms, ms, true],
  ["makespan above its bound", (m) => m.makespan_gap, percent, false],
  ["peak memory, 1.0 = 1F1B's rank 0", (m) => Math.max(...m.peak_memory), (value) => value.toFixed(4), true],
  ["messages an iteration", (m) => m.num_messages, (value) => value.toLocaleString("en"), true],
  ["messages, 1F1B's = 1", (m) => m.relative_messages, (value) => `${value.toFixed(2)}×`, false],
];

/** A table of what `shown` reaches: a list of {letter, name, drawing}. */
export function metricsTable(shown) {
  const head = ["", ...shown.map(({ letter, name }) => `${letter}  ${name}`)];
  const rows = ROWS.map(([name, take, write, isLessBetter]) => {
    const values = shown.map(({ drawing }) => take(drawing.metrics));
    const least = Math.min(...values.filter((value) => value !== undefined));
    const cells = values.map((value) => {
      if (value === undefined) return "–";
      const isBest = isLessBetter && shown.length > 1 && value <= least * (1 + 1e-9);
      const cell = document.createElement(isBest ? "strong" : "span");
      cell.textContent = write(value);
      return cell;
    });
    return [name, ...cells];
  });
  return table("What the schedules reach", head, rows);
}
