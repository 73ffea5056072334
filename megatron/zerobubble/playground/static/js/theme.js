// Runs before the first paint, so that a dark page never flashes white. The user's stored choice wins over the system's setting.
"use strict";
document.documentElement.dataset.theme =
  localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
