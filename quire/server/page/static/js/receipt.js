// The receipt of an answer: where its time went.

import { html, useState } from "../vendor/preact.js";
import { ms } from "./format.js";
import { Stat, useWidth } from "./parts.js";

const PARTS = [
  ["queue", "queue", "muted-ink"],
  ["prefill", "prefill", "prefill-ink"],
  ["decode", "decode", "decode-ink"],
  ["preempted", "preempted", "bad-ink"],
  ["total", "in all"],
  ["interference", "striped: by others"],
  ["cached_saved", "dashed: cache saved", "shared-ink"],
  ["ideal", "line: ideal, alone", "good-ink"],
  ["ttft", "TTFT, by the server"],
  ["mean_itl", "mean ITL"],
  ["max_itl", "longest ITL"],
];
let count = 0; // of receipts, for the names of their patterns

/** Where the time of an answer went, by the `timings` of the API. */
export function Receipt({ timings }) {
  const [ref, width] = useWidth();
  const [id] = useState(() => `stripes-${(count += 1)}`);
  const scale = width / (timings.total_ms + timings.cached_saved_ms || 1);
  const size = (name) => scale * timings[`${name}_ms`];
  let at = 0;
  const boxes = PARTS.slice(0, 4).map(([name, , tone]) => {
    at += size(name);
    return html`<rect class=${tone} x=${at - size(name)} width=${size(name)} height="32" />`;
  });
  return html`<div ref=${ref}><svg viewBox=${`0 0 ${width} 42`} aria-hidden="true">
      <pattern id=${id} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <rect class="stripe" width="2.5" height="6" /></pattern>
      ${boxes}
      <rect x=${size("queue")} y="8" width=${size("interference")} height="16" fill=${`url(#${id})`} />
      <rect class="saved" x=${at} width=${size("cached_saved")} height="32" />
      <rect class="good-ink" x=${size("queue")} y="36" width=${Math.max(2, size("ideal"))} height="4" />
    </svg></div>
    <div class="facts">${PARTS.map(
      ([name, label, tone]) => html`<${Stat} label=${html`${tone && html`<i class=${tone}>■ </i>`}${label}`}
        field=${`timings.${name}_ms`} value=${timings[`${name}_ms`]} format=${ms} />`,
    )}</div>`;
}
