// What can be taken along of a plan: the plan, SVG, and the commands that run it. An SVG is light or dark as its reader prefers.

import { ask } from "./api.js";
import { make } from "./dom.js";

/** Buttons and commands for one plan: `shown` is {drawing, commands}; `fail` is called with an error message. */
export function takeAlong(shown, fail) {
  const { plan, schedule, num_ranks: p, num_microbatches: m } = shown.drawing;
  const stem = `${/^[a-z0-9-]+$/.test(schedule) ? schedule : "plan"}-p${p}-m${m}`;
  const guarded = (action) => () => action().catch((error) => fail(error.message));
  const button = (text, action) => make("button", { type: "button", click: guarded(action) }, text);
  const ways = Object.entries(shown.commands ?? {}).flatMap(([name, text]) => [
    make("div", { class: "heading" }, make("span", { class: "hint" }, `For ${name}, with ${stem}.json beside it:`), button("Copy", () => copy(text))),
    make("pre", { class: "flags", tabindex: 0, "aria-label": `for ${name}` }, text),
  ]);
  const none = make("p", { class: "hint" }, "A plan for unequal microbatches is not loaded: a run has others in every iteration.");
  return make(
    "details",
    { class: "take-along" },
    make("summary", { class: "button" }, "Take along"),
    make(
      "div",
      { class: "popover" },
      make(
        "div",
        { class: "row", role: "group", "aria-label": "Download" },
        button("Plan", async () => save(`${stem}.json`, plan, "application/json")),
        button("SVG", () => saveSvg(plan)),
      ),
      ...(ways.length ? ways : shown.commands ? [none] : []),
    ),
  );
}

/** Copy text to the clipboard; throws if the browser does not allow it. */
export async function copy(text) {
  if (!navigator.clipboard) throw new Error("the browser lets pages copy only from localhost or https: select and copy by hand");
  await navigator.clipboard.writeText(text);
}

async function saveSvg(plan) {
  const file = await ask("export", { plan, form: "svg" });
  save(file.name, file.text, file.media_type);
}

function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  // The download begins after the click and needs the address until then.
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
