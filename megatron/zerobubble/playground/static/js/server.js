// The planner on the server that `zerobubble playground` runs.

/** Yield the lines of a task; an empty line ends a complete answer. Aborting the signal also ends it on the server. */
export async function* fromServer(task, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await fetch(`api/${task}`, { method: "POST", headers, body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server ended before it had answered; out of memory is likely, and its terminal may say more");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line) return;
      yield line;
    }
  }
}
