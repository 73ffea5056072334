// What can be taken along of a plan: the plan, SVG, PNG, trace, and the commands that run it. The planner renders all but the
// PNG, which is the SVG painted on a canvas, in the colors of the page. An SVG is light or dark as its reader prefers.

import { ask } from "./api.js";
import { make } from "./dom.js";

const MOST_PX = 8192;

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
        button("SVG", () => saveFrom(plan, "svg")),
        button("PNG", () => savePng(plan, stem)),
        button("Trace", () => saveFrom(plan, "trace")),
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

async function saveFrom(plan, form) {
  const file = await ask("export", { plan, form });
  save(file.name, file.text, file.media_type);
}

async function savePng(plan, stem) {
  const { text } = await ask("export", { plan, form: "svg" });
  const media = document.documentElement.dataset.theme === "dark" ? "@media all" : "@media not all";
  const themed = text.replace("@media(prefers-color-scheme:dark)", media);
  const address = URL.createObjectURL(new Blob([themed], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const scale = Math.min(2, MOST_PX / Math.max(image.naturalWidth, image.naturalHeight));
    const canvas = make("canvas", { width: Math.round(image.naturalWidth * scale), height: Math.round(image.naturalHeight * scale) });
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.drawImage(image, 0, 0);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!blob) throw new Error("the picture is too large for the browser; download the SVG");
    saveBlob(`${stem}.png`, blob);
  } finally {
    URL.revokeObjectURL(address);
  }
}

function save(name, text, type) {
  saveBlob(name, new Blob([text], { type }));
}

function saveBlob(name, blob) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  // The download begins after the click and needs the address until then.
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
