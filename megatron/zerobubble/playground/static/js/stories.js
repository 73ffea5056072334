// Short stories about schedules, one after the other. Each is an address; what it says stays while you change things.

import { make } from "./dom.js";

const STORIES = [
  {
    title: "1F1B waits",
    text:
      "Four ranks, eight microbatches, F, B and W of 1 ms each. Rank 0 begins at once, rank 3 has to wait for it; at the end it is the " +
      "other way round. Gray is the bubble: 27.3 % of the time. More microbatches make it smaller: move m.",
    query: "p=4&m=8&effort=drawn&s=1f1b",
  },
  {
    title: "ZB-H1 leaves a third of the bubble",
    text:
      "The stage before needs the gradient of the input, B, and not that of the weights, W. ZB-H1 sends B on at once and runs W where " +
      "1F1B waits: the bubble falls from 27.3 % to 11.1 %, at the same memory.",
    query: "p=4&m=8&effort=drawn&s=1f1b&s=zb-h1",
  },
  {
    title: "ZBV closes it",
    text:
      "Each rank has two chunks, placed in a V: the last stage is on rank 0 again, so its B begins early. With post-validation there " +
      "is no bubble left, at 1F1B's memory. The price: twice as many messages.",
    query: "p=4&m=12&effort=drawn&objective=span&s=1f1b&s=zbv",
  },
  {
    title: "Half the memory",
    text:
      "In the same V, V-Half lets a microbatch go back sooner: 0.625 of 1F1B's activation memory with 8 ranks, half of it with many. Some " +
      "bubble returns, less than 1F1B's. What fits in the other half, such as longer sequences or no recomputation, may be worth more.",
    query: "p=8&m=24&effort=drawn&s=1f1b&s=zbv&s=v-half",
  },
  {
    title: "Your head is heavy",
    text:
      "Gemma-2-9B has a vocabulary of 256,000: the head takes as long as several layers. With as many layers in each stage the last " +
      "rank is the bottleneck, and no order of passes helps. Open the sizes and divide the layers by their work.",
    query: "p=8&m=32&effort=drawn&s=1f1b&s=zbv",
    shape: "Gemma-2-9B",
  },
  {
    title: "Cut long sequences",
    text:
      "With long sequences there are few microbatches, and each takes all the memory. Cut each into 4 slices: F of a slice sees the keys " +
      "of the slices before it, B goes back from the last one. 1F1B's bubble falls as with 4 times the microbatches, and so does its memory.",
    query: "p=4&m=4&effort=drawn&s=1f1b&s=1f1b~~~~4&s=zbv~~~~4",
  },
];

/** The hash of a story; of none, an empty page. */
function hashOf(index, shapes) {
  const { query, shape } = STORIES[index];
  const model = shape ? `&model=${encodeURIComponent(JSON.stringify({ device_gib: 79, is_balanced: 0, ...shapes[shape].model }))}` : "";
  return `#${query}${model}&story=${index + 1}`;
}

/** Show the story of the state, or none; `close()` is called to leave it. */
export function tell(root, state, shapes, close) {
  const index = state.story - 1;
  const story = STORIES[index];
  root.hidden = !story;
  if (!story) return;
  const link = (to, text) => (STORIES[to] ? make("a", { class: "button", href: hashOf(to, shapes) }, text) : null);
  root.replaceChildren(
    make("p", {}, make("strong", {}, `${index + 1} of ${STORIES.length}. ${story.title}. `), story.text),
    make(
      "div",
      { class: "row" },
      link(index - 1, "Back"),
      link(index + 1, "Next"),
      make("button", { type: "button", "aria-label": "leave the stories", click: close }, "×"),
    ),
  );
}

/** The address of the first story. */
export function firstStory(shapes) {
  return hashOf(0, shapes);
}
