// Before the first paint, so that a dark page never flashes white. A choice made here is kept; without one the system's counts.
"use strict";
document.documentElement.dataset.theme =
  localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
