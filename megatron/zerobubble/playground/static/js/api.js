// Questions to the planner: to the server of the page, or, where the page is plain files, to workers that run it in the browser.

import { queued } from "./queue.js";
import { fromServer } from "./server.js";
import { Workers } from "./workers.js";

const TICK_MS = 400;
const SEARCHES = new Set(["search", "pareto"]);
let planner = null;

/** The schedules, options, colors and limits that the page offers. */
export async function choices() {
  const offered = await (await fetch("choices.json")).json();
  offered.num_searches ??= navigator.hardwareConcurrency;
  const isOurs = offered.planner === "worker";
  // The last worker is for short tasks: a file opens while searches run.
  planner = { lines: fromServer, turns: new Turns(offered.num_searches) };
  if (isOurs) planner.lines = new Workers(offered.num_searches + 1).lines;
  if (isOurs) navigator.serviceWorker?.register("service-worker.js");
  return offered;
}

/** Run a task that has one answer. Throws an Error with the planner's message. */
export async function ask(task, body, signal) {
  for await (const event of listen(task, body, signal)) if (event.event === "done") return event;
  throw new Error("the planner ended without an answer");
}

/** Run a task and yield its events, and a tick where there is none for a while. Aborting the signal ends the task. */
export async function* listen(task, body, signal) {
  const begin = performance.now();
  const text = typeof body === "string" ? body : JSON.stringify(body);
  const turns = SEARCHES.has(task) ? planner.turns : null;
  let hasTurn = false;
  async function* answers() {
    await turns?.take(signal);
    hasTurn = true;
    yield* planner.lines(task, text, signal);
  }
  const lines = answers();
  try {
    for (let next = lines.next(); ; ) {
      const found = await Promise.race([next, pause(TICK_MS)]);
      if (found?.done) return;
      if (found) (next = lines.next()).catch(() => {}); // it may fail after nobody waits for it
      const tick = { event: "tick", state: hasTurn ? "running" : "queued", elapsed_s: (performance.now() - begin) / 1000 };
      const event = found ? JSON.parse(found.value) : tick;
      if (event.event === "error") throw new Error(event.message);
      yield event;
    }
  } finally {
    lines.return();
    if (hasTurn) turns?.give();
  }
}

/** How many searches may run at once; the others wait for their turn. */
class Turns {
  constructor(count) {
    this.free = count;
    this.waiting = [];
  }

  async take(signal) {
    if (this.free > 0) this.free--;
    else await queued(this.waiting, signal);
  }

  give() {
    const next = this.waiting.shift();
    if (next) next();
    else this.free++;
  }
}

function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms, null));
}
