// Building and finding elements. Text goes in as text, never as markup: schedule names come out of files.

/** The element with an id; a missing one is a bug of the page. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element #${id}`);
  return found;
}

/** An element with attributes (functions become listeners) and children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Write a value into a field, unless somebody is typing one into it that was not taken yet. */
export function fill(field, value) {
  if (field === document.activeElement && field.value !== (field.dataset.seen ?? field.value)) return;
  field.value = value;
  seen(field);
}

/** Note that the value of a field was taken. */
export function seen(field) {
  field.dataset.seen = field.value;
}

/** A table; the first cell of every row is its heading. */
export function table(caption, head, rows) {
  const line = (cells) =>
    make("tr", {}, ...cells.map((cell, column) => (column === 0 ? make("th", { scope: "row" }, cell) : make("td", {}, cell))));
  return make(
    "table",
    {},
    make("caption", { class: "visually-hidden" }, caption),
    make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cell)))),
    make("tbody", {}, ...rows.map(line)),
  );
}

/** Call `action` when there was no further call for `ms` milliseconds. */
export function debounced(action, ms) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), ms);
  };
}

/** Call `action` once before the next paint, however often the returned function is called. */
export function beforePaint(action) {
  let isRequested = false;
  return () => {
    if (isRequested) return;
    isRequested = true;
    requestAnimationFrame(() => {
      isRequested = false;
      action();
    });
  };
}
