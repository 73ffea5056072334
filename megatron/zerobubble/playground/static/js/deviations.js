// Measured vs. planned: how much time each rank lost against its plan in a recorded run, and the passes with the largest loss.

import { ask } from "./api.js";
import { make, table } from "./dom.js";
import { milliseconds, signed } from "./numbers.js";

export class Deviations {
  /** `parts`: {root, plans, traces, result}; `jump(key, rank, step)` shows a pass of a timeline. */
  constructor(parts, jump) {
    Object.assign(this, parts);
    this.jump = jump;
    this.shown = null;
    for (const select of [this.plans, this.traces]) {
      select.addEventListener("change", () => {
        select.dataset.chosen = select.value;
        this.compare();
      });
    }
  }

  /** Offer all slots that show something, {key, letter, name, drawing, trace}. The section is hidden without a trace. */
  offer(slots) {
    const traces = slots.filter(({ trace }) => trace);
    const plans = slots.filter(({ trace }) => !trace);
    this.slots = slots;
    this.root.hidden = !traces.length;
    options(this.traces, traces, traces.at(-1));
    // The plan that most likely is the trace's: the last one of its size.
    const { num_ranks: p, num_microbatches: m } = traces.at(-1)?.drawing ?? {};
    options(this.plans, plans, plans.findLast(({ drawing }) => drawing.num_ranks === p && drawing.num_microbatches === m));
    if (this.root.hidden) return;
    if (plans.length) this.compare();
    else this.showHint("Open the plan of this run (plan-N.json beside trace.json), or plan it above, to compare.");
  }

  async compare() {
    const find = (select) => this.slots.find(({ key }) => key === select.value);
    const [plan, trace] = [find(this.plans), find(this.traces)];
    if (!plan || !trace) return;
    if (this.shown?.plan === plan.drawing && this.shown.trace === trace.drawing) return;
    const asked = { plan: plan.drawing, trace: trace.drawing };
    this.shown = asked;
    try {
      // The request is put together as text: a trace may be long, and need not be parsed here.
      const given = JSON.stringify(plan.drawing.plan);
      const body = `{"plan":${given},"iteration":${trace.drawing.iteration},"trace":${trace.trace}}`;
      const found = await ask("compare", body);
      if (asked === this.shown) this.render(found, trace);
    } catch (error) {
      if (asked === this.shown) this.showHint(error.message);
    }
  }

  showHint(message) {
    this.result.replaceChildren(make("p", { class: "hint" }, message));
  }

  render({ ranks, largest }, trace) {
    const rows = ranks.map((rank, index) => [
      `rank ${index}`,
      signed(rank.longer_passes_ms),
      signed(rank.longer_waits_ms),
      signed(rank.longer_passes_ms + rank.longer_waits_ms),
      rank.first_other_step === null ? "as planned" : `differs from step ${rank.first_other_step}`,
    ]);
    const head = ["", "longer passes, ms", "longer waits, ms", "total, ms", "order"];
    const items = largest.map((each) =>
      make(
        "li",
        {},
        make(
          "button",
          { type: "button", click: () => this.jump(trace.key, each.rank, each.step) },
          `${inWords(each.op)}, rank ${each.rank}: ${milliseconds(each.lost_ms)}`,
        ),
        ` pass ${signed(each.longer_pass_ms, milliseconds)}, wait before it ${signed(each.longer_wait_ms, milliseconds)}; ` +
          `planned at ${milliseconds(each.planned_start_ms)}, ran at ${milliseconds(each.start_ms)}`,
      ),
    );
    this.result.replaceChildren(
      make("div", { class: "scroll" }, table("Time lost per rank", head, rows)),
      make("h3", {}, items.length ? "Largest deviations" : "No deviations"),
      make("ol", { class: "largest" }, ...items),
    );
  }
}

/** The text of an op, such as 2B4, in words. */
function inWords(op) {
  const [, stage, kind, microbatch] = /^(\d+)(\D+)(\d+)$/.exec(op) ?? [];
  return stage === undefined ? op : `${kind} of microbatch ${microbatch}, stage ${stage}`;
}

/** Fill a select with the slots. The user's choice stays; without one, `usual` is selected. */
function options(select, slots, usual) {
  const before = select.dataset.chosen;
  select.replaceChildren(...slots.map(({ key, letter, name }) => make("option", { value: key }, `${letter}: ${name}`)));
  const chosen = slots.find(({ key }) => key === before) ?? usual;
  if (chosen) select.value = chosen.key;
}
