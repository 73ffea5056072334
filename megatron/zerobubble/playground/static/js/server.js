// The planner on the server that `zerobubble playground` runs.

/** Yield the lines of a task. Aborting the signal also ends it on the server. */
export async function* fromServer(task, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await fetch(`api/${task}`, { method: "POST", headers, body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}
