// Files that leave the page. All but the PNG are the planner's own; the PNG is the planner's SVG on a canvas.

import { ask } from "./api.js";
import { make } from "./dom.js";

const MOST_PX = 8192;

/** Buttons for one plan: `taken` is {drawing, flags, objective}; `fail` is told what went wrong. */
export function actions(taken, fail) {
  const { plan, schedule, num_ranks: p, num_microbatches: m } = taken.drawing;
  const stem = `${/^[a-z0-9-]+$/.test(schedule) ? schedule : "plan"}-p${p}-m${m}`;
  const guarded = (action) => () => action().catch((error) => fail(error.message));
  const flags = make("pre", { class: "flags", tabindex: 0, "aria-label": "flags" }, (taken.flags ?? []).join(" \\\n"));
  const popover = make(
    "details",
    { class: "flags-box" },
    make("summary", { class: "button" }, "Flags"),
    make(
      "div",
      { class: "popover" },
      make("p", { class: "hint" }, `For pretrain_gpt.py, beside the saved ${stem}.json:`),
      flags,
      make("button", { type: "button", click: guarded(() => copy(flags.textContent)) }, "Copy flags"),
    ),
  );
  return make(
    "div",
    { class: "row actions", role: "group", "aria-label": "Take along" },
    make("button", { type: "button", click: guarded(async () => save(`${stem}.json`, plan, "application/json")) }, "Plan"),
    make("button", { type: "button", click: guarded(() => saveFrom(plan, "svg")) }, "SVG"),
    make("button", { type: "button", click: guarded(() => savePng(plan, stem)) }, "PNG"),
    make("button", { type: "button", click: guarded(() => saveFrom(plan, "trace")) }, "Trace"),
    taken.flags ? popover : null,
  );
}

/** Put text on the clipboard; throws where the browser does not let us. */
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
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
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
    if (!blob) throw new Error("the browser could not paint so large a picture; take the SVG");
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
  // The download begins after the click; the address must still be there then.
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
