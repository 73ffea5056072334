// Up to three timelines below each other on one time axis: zooming and panning apply to all of them.

import { beforePaint, make } from "./dom.js";
import { Panel } from "./panel.js";
import { word } from "./words.js";

const LEFT = 34;
const MOST_ZOOM = 4000;
const ZOOM_STEP = 1.6;

export class Timelines {
  /** `parts`: elements {root, legend, tip, announcer, tall}; `choices`: the colors. */
  constructor(parts, choices) {
    Object.assign(this, parts);
    this.choices = choices;
    this.panels = [];
    this.selected = null;
    this.shown = { microbatch: null, isCritical: false };
    this.transform = d3.zoomIdentity;
    this.repaint = beforePaint(() => this.paint());
    this.zoom = d3
      .zoom()
      .scaleExtent([1, MOST_ZOOM])
      .filter((event) => this.isOurs(event))
      .wheelDelta(wheelDelta)
      .on("zoom", (event) => {
        this.transform = event.transform;
        this.repaint();
      });
    d3.select(this.root).call(this.zoom);
    new ResizeObserver(() => this.repaint()).observe(this.root);
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => this.choose(null));
    this.root.addEventListener("click", (event) => this.point(event));
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("focusout", () => this.choose(null));
    this.tall.addEventListener("click", () => {
      this.tall.setAttribute("aria-pressed", String(this.tall.getAttribute("aria-pressed") === "false"));
      this.paint();
    });
  }

  /** A plain wheel scrolls the page, which may be longer than the window. */
  isOurs(event) {
    if (!event.target.closest(".chart")) return false;
    return event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.ctrlKey && !event.shiftKey && !event.button;
  }

  /** Show a list of {key, letter, drawing, limit, actions}. Panels that have not changed are kept. */
  show(list) {
    const before = new Map(this.panels.map((panel) => [panel.shown.key, panel]));
    this.panels = list.map((shown) => {
      const old = before.get(shown.key);
      const isSame = old && old.drawing === shown.drawing && old.shown.letter === shown.letter && old.shown.limit === shown.limit;
      return isSame ? old : new Panel(shown, this.choices.kinds, this.choices.spans);
    });
    if (this.selected && !this.panels.includes(this.selected.panel)) this.choose(null);
    arrange(this.root, this.panels.map((panel) => panel.element));
    this.explain();
    this.repaint();
  }

  /** Build the legend of the colors. */
  explain() {
    const kinds = new Set();
    const spans = new Set();
    for (const { drawing } of this.panels) {
      for (const rank of drawing.ranks) rank.kinds.forEach((kind) => kinds.add(kind));
      drawing.spans?.flat().forEach(([activity]) => spans.add(activity));
    }
    const hasChunks = this.panels.some(({ drawing }) => drawing.num_chunks > 1);
    const swatch = (color) => {
      const box = make("span", { class: "swatch" });
      box.style.background = color;
      return box;
    };
    const names = { F: "F forward", B: "B dgrad (input)", W: "W wgrad (weights)", BW: "BW full backward (B+W)" };
    const entries = [...kinds].sort().map((kind) => {
      const { name, colors } = this.choices.kinds[kind];
      return make("span", {}, ...(hasChunks ? colors : colors.slice(0, 1)).map(swatch), word(name, names[name]));
    });
    for (const activity of spans) entries.push(make("span", {}, swatch(this.choices.spans[activity]), activity));
    if (hasChunks) entries.push(make("span", { class: "soft" }, "light: first ", word("chunk"), " of a rank, dark: later ones"));
    this.legend.replaceChildren(...entries);
  }

  paint() {
    if (!this.panels.length) return;
    this.tall.hidden = !this.panels.some(({ isShort }) => isShort);
    for (const panel of this.panels) panel.isTall = this.tall.getAttribute("aria-pressed") === "true";
    const width = Math.max(60, this.panels[0].chart.clientWidth - LEFT - 8);
    const extent = [[LEFT, 0], [LEFT + width, 100]];
    this.zoom.extent(extent).translateExtent(extent);
    const length = this.length || 1;
    const most = (inBytes) => Math.max(...this.panels.filter(({ drawing }) => Boolean(drawing.memory) === inBytes).map((panel) => panel.mostMemory));
    const x = this.transform.rescaleX(d3.scaleLinear([0, length], [LEFT, LEFT + width]));
    const count = Math.max(2, Math.floor(width / 90));
    const ticks = { values: x.ticks(count), format: x.tickFormat(count) };
    const ink = theme(this.root);
    for (const panel of this.panels) panel.paint(x, LEFT, width, ink, most(Boolean(panel.drawing.memory)), ticks, this.shown);
    if (this.selected) this.frame();
  }

  point(event) {
    const panel = event.target.closest?.(".chart")?.panel;
    if (!panel) return this.choose(null);
    const box = panel.chart.getBoundingClientRect();
    const place = panel.at(event.clientX - box.left, event.clientY - box.top);
    return this.choose(place && { panel, ...place });
  }

  /** Frame a pass and describe it; null: none. */
  choose(selected, isAnnounced = false) {
    if (this.selected && this.selected.panel !== selected?.panel) {
      const { changed } = this.selected.panel.select(null);
      if (changed) this.repaint();
    }
    this.selected = selected;
    this.tip.hidden = !selected;
    if (!selected) return;
    this.frame();
    if (isAnnounced) this.announcer.textContent = selected.panel.describe(selected).join(", ");
  }

  frame() {
    const { panel } = this.selected;
    const { changed, left, bottom } = panel.select(this.selected);
    if (changed) this.repaint();
    const [first, ...rest] = panel.describe(this.selected);
    this.tip.replaceChildren(make("b", {}, first), ...rest.map((line) => make("div", {}, line)));
    this.tip.hidden = false;
    const box = panel.chart.getBoundingClientRect();
    const most = document.documentElement.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(8, Math.min(box.left + left, most)) + window.scrollX}px`;
    this.tip.style.top = `${box.top + bottom + 6 + window.scrollY}px`;
  }

  /** Change what is shown of the passes: {microbatch, isCritical}. */
  light(change) {
    Object.assign(this.shown, change);
    this.repaint();
  }

  /** Go to the next pass of a microbatch after the selected one, in the first timeline or the one with the selected pass. */
  nextOf(microbatch) {
    const panel = this.selected?.panel ?? this.panels[0];
    if (!panel) return;
    const passes = panel.drawing.ranks.flatMap(({ microbatches, starts }, rank) =>
      microbatches.flatMap((each, index) => (each === microbatch ? [{ rank, index, start: starts[index] }] : [])),
    );
    passes.sort((one, other) => one.start - other.start || one.rank - other.rank);
    const at = passes.findIndex(({ rank, index }) => rank === this.selected?.rank && index === this.selected?.index);
    if (passes.length) this.goTo(panel, passes[(at + 1) % passes.length]);
  }

  get length() {
    return Math.max(0, ...this.panels.map(({ drawing }) => drawing.length_ms));
  }

  key(event) {
    const panel = event.target.closest(".chart")?.panel;
    if (!panel || event.altKey || event.metaKey || event.ctrlKey) return;
    const action = event.shiftKey ? PANS[event.key] ?? ZOOMS[event.key] : ZOOMS[event.key];
    const step = STEPS[event.key];
    if (action) action(this);
    else if (step && !event.shiftKey) this.walk(panel, step);
    else return;
    event.preventDefault();
  }

  /** Move from the selected pass to a neighbor: the next pass of its rank, or the one at the same time on the next rank. */
  walk(panel, [ranks, passes]) {
    const last = (rank) => panel.drawing.ranks[rank].starts.length - 1;
    let place = this.selected?.panel === panel ? this.selected : null;
    if (!place) place = { rank: 0, index: 0 };
    else if (passes) place = { rank: place.rank, index: clamp(place.index + passes, last(place.rank)) };
    else {
      const rank = clamp(place.rank + ranks, panel.drawing.num_ranks - 1);
      const time = panel.drawing.ranks[place.rank].starts[place.index];
      const index = clamp(d3.bisectRight(panel.drawing.ranks[rank].starts, time) - 1, last(rank));
      place = { rank, index };
    }
    this.goTo(panel, place);
  }

  /** Bring a pass into sight, frame and announce it. */
  goTo(panel, place) {
    this.reveal(panel, place);
    this.choose({ panel, ...place }, true);
  }

  /** Pan until a pass is in sight. */
  reveal(panel, place) {
    const { starts, ends } = panel.drawing.ranks[place.rank];
    const { x, from, to, left, width } = panel.view;
    if (starts[place.index] < from || ends[place.index] > to) {
      const middle = (x(starts[place.index]) + x(ends[place.index])) / 2;
      d3.select(this.root).call(this.zoom.translateBy, (left + width / 2 - middle) / this.transform.k, 0);
      this.paint();
    }
  }

  /** Zoom around the selected pass, so that it stays in sight; without one around the middle. */
  scaleBy(factor) {
    let around;
    if (this.selected) {
      const { panel, rank, index } = this.selected;
      this.reveal(panel, { rank, index });
      const { x, left, width } = panel.view;
      const { starts, ends } = panel.drawing.ranks[rank];
      around = [left + clamp((x(starts[index]) + x(ends[index])) / 2 - left, width), 0];
    }
    d3.select(this.root).call(this.zoom.scaleBy, factor, around);
  }

  panBy(share) {
    const { width } = this.panels[0].view;
    d3.select(this.root).call(this.zoom.translateBy, (share * width) / this.transform.k, 0);
  }

  fit() {
    d3.select(this.root).call(this.zoom.transform, d3.zoomIdentity);
  }
}

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9] };
const PANS = { ArrowLeft: (lines) => lines.panBy(0.2), ArrowRight: (lines) => lines.panBy(-0.2) };
const ZOOMS = {
  "+": (lines) => lines.scaleBy(ZOOM_STEP),
  "=": (lines) => lines.scaleBy(ZOOM_STEP),
  "-": (lines) => lines.scaleBy(1 / ZOOM_STEP),
  0: (lines) => lines.fit(),
  w: (lines) => lines.scaleBy(ZOOM_STEP),
  s: (lines) => lines.scaleBy(1 / ZOOM_STEP),
  a: (lines) => lines.panBy(0.2),
  d: (lines) => lines.panBy(-0.2),
};

/** Make `elements` the children of `root`; those that stay are not moved, as a moved one would lose the focus. */
function arrange(root, elements) {
  for (const child of [...root.children]) if (!elements.includes(child)) child.remove();
  elements.forEach((element, i) => {
    if (root.children[i] !== element) root.insertBefore(element, root.children[i] ?? null);
  });
}

function clamp(value, most) {
  return Math.max(0, Math.min(value, most));
}

/** A trackpad's pinch comes as small steps with Ctrl, a mouse's wheel as large ones. */
function wheelDelta(event) {
  const unit = event.deltaMode === 1 ? 0.05 : event.deltaMode ? 1 : 0.002;
  return -event.deltaY * unit * (Math.abs(event.deltaY) < 50 ? 10 : 2);
}

function theme(element) {
  const style = getComputedStyle(element);
  const color = (name) => style.getPropertyValue(name).trim();
  const isDark = document.documentElement.dataset.theme === "dark";
  return {
    idle: color("--idle"),
    line: color("--line"),
    soft: color("--soft"),
    bad: color("--bad"),
    ranks: (share) => d3.interpolateViridis(isDark ? 0.35 + 0.6 * share : 0.8 * share),
  };
}
