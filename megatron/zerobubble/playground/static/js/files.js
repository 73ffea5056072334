// Files that are dropped onto the page or chosen. The server detects what they are; the page does not parse them.

import { ask } from "./api.js";
import { byId } from "./dom.js";

/** Call `opened(answer, name)` for every file, or `fail` with the reason if the server rejects one. */
export function acceptFiles({ mostBytes, opened, fail }) {
  const open = async (files) => {
    for (const file of files) {
      try {
        if (file.size > mostBytes) throw new Error(`it is larger than the maximum of ${mostBytes / 2 ** 20} MiB`);
        opened(await ask("open", await file.text()), file.name);
      } catch (error) {
        fail(`${file.name}: ${error.message}`);
      }
    }
  };
  const input = byId("files");
  input.addEventListener("change", async () => {
    await open([...input.files]);
    input.value = ""; // so that the same file can be chosen again
  });
  const root = document.documentElement;
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    root.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) root.classList.remove("dropping");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    root.classList.remove("dropping");
    open([...event.dataTransfer.files]);
  });
}
