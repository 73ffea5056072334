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
    if (view.rowHeight >= 11 && to - from >= view.digit * text.length + 3) {
      numbers.push({ text, x: (from + to) / 2, y: top + view.rowHeight / 2 + 0.5, dark: isLater });
    }
  }
}

/** Paint what each rank holds as staircases; `emphasis` is the rank that a person looks at, or -1. */
export function paintMemory(context, drawing, view, ink, y, emphasis) {
  const order = drawing.ranks.map((_, index) => index).sort((one, other) => (one === emphasis) - (other === emphasis));
  for (const index of order) {
    const isSeen = emphasis < 0 || index === emphasis;
    context.strokeStyle = ink.ranks(drawing.ranks.length < 2 ? 0 : index / (drawing.ranks.length - 1));
    context.globalAlpha = isSeen ? 1 : 0.18;
    context.lineWidth = index === emphasis ? 2 : 1.1;
    stair(context, drawing.ranks[index], view, y);
  }
  context.globalAlpha = 1;
}

function stair(context, { steps, held }, view, y) {
  const right = view.left + view.width;
  const begin = firstAbove(steps, view.from);
  let value = begin > 0 ? held[begin - 1] : 0;
  let column = NaN;
  let most = 0;
  context.beginPath();
  context.moveTo(view.left, y(value));
  for (let i = begin; i < steps.length && steps[i] <= view.to; i++) {
    const x = view.x(steps[i]);
    if (Math.round(x) === column) {
      most = Math.max(most, held[i]);
    } else {
      if (!Number.isNaN(column)) context.lineTo(column, y(most));
      context.lineTo(x, y(value));
      column = Math.round(x);
      most = held[i];
      context.lineTo(x, y(most));
    }
    value = held[i];
  }
  if (!Number.isNaN(column)) context.lineTo(column, y(most));
  context.lineTo(Math.max(view.left, Math.min(right, view.x(view.end))), y(value));
  context.stroke();
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
