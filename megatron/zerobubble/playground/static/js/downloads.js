// Downloads: plan, SVG, PNG, trace and flags. The server renders all but the PNG, which is the SVG painted on a canvas.

import { ask } from "./api.js";
import { make } from "./dom.js";

const MOST_PX = 8192;

/** Buttons for one plan: `shown` is {drawing, flags}; `fail` is called with an error message. */
export function actions(shown, fail) {
  const { plan, schedule, num_ranks: p, num_microbatches: m } = shown.drawing;
  const stem = `${/^[a-z0-9-]+$/.test(schedule) ? schedule : "plan"}-p${p}-m${m}`;
  const guarded = (action) => () => action().catch((error) => fail(error.message));
  const flags = make("pre", { class: "flags", tabindex: 0, "aria-label": "flags" }, (shown.flags ?? []).join(" \\\n"));
  const popover = make(
    "details",
    { class: "flags-box" },
    make("summary", { class: "button" }, "Flags"),
    make(
      "div",
      { class: "popover" },
      ...(shown.flags?.length
        ? [
            make("p", { class: "hint" }, `For pretrain_gpt.py, beside the saved ${stem}.json:`),
            flags,
            make("button", { type: "button", click: guarded(() => copy(flags.textContent)) }, "Copy flags"),
          ]
        : [make("p", { class: "hint" }, "A plan for unequal microbatches is not loaded: a run has others in every iteration.")]),
    ),
  );
  return make(
    "div",
    { class: "row actions", role: "group", "aria-label": "Download" },
    make("button", { type: "button", click: guarded(async () => save(`${stem}.json`, plan, "application/json")) }, "Plan"),
    make("button", { type: "button", click: guarded(() => saveFrom(plan, "svg")) }, "SVG"),
    make("button", { type: "button", click: guarded(() => savePng(plan, stem)) }, "PNG"),
    make("button", { type: "button", click: guarded(() => saveFrom(plan, "trace")) }, "Trace"),
    shown.flags ? popover : null,
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
