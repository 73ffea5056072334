// Start Pyodide, import the planner and save the memory: node playground_snapshot.mjs PYODIDE_FOLDER PLANNER_ZIP SNAPSHOT

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [vendored, sources, snapshot] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${vendored}/pyodide.mjs`));
const pyodide = await loadPyodide({ _makeSnapshot: true });
pyodide.FS.writeFile("/tmp/planner.zip", readFileSync(sources));
pyodide.runPython(`
import gc, shutil, sys
shutil.unpack_archive("/tmp/planner.zip", "/planner")
sys.path.insert(0, "/planner")
import megatron.zerobubble.playground.tasks
gc.collect()
`);
writeFileSync(snapshot, pyodide.makeMemorySnapshot());
