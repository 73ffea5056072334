// The planner in web workers of the page.

import { queued } from "./queue.js";

const GRACE_MS = 200;
const SPARE_MS = 1000;

/** Workers with one task each at a time. One is kept ready, as starting one takes about a second. */
export class Workers {
  constructor(most) {
    Object.assign(this, { most, count: 0, isStarting: false, idle: [], waiting: [], failure: null });
    this.start();
  }

  /** Yield the lines of a task. Aborting the signal ends the worker, unless it stops between two lines soon enough by itself. */
  lines = async function* (task, body, signal) {
    const worker = await this.take(signal);
    const arrived = [];
    let wake = null;
    const tell = (message) => {
      arrived.push(message);
      wake?.();
    };
    const abort = () => tell({ isAborted: true });
    worker.onmessage = ({ data }) => tell(data);
    signal?.addEventListener("abort", abort);
    worker.postMessage({ task, body });
    let isOver = false;
    try {
      while (!isOver) {
        while (!arrived.length) await new Promise((resolve) => (wake = resolve));
        const message = arrived.shift();
        if (message.isAborted) throw signal.reason;
        if (message.failure) throw new Error(message.failure); // and end this worker: its memory may be broken
        isOver = message.isOver;
        if (message.line) yield message.line;
      }
    } finally {
      signal?.removeEventListener("abort", abort);
      if (isOver) this.free(worker);
      else this.stop(worker);
    }
  }.bind(this);

  start() {
    this.count++;
    this.isStarting = true;
    const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => {
      this.isStarting = false;
      if (data.failure) this.fail(data.failure);
      else this.free(worker);
    };
    worker.onerror = (event) => this.fail(event.message ?? "the files of the planner cannot be loaded");
  }

  async take(signal) {
    if (this.failure) throw new Error(this.failure);
    setTimeout(() => this.spare(), SPARE_MS);
    const worker = this.idle.pop() ?? (await queued(this.waiting, signal));
    if (!worker) throw new Error(this.failure);
    return worker;
  }

  free(worker) {
    const next = this.waiting.shift();
    if (next) next(worker);
    else this.idle.push(worker);
  }

  spare() {
    if (!this.idle.length && !this.isStarting && this.count < this.most) this.start();
  }

  /** What is compiled cannot be interrupted, so the worker is asked first and then terminated. */
  stop(worker) {
    const timer = setTimeout(() => {
      worker.terminate();
      this.count--;
      this.start();
    }, GRACE_MS);
    worker.onmessage = ({ data }) => {
      if (!data.isOver) return;
      clearTimeout(timer);
      this.free(worker);
    };
    worker.postMessage({ stop: true });
  }

  fail(message) {
    this.failure = message;
    for (const next of this.waiting.splice(0)) next(null);
  }
}
