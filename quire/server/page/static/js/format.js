// Numbers for people: at most three significant digits, with a unit. Units are decimal, as in all of Quire.

const STEPS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

function digits(value) {
  const size = Math.abs(value);
  const places = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: places });
}

function scaled(value, unit) {
  for (const [size, letter] of STEPS) {
    if (Math.abs(value) >= size * 0.9995) return `${digits(value / size)} ${letter}${unit}`;
  }
  return `${digits(value)} ${unit}`;
}

/** Seconds as µs, ms or s. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (Math.abs(seconds) < 0.9995e-3) return `${digits(seconds * 1e6)} µs`;
  return Math.abs(seconds) < 0.9995 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds)} s`;
}

export const ms = (value) => duration(value / 1e3);
export const bytes = (value) => (Number.isFinite(value) ? scaled(value, "B") : "–");
export const flops = (value) => (Number.isFinite(value) ? scaled(value, "FLOP") : "–");
export const rate = (value, unit) => (Number.isFinite(value) ? scaled(value, `${unit}/s`) : "–");
export const number = (value) => (Number.isFinite(value) ? digits(value) : "–");
export const integer = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–");
export const percent = (share) => (Number.isFinite(share) ? `${digits(100 * share)} %` : "–");

/** A percentile that interpolates between values, as those of quire bench do. `share`: 0.5 for the median. */
export function percentile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = share * (sorted.length - 1),
    below = Math.floor(at);
  return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
}
