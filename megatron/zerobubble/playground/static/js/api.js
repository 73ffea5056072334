// Requests to the planner on the server.

const JSON_TYPE = { "content-type": "application/json" };

/** The schedules, options, colors and limits that the page offers. */
export async function choices() {
  return (await fetch("api/choices")).json();
}

/** Run a task that has one answer. Throws an Error with the planner's message. */
export async function ask(task, body, signal) {
  const response = await post(task, body, signal);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.message);
  return answer;
}

/** Run a search and yield its events as they arrive. Aborting the signal also ends the search on the server. */
export async function* listen(task, body, signal) {
  const response = await post(task, body, signal);
  if (!response.ok) throw new Error((await response.json()).message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.event === "error") throw new Error(event.message);
      yield event;
    }
  }
}

function post(task, body, signal) {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  return fetch(`api/${task}`, { method: "POST", headers: JSON_TYPE, body: text, signal });
}
