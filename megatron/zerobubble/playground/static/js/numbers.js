// Numbers for people: three or four significant digits.

const DIGITS = 4;
const ZERO = 1e-9;

/** Four significant digits; all of a larger whole number. */
export function number(value) {
  return Math.abs(value) < ZERO ? "0" : value.toFixed(decimals(value, DIGITS));
}

/** A time given in milliseconds; from ten seconds on in seconds. */
export function milliseconds(value) {
  return Math.abs(value) >= 1e4 ? `${number(value / 1e3)} s` : `${number(value)} ms`;
}

/** A share as a percentage: three significant digits, at most two of them behind the point. */
export function percent(share) {
  const value = 100 * share;
  return Math.abs(value) < 0.005 ? "0 %" : `${value.toFixed(Math.min(2, decimals(value, DIGITS - 1)))} %`;
}

/** Bytes in GiB. */
export function gibibytes(bytes) {
  const value = bytes / 2 ** 30;
  return `${value.toFixed(value < 10 ? 2 : 1)} GiB`;
}

function decimals(value, digits) {
  const rounded = Number(Math.abs(value).toPrecision(digits)); // 9.9999 is written as 10.00
  return Math.max(0, digits - 1 - Math.floor(Math.log10(rounded)));
}

/** The value that an input shows, without digits that nobody measures. */
export function brief(value) {
  return Number(value.toPrecision(DIGITS));
}
