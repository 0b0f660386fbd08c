// What steps took, were predicted to take, and were limited by.

import { html } from "../vendor/preact.js";
import * as law from "./law.js";
import { live, useLive } from "./live.js";
import { Empty } from "./parts.js";

const BUSY = "Other programs use this processor now, so times are longer than the engine needs.";

/** True if the last steps waited for cores for a third of their time. */
function isBusy() {
  const steps = live.steps.slice(-50);
  const all = (name) => law.sum(steps.map((step) => step[name]));
  return all("core_wait_s") > all("device_s") / 3;
}

/** What needs predictions: `body`, or what to do while they cannot be made. */
export function Judged({ body }) {
  const { facts, law: known } = useLive();
  if (known?.cost && facts.ceilings) return html`${isBusy() && html`<p class="note">${BUSY}</p>`}<${body} />`;
  const words = "Predictions need the speed of this machine: run quire probe, and start the server again.";
  return html`<${Empty}>${facts ? words : "Waiting for the engine …"}<//>`;
}

/** The words for `bound` of a step. */
export const BOUNDS = {
  memory: "reading memory",
  cache: "reading the processor's cache",
  int8: "int8 arithmetic",
  bf16: "bfloat16 arithmetic",
  f32: "float32 arithmetic",
  arithmetic: "arithmetic",
  overhead: "overhead: work that does not grow with the tokens",
  sampling: "choosing tokens",
  waiting: "waiting for a core that other programs use",
};

/** Bytes that a step moves, exactly. */
export const bytesOf = (step) =>
  step.weight_bytes + step.kv_read_bytes + step.kv_write_bytes + step.activation_bytes;

/** A step that is not computed yet, for rows [start, count]: its exact cost and its predicted time. */
export function planned(rows) {
  const found = law.values(live.law.law, rows, rows.length);
  return {
    rows: rows.map(([start, count]) => [0, start, count, 0, 1]),
    num_tokens: law.sum(rows.map(([, count]) => count)),
    predicted_s: law.seconds(live.law.law, found),
    bound: law.bound(live.law.law, found),
    ...law.cost(live.law.cost, found),
  };
}

/**
 * Sums of steps; `time` names the time that shares are of, "device_s" or "predicted_s". `arithmetic` and
 * `reading` are shares of what this machine can do; `bound` is what most of the time went to.
 */
export function total(steps, time) {
  if (!steps.length) return null;
  const all = {
    num_steps: steps.length,
    num_tokens: 0,
    seconds: 0,
    weight_bytes: 0,
    arithmetic: 0,
    reading: 0,
  };
  const bounds = {};
  for (const step of steps) {
    const rows = step.rows.map((row) => [row[1], row[2]]);
    const numLogits = law.sum(step.rows.map((row) => row[4]));
    const roof = law.roof(live.law.law, law.values(live.law.law, rows, numLogits));
    all.num_tokens += step.num_tokens;
    all.seconds += step[time];
    all.weight_bytes += step.weight_bytes;
    all.arithmetic += roof.arithmetic;
    all.reading += roof.memory;
    bounds[step.bound] = (bounds[step.bound] ?? 0) + step[time];
  }
  all.arithmetic /= all.seconds;
  all.reading /= all.seconds;
  all.bound = Object.entries(bounds).sort((a, b) => b[1] - a[1])[0][0];
  return all;
}
