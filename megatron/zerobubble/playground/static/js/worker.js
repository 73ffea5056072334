// A web worker that runs the planner: Pyodide with a snapshot of its memory, and the planner's core as a side module of it.

import { loadPyodide } from "../vendor/pyodide/pyodide.mjs";

const FOLDER = new URL("..", import.meta.url);
const SEARCH = "/planner/megatron/zerobubble/plan/search";
let isStopped = false;

async function content(name, decode = (body) => body) {
  const response = await fetch(new URL(name, FOLDER));
  if (!response.ok) throw new Error(`${name} cannot be loaded: ${response.status}`);
  return new Uint8Array(await new Response(decode(response.body)).arrayBuffer());
}

async function planner() {
  const unpacked = (body) => body.pipeThrough(new DecompressionStream("gzip"));
  const snapshot = content("vendor/pyodide/snapshot.bin", unpacked);
  const core = content("core.wasm");
  const pyodide = await loadPyodide({ indexURL: new URL("vendor/pyodide/", FOLDER).href, _loadSnapshot: snapshot });
  pyodide.FS.mkdirTree(SEARCH);
  pyodide.FS.writeFile(`${SEARCH}/_core.native.so`, await core);
  return pyodide.pyimport("megatron.zerobubble.playground.tasks");
}

/** Post the lines of a task; between two of them a message to stop is read. */
async function run(tasks, { task, body }) {
  isStopped = false;
  const lines = tasks.lines(task, body);
  try {
    for (const line of lines) {
      postMessage({ line });
      await new Promise((resolve) => setTimeout(resolve));
      if (isStopped) break;
    }
    postMessage({ isOver: true });
  } catch (error) {
    postMessage({ isOver: true, failure: `the planner failed, please report it: ${error.message.trim().split("\n").at(-1)}` });
  } finally {
    lines.destroy();
  }
}

const loading = planner();
onmessage = async ({ data }) => {
  if (data.stop) isStopped = true;
  else run(await loading, data);
};
loading.then(
  () => postMessage({ isReady: true }),
  (error) => postMessage({ failure: `the planner cannot be loaded: ${error.message}` }),
);
