// Paint passes and memory on a canvas through a buffer of pixels: filling thousands of boxes and steps one by one takes a canvas
// longer than a frame. What is out of sight is skipped, so that the time depends on what is visible.

const DIGIT = 0.58; // width of a digit, as a share of the font size
const PADDING = 2;
const LEAST_FONT = 7;
const NARROW_FONT = 6; // of digits that stand one below the other
const GAP = 1; // between boxes
const FADED = 50; // of 255
const SLACK = 1e-6; // of a memory limit

/** Index of the first value of an ascending list that is above `limit`. */
export function firstAbove(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * Paint the passes of all ranks.
 * `view`: {x: time -> px, from, to: times in sight, left, width, rowHeight, gap}; `ink`: colors of the theme; `isLit(rank, index)`:
 * which passes are not faded, null: all.
 */
export function paintPasses(context, drawing, view, ink, kinds, spanColors, isLit) {
  const ratio = context.getTransform().a;
  const step = view.rowHeight + view.gap;
  const pixels = buffer(Math.round(view.width * ratio), Math.round(drawing.num_ranks * step * ratio));
  const column = (time) => Math.round((view.x(time) - view.left) * ratio);
  const colors = {
    idle: packed(ink.idle),
    kinds: kinds.map((kind) => kind.colors.map((color) => packed(color))),
    faded: kinds.map((kind) => kind.colors.map((color) => packed(color, FADED))),
    spans: Object.fromEntries(Object.entries(spanColors).map(([activity, color]) => [activity, packed(color)])),
  };
  const size = numberSize(drawing, view);
  const numbers = [];
  const line = new Uint32Array(pixels.width);
  drawing.ranks.forEach((rank, index) => {
    line.fill(0);
    if (rank.starts.length) span(line, column(rank.starts[0]), column(rank.ends[rank.ends.length - 1]), colors.idle);
    paintSpans(line, drawing.spans?.[index] ?? [], column, colors.spans);
    const seconds = new Set(rank.seconds);
    const lit = isLit && ((i) => isLit(index, i));
    paintBoxes(line, rank, view, column, colors, lit, (i) => !seconds.has(i));
    const top = Math.round(index * step * ratio);
    const height = Math.round(view.rowHeight * ratio);
    for (let y = top; y < top + height; y++) pixels.data.set(line, y * pixels.width);
    if (seconds.size) {
      paintBoxes(line, rank, view, column, colors, lit, (i) => seconds.has(i));
      for (let y = top + (height >> 1); y < top + height; y++) pixels.data.set(line, y * pixels.width);
    }
    if (size) collect(rank, index * step + view.rowHeight / 2 + 0.5, view, size, numbers);
  });
  flush(context, pixels, view.left, ratio);
  context.textAlign = "center";
  context.textBaseline = "middle";
  let font = 0;
  for (const { px, text, x, y, isLater } of numbers) {
    if (px !== font) context.font = `${px}px ${view.family}`;
    font = px;
    context.fillStyle = isLater ? "#ffffff" : "#15202b";
    context.fillText(text, x, y);
  }
}

function paintSpans(line, spans, column, colors) {
  // Longer ones first: what happened within another one stays visible.
  const longest = [...spans].sort((one, other) => other[2] - other[1] - (one[2] - one[1]));
  for (const [activity, start, end] of longest) {
    const from = column(start);
    span(line, from, Math.max(column(end), from + 1), colors[activity]);
  }
}

/** The boxes of a rank that `isHere` names: the second ops of pairs are only in the lower half of its row. */
function paintBoxes(line, { starts, ends, kinds, chunks }, view, column, colors, isLit, isHere) {
  for (let i = firstAbove(ends, view.from); i < starts.length && starts[i] <= view.to; i++) {
    if (!isHere(i)) continue;
    const from = column(starts[i]);
    const to = column(ends[i]);
    // A pixel between boxes keeps them apart if they are wide enough.
    span(line, from, to - from > 3 ? to - 1 : Math.max(to, from + 1), (isLit && !isLit(i) ? colors.faded : colors.kinds)[kinds[i]][chunks[i] > 0 ? 1 : 0]);
  }
}

/** The font size at which the largest microbatch number fits into every box in sight, at least the smallest that can be read. */
function numberSize({ ranks, num_microbatches: count }, view) {
  if (view.rowHeight < LEAST_FONT + 2) return 0;
  let least = Infinity;
  for (const { starts, ends } of ranks) {
    for (let i = firstAbove(ends, view.from); i < starts.length && starts[i] <= view.to; i++) {
      if (ends[i] > starts[i]) least = Math.min(least, view.x(ends[i]) - view.x(starts[i]));
    }
  }
  const size = Math.min(view.fontSize, Math.floor((least - PADDING) / (DIGIT * String(count - 1).length)));
  return Math.max(LEAST_FONT, size);
}

/** The microbatch numbers where they fit, in the middle of what is in sight of their boxes; in narrow ones digit below digit. */
function collect({ starts, ends, chunks, microbatches, seconds }, middle, view, size, numbers) {
  const lower = new Set(seconds);
  for (let i = firstAbove(ends, view.from); i < starts.length && starts[i] <= view.to; i++) {
    const from = Math.max(view.left, view.x(starts[i]));
    const to = Math.min(view.left + view.width, view.x(ends[i]));
    const text = String(microbatches[i]);
    const isHalf = lower.has(i) || lower.has(i + 1);
    if (isHalf && view.rowHeight < 2 * size) continue;
    const y = middle + (isHalf ? ((lower.has(i) ? 1 : -1) * view.rowHeight) / 4 : 0);
    const entry = { px: size, text, x: (from + to) / 2, y, isLater: chunks[i] > 0 };
    if (to - from >= DIGIT * size * text.length + PADDING) numbers.push(entry);
    else if (!isHalf && view.rowHeight >= LEAST_FONT * text.length) {
      const px = Math.min(LEAST_FONT, Math.floor((to - from - GAP) / DIGIT));
      if (px < NARROW_FONT) continue;
      [...text].forEach((digit, at) => numbers.push({ ...entry, px, text: digit, y: y + (at - (text.length - 1) / 2) * LEAST_FONT }));
    }
  }
}

/**
 * Paint the memory of each rank as a staircase, red where it is above `most`; `emphasis` is the selected rank, or -1; `y` is the
 * height of a rank's memory, `of` the memory itself, by what the rank holds.
 * It goes into a buffer of pixels: thousands of steps per rank are too many to stroke in a frame, and steps need no smoothing.
 */
export function paintMemory(context, drawing, view, ink, y, emphasis, most, of) {
  const ratio = context.getTransform().a;
  const pixels = buffer(Math.round(view.width * ratio), context.canvas.height);
  const column = (time) => Math.round((view.x(time) - view.left) * ratio);
  const order = drawing.ranks.map((_, index) => index).sort((one, other) => (one === emphasis) - (other === emphasis));
  for (const index of order) {
    const share = drawing.ranks.length < 2 ? 0 : index / (drawing.ranks.length - 1);
    const alpha = emphasis < 0 || index === emphasis ? 255 : 50;
    const [color, above] = [packed(ink.ranks(share), alpha), packed(ink.bad, alpha)];
    const thick = Math.max(1, Math.round(ratio * (index === emphasis ? 2 : 1)));
    const row = (held) => Math.round(y(of(held, index)) * ratio);
    stair(pixels, drawing.ranks[index], view, column, row, (held) => (of(held, index) > most + SLACK ? above : color), thick);
  }
  flush(context, pixels, view.left, ratio);
}

function stair(pixels, { steps, held }, view, column, row, colorOf, thick) {
  const begin = firstAbove(steps, view.from);
  let at = 0;
  let value = begin > 0 ? held[begin - 1] : 0;
  let level = row(value);
  for (let i = begin; i < steps.length && steps[i] <= view.to; i++) {
    const x = column(steps[i]);
    const next = row(held[i]);
    block(pixels, at, x + thick, level, level + thick, colorOf(value));
    block(pixels, x, x + thick, Math.min(level, next), Math.max(level, next) + thick, colorOf(Math.max(value, held[i])));
    at = x;
    level = next;
    value = held[i];
  }
  block(pixels, at, column(view.end), level, level + thick, colorOf(value));
}

function block({ data, width, height }, left, right, top, bottom, color) {
  const from = Math.max(0, left);
  const to = Math.min(width, right);
  if (to <= from) return;
  for (let y = Math.max(0, top); y < Math.min(height, bottom); y++) data.fill(color, y * width + from, y * width + to);
}

function span(line, left, right, color) {
  const to = Math.min(line.length, right);
  for (let x = Math.max(0, left); x < to; x++) line[x] = color;
}

/** Transparent pixels; `data` has one number each. */
function buffer(width, height) {
  const image = new ImageData(Math.max(1, width), Math.max(1, height));
  return { image, data: new Uint32Array(image.data.buffer), width: image.width, height: image.height };
}

/** A color as the number of a pixel: red comes first in memory, and all machines with a browser are little-endian. */
function packed(color, alpha = 255) {
  const { r, g, b } = d3.rgb(color);
  return ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** Lay the pixels over what is there. */
function flush(context, { image, width, height }, left, ratio) {
  const layer = new OffscreenCanvas(width, height);
  layer.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(layer, left, 0, width / ratio, height / ratio);
}

/** Vertical lines and times under them. */
export function paintAxis(context, ticks, view, ink, height) {
  context.strokeStyle = ink.line;
  context.fillStyle = ink.soft;
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "top";
  context.font = view.axisFont;
  for (const tick of ticks.values) {
    const x = Math.round(view.x(tick)) + 0.5;
    context.beginPath();
    context.moveTo(x, view.top ?? 0);
    context.lineTo(x, height + 3);
    context.stroke();
    context.fillText(ticks.format(tick), x, height + 5);
  }
}
