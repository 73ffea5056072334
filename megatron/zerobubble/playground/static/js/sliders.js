// Sliders beside numbers of the form: each moves its number, and follows it.

import { make } from "./dom.js";

const STEPS = 1000;

/** Add a slider behind a field; `span()` is its largest value now. It is logarithmic where the field has whole numbers. */
export function slide(field, name, span) {
  const isWhole = field.step === "1";
  const slider = make("input", { type: "range", min: 0, max: STEPS, step: 1, class: "slider", "aria-label": name });
  const toValue = (at) => (isWhole ? Math.round(span() ** (at / STEPS)) : Number(((span() * at) / STEPS).toPrecision(3)));
  const toSlider = (value) => Math.round(STEPS * (isWhole ? Math.log(Math.max(1, value)) / Math.log(span()) : value / span()));
  slider.addEventListener("input", (event) => {
    event.stopPropagation();
    field.value = String(toValue(Number(slider.value)));
    field.dispatchEvent(new Event("input", { bubbles: true }));
  });
  field.after(slider);
  return () => {
    if (document.activeElement === slider) return;
    slider.value = String(toSlider(Number(field.value)));
    slider.disabled = field.readOnly || field.disabled;
    slider.setAttribute("aria-valuetext", field.value);
  };
}
