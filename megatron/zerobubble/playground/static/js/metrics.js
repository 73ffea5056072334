// The metrics of all schedules side by side, the best of each row in bold.

import { table } from "./dom.js";

const ms = (value) => `${value.toFixed(3)} ms`;
const percent = (value) => `${(100 * value).toFixed(2)} %`;

/** Label, value in the metrics (undefined: unknown), format, whether to mark the smallest. */
const ROWS = [
  ["bubble", (m) => m.bubble_rate, percent, true],
  ["bubble, lower bound", (m) => m.bound_bubble_rate, percent, false],
  ["iteration time with post-validation (span)", (m) => m.span_ms, ms, true],
  ["span above its lower bound", (m) => m.span_gap, percent, false],
  ["iteration time with the synchronous optimizer (makespan)", (m) => m.makespan_ms, ms, true],
  ["makespan above its lower bound", (m) => m.makespan_gap, percent, false],
  ["peak activation memory (1.0 = 1F1B on rank 0)", (m) => Math.max(...m.peak_memory), (value) => value.toFixed(4), true],
  ["P2P messages per iteration", (m) => m.num_messages, (value) => value.toLocaleString("en"), true],
  ["P2P messages relative to 1F1B", (m) => m.relative_messages, (value) => `${value.toFixed(2)}×`, false],
];

/** The table of metrics of `shown`: a list of {letter, name, drawing}. */
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
  return table("Metrics of the schedules", head, rows);
}
