// Plots in SVG: lines and dots over linear or logarithmic axes, read with the pointer or the arrow keys.

import { html, useState } from "../vendor/preact.js";
import { useWidth } from "./parts.js";

const LEFT = 70,
  RIGHT = 10,
  TOP = 26,
  BOTTOM = 42;

/** Round numbers from low to high: powers of ten, 2 and 5 times these if they are few; or equal steps. */
function ticks({ low, high, log }, most) {
  const found = [];
  if (log) {
    const parts = high / low < 50 ? [1, 2, 5] : [1],
      by = 10 ** Math.ceil(Math.log10(high / low) / most);
    for (let size = 10 ** Math.floor(Math.log10(low)); size <= high; size *= by)
      found.push(...parts.map((part) => part * size));
  } else {
    const size = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = size * [1, 2, 5, 10].find((part) => (high - low) / (part * size) <= most);
    for (let count = Math.ceil(low / step); count * step <= high * 1.0001; count += 1)
      found.push(count * step);
  }
  return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

/** A scale from values to places: `at(value)`; it holds all values, or axis.range. */
function scaleOf(axis, values, from, to, whole) {
  const shown = values.filter((value) => Number.isFinite(value) && !(axis.log && value <= 0));
  if (!shown.length) shown.push(1);
  let low = Math.min(...shown),
    high = Math.max(...shown);
  if (axis.range) [low, high] = typeof axis.range === "function" ? axis.range(null, low, high) : axis.range;
  else if (whole && axis.log)
    [low, high] = [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))];
  else if (whole) [low, high] = [Math.min(0, low), high * 1.08 || 1];
  if (!(high > low)) [low, high] = axis.log ? [low / 2, low * 2] : [low, low + 1];
  const place = axis.log ? Math.log : (value) => value;
  const at = (value) => from + ((to - from) * (place(value) - place(low))) / (place(high) - place(low));
  return { low, high, log: axis.log, at };
}

/** Lines through points, as a path; points without a value divide it. */
function path(points, x, y) {
  let pen = "M";
  return points
    .map(([a, b]) => {
      if (!Number.isFinite(b)) return (pen = "M") && "";
      const part = `${pen}${x.at(a).toFixed(1)} ${y.at(b).toFixed(1)}`;
      pen = "L";
      return part;
    })
    .join("");
}

function Series({ one, x, y, height }) {
  const colour = `var(${one.tone})`,
    points = one.points.filter(([, b]) => Number.isFinite(b));
  if (!points.length) return null;
  const [a, b] = points.at(-1);
  const note =
    one.note &&
    html`<text x=${x.at(a)} y=${y.at(b) - 7} text-anchor=${one.anchor ?? "end"}>${one.note}</text>`;
  if (one.dots)
    return [
      note,
      ...points.map(
        ([a, b, faint]) => html`<circle cx=${x.at(a)} cy=${y.at(b)} r=${one.size ?? 4} opacity=${faint ?? 1}
        fill=${one.hollow ? "none" : colour} stroke=${colour} stroke-dasharray=${one.hollow && "2 2"} />`,
      ),
    ];
  const below = one.fill && `${path(points, x, y)}V${height - BOTTOM}H${x.at(points[0][0])}Z`;
  return html`${below && html`<path d=${below} fill=${colour} opacity="0.12" />`}
    <path d=${path(one.points, x, y)} fill="none" stroke=${colour} stroke-width=${one.width ?? 2}
      stroke-dasharray=${one.dashed && "6 5"} />${note}`;
}

/**
 * A plot. `series`: [{label, tone, points, dots, hollow, size, dashed, fill, width, note, anchor}]; `points`
 * are [x, y, opacity?], `tone` is a CSS variable. `x`, `y`: {label, format, log, range}. `describe`: the same
 * in words. `data`: [xs, ys, ...] may stand for the points of all series. `read(point, series)` gives the
 * words for a dot that is pointed at; without it all lines are read at one x. `rest`: other words.
 */
export function Plot({ data, series, x, y, height = 280, describe, read, rest }) {
  const [ref, width] = useWidth(),
    [at, setAt] = useState(null);
  const all = series.map((one, index) => ({
    ...one,
    points: one.points ?? data[0].map((a, row) => [a, data[index + 1][row]]),
  }));
  const flat = all.flatMap((one) =>
    one.points.filter(([, b]) => Number.isFinite(b)).map((point) => [point, one]),
  );
  const across = scaleOf(
    x,
    flat.map(([[a]]) => a),
    LEFT,
    width - RIGHT,
  );
  const up = scaleOf(
    y,
    flat.map(([[, b]]) => b),
    height - BOTTOM,
    TOP,
    true,
  );
  const stops = read
    ? flat.filter(([, one]) => one.dots && !one.hollow)
    : [...new Map(flat.map((stop) => [stop[0][0], stop])).values()];
  stops.sort(([[a]], [[b]]) => a - b);
  const point = (event) => {
    const box = ref.current.getBoundingClientRect();
    const far = ([[a, b]]) =>
      Math.hypot(across.at(a) - event.clientX + box.left, read ? up.at(b) - event.clientY + box.top : 0);
    setAt(stops.reduce((best, stop, index) => (far(stop) < far(stops[best]) ? index : best), 0));
  };
  const key = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !stops.length) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(stops.length - 1, (at ?? -1) + by)));
  };
  const chosen = stops[at],
    ring = chosen?.[0];
  const words = chosen && (read ? read(...chosen) : sayColumn(all, chosen[0][0], x, y));
  return html`<div class="plot" ref=${ref}>
    <svg viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${describe} tabindex="0"
      onPointerMove=${point} onPointerDown=${point} onPointerLeave=${() => setAt(null)}
      onKeyDown=${key} onBlur=${() => setAt(null)}>
      ${ticks(up, height / 45).map(
        (tick) => html`<path d=${`M${LEFT} ${up.at(tick)}H${width - RIGHT}`} class="rule" />
          <text x=${LEFT - 8} y=${up.at(tick) + 4} text-anchor="end">${y.format(tick)}</text>`,
      )}
      ${ticks(across, width / 80).map(
        (tick) => html`<path d=${`M${across.at(tick)} ${TOP}V${height - BOTTOM}`} class="rule" />
          <text x=${across.at(tick)} y=${height - BOTTOM + 17} text-anchor="middle">${x.format(tick)}</text>`,
      )}
      <text x=${width - RIGHT} y=${height - 4} text-anchor="end">${x.label}</text>
      <text x="0" y="11">${y.label}</text>
      ${all.map((one) => html`<${Series} one=${one} x=${across} y=${up} height=${height} />`)}
      ${ring && html`<circle class="ring" cx=${across.at(ring[0])} cy=${up.at(ring[1])} r="8" />`}
    </svg>
    <p class="note" aria-live=${words ? "polite" : "off"}>
      ${words ?? rest ?? "Point at the plot to read it, or use the arrow keys."}</p>
  </div>`;
}

/** Where the lines are at x, in words. */
function sayColumn(all, value, x, y) {
  const parts = all.flatMap(({ label, points }) => {
    const found = points.find(([a, b]) => a === value && Number.isFinite(b));
    return label && found ? [`${label} ${y.format(found[1])}`] : [];
  });
  return `${x.format(value)} ${x.label}: ${parts.join(", ")}`;
}
