// Painting passes and memory on a canvas. What is out of sight is skipped, and what is narrower than a pixel is painted once a
// pixel: the work follows the width of the picture, not the number of passes.

const GUTTER = 0.6;

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
 * `view`: {x: time -> px, from, to: times in sight, left, width, rowHeight, gap}; `ink`: colours of the theme.
 */
export function paintPasses(context, drawing, view, ink, kinds, spanColors) {
  const boxes = new Map();
  const numbers = [];
  drawing.ranks.forEach((rank, index) => {
    const top = index * (view.rowHeight + view.gap);
    paintIdle(context, rank, top, view, ink);
    paintSpans(context, drawing.spans?.[index] ?? [], top, view, spanColors);
    collect(rank, top, view, kinds, boxes, numbers);
  });
  for (const [color, list] of boxes) {
    context.fillStyle = color;
    for (let i = 0; i < list.length; i += 3) context.fillRect(list[i], list[i + 1], list[i + 2], view.rowHeight);
  }
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = view.font;
  for (const { text, x, y, dark } of numbers) {
    context.fillStyle = dark ? "#ffffff" : "#15202b";
    context.fillText(text, x, y);
  }
}

function paintIdle(context, rank, top, view, ink) {
  if (!rank.starts.length) return;
  const from = Math.max(view.left, view.x(rank.starts[0]));
  const to = Math.min(view.left + view.width, view.x(rank.ends[rank.ends.length - 1]));
  context.fillStyle = ink.idle;
  if (to > from) context.fillRect(from, top, to - from, view.rowHeight);
}

function paintSpans(context, spans, top, view, colors) {
  // Longer ones first: what happened within another one stays visible.
  const longest = [...spans].sort((one, other) => other[2] - other[1] - (one[2] - one[1]));
  for (const [activity, start, end] of longest) {
    if (end < view.from || start > view.to) continue;
    const from = Math.max(view.left, view.x(start));
    const to = Math.min(view.left + view.width, view.x(end));
    context.fillStyle = colors[activity];
    context.fillRect(from, top, Math.max(to - from, 0.5), view.rowHeight);
  }
}

function collect(rank, top, view, kinds, boxes, numbers) {
  const { starts, ends, kinds: codes, chunks, microbatches } = rank;
  const right = view.left + view.width;
  let painted = -Infinity;
  for (let i = firstAbove(ends, view.from); i < starts.length && starts[i] <= view.to; i++) {
    const from = Math.max(view.left, view.x(starts[i]));
    const to = Math.min(right, view.x(ends[i]));
    if (to <= painted) continue;
    const isLater = chunks[i] > 0;
    const color = kinds[codes[i]].colors[isLater ? 1 : 0];
    const width = to - from > 3 ? to - from - GUTTER : Math.max(to - from, 1);
    if (to - from < 1) painted = from + 1;
    let list = boxes.get(color);
    if (!list) boxes.set(color, (list = []));
    list.push(from, top, width);
    const text = String(microbatches[i]);
    if (view.rowHeight >= 11 && to - from >= view.digit * text.length + 2) {
      numbers.push({ text, x: (from + to) / 2, y: top + view.rowHeight / 2 + 0.5, dark: isLater });
    }
  }
}

/**
 * Paint what each rank holds as staircases; `emphasis` is the rank that a person looks at, or -1.
 * Into a buffer of pixels, as thousands of steps a rank are too many to stroke in a frame, and steps need no smoothing.
 */
export function paintMemory(context, drawing, view, ink, y, emphasis) {
  const ratio = context.getTransform().a;
  const width = Math.round(view.width * ratio);
  const { height } = context.canvas;
  const image = new ImageData(width, height);
  const pixels = { data: new Uint32Array(image.data.buffer), width, height };
  const column = (time) => Math.round((view.x(time) - view.left) * ratio);
  const row = (held) => Math.round(y(held) * ratio);
  const order = drawing.ranks.map((_, index) => index).sort((one, other) => (one === emphasis) - (other === emphasis));
  for (const index of order) {
    const color = d3.rgb(ink.ranks(drawing.ranks.length < 2 ? 0 : index / (drawing.ranks.length - 1)));
    const alpha = emphasis < 0 || index === emphasis ? 255 : 50;
    const thick = Math.max(1, Math.round(ratio * (index === emphasis ? 2 : 1)));
    const packed = ((alpha << 24) | (color.b << 16) | (color.g << 8) | color.r) >>> 0;
    stair(pixels, drawing.ranks[index], view, column, row, packed, thick);
  }
  const layer = new OffscreenCanvas(width, height);
  layer.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(layer, view.left, 0, width / ratio, height / ratio);
}

function stair(pixels, { steps, held }, view, column, row, color, thick) {
  const begin = firstAbove(steps, view.from);
  let at = 0;
  let level = row(begin > 0 ? held[begin - 1] : 0);
  for (let i = begin; i < steps.length && steps[i] <= view.to; i++) {
    const x = column(steps[i]);
    const next = row(held[i]);
    block(pixels, at, x + thick, level, level + thick, color);
    block(pixels, x, x + thick, Math.min(level, next), Math.max(level, next) + thick, color);
    at = x;
    level = next;
  }
  block(pixels, at, column(view.end), level, level + thick, color);
}

function block({ data, width, height }, left, right, top, bottom, color) {
  const from = Math.max(0, left);
  const to = Math.min(width, right);
  if (to <= from) return;
  for (let y = Math.max(0, top); y < Math.min(height, bottom); y++) data.fill(color, y * width + from, y * width + to);
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
    context.moveTo(x, 0);
    context.lineTo(x, height + 3);
    context.stroke();
    context.fillText(ticks.format(tick), x, height + 5);
  }
}
