// The words of the page, explained on hover, focus and touch.

import { byId, make } from "./dom.js";

const WORDS = {
  F: "Forward: a stage computes its layers for one microbatch and keeps their activations.",
  B: "dgrad: the gradient of a stage's input, which the stage before it waits for. Half of the backward pass.",
  W: "wgrad: the gradient of the weights. Nobody waits for it, so it can fill a bubble. The other half of the backward pass.",
  BW: "Full backward: B and W without a break. The stage before waits for both.",
  bubble:
    "Time in which a rank has nothing to compute, as a share of the iteration on the bottleneck rank: of the makespan with the " +
    "synchronous optimizer, of the span with post-validation, whichever the page plans for.",
  chunk: "The layers of a rank are cut into chunks, its stages. In a V every rank has two: one on the way down, one on the way back.",
  "post-validation": "The optimizer steps before the global gradient norm is known, and undoes a wrong step. Ranks do not wait for each other, so iterations overlap.",
  "synchronous optimizer": "All ranks wait until the slowest has its gradients, then step: the usual optimizer.",
  "activation memory": "Memory of what F keeps for B, and B for W. 1.0 is what 1F1B needs on rank 0: p microbatches.",
  memory: "Weights, gradients, optimizer state and activations of the fullest rank.",
  messages: "Activations and gradients that go from one rank to another. In a V there are twice as many as in 1F1B.",
};

/** A word of the page with its explanation, shown as `text`. */
export function word(name, text = name) {
  const button = make("button", { type: "button", class: "word", "aria-expanded": "false" }, text);
  const show = () => open(button, WORDS[name]);
  button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show());
  button.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && close());
  button.addEventListener("focus", show);
  button.addEventListener("blur", close);
  button.addEventListener("click", show);
  button.addEventListener("keydown", (event) => event.key === "Escape" && close());
  return button;
}

/** The first of the words in a text as a button, with the text around it. */
export function explained(text) {
  const name = Object.keys(WORDS).find((each) => each.length > 2 && text.includes(each));
  if (!name) return [text];
  const at = text.indexOf(name);
  return [text.slice(0, at), word(name), text.slice(at + name.length)];
}

function open(button, text) {
  close();
  const tip = byId("word");
  tip.textContent = text;
  tip.hidden = false;
  button.setAttribute("aria-expanded", "true");
  button.setAttribute("aria-describedby", "word");
  const box = button.getBoundingClientRect();
  const most = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left, most)) + window.scrollX}px`;
  tip.style.top = `${box.bottom + 4 + window.scrollY}px`;
}

function close() {
  byId("word").hidden = true;
  for (const button of document.querySelectorAll(".word[aria-describedby]")) {
    button.setAttribute("aria-expanded", "false");
    button.removeAttribute("aria-describedby");
  }
}
