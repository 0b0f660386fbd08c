// What the engine does, as frames of /page/events tell it. Components call useLive() and read `live`.

import { useEffect, useState } from "../vendor/preact.js";
import { jsonLines, recorded } from "./api.js";

const RING = 4096; // steps that are kept
const RETRY_MS = 1500;
const RATE_S = 1; // of the rate of tokens

/** The newest of everything; `steps` are the oldest first. `t` and times of steps: seconds of the server's
 * clock. */
export const live = {
  t: 0,
  steps: [],
  facts: null,
  law: null,
  counts: null,
  cache: null,
  state: "connecting", // "live", "recorded", "lost" (with `error`) or "locked": a key is needed
  error: null,
  onFrame: () => {}, // called for each frame: components see the last of those that come close together
};

/** A way to tell components that something is new, at most once a frame: [tell, useNews]. */
export function news() {
  const listeners = new Set();
  let asked = false;
  const tell = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      for (const listener of [...listeners]) listener();
    });
  };
  const useNews = () => {
    const [, again] = useState(0);
    useEffect(() => {
      const listener = () => again((count) => count + 1);
      listeners.add(listener);
      listener(); // something may have come before
      return () => listeners.delete(listener);
    }, []);
  };
  return [tell, useNews];
}

const [changed, useNews] = news();
let totals = []; // [t, tokens since the start] of the last RATE_S seconds

/** Render a component again whenever the engine has news. */
export function useLive() {
  useNews();
  return live;
}

function take(frame) {
  const { steps, ...rest } = frame;
  if (frame.facts) [live.steps, totals] = [[], []]; // the first frame of a connection
  Object.assign(live, rest);
  live.onFrame();
  if (frame.counts) totals.push([frame.t, frame.counts.num_tokens]);
  while (totals.length > 1 && totals[1][0] < live.t - RATE_S) totals.shift();
  if (steps?.length) {
    live.steps.push(...steps);
    if (live.steps.length > RING) live.steps.splice(0, live.steps.length - RING);
  }
  changed();
}

/** Follow the engine for as long as the page is open. */
export async function follow() {
  for (;;) {
    try {
      for await (const frame of jsonLines("/page/events")) {
        live.state = recorded ? "recorded" : "live";
        live.error = null;
        take(frame);
      }
      if (recorded) return;
      live.state = "lost";
    } catch (error) {
      live.state = error.status === 401 ? "locked" : "lost";
      live.error = error;
      if (live.state === "locked") return changed();
    }
    changed();
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Rows of the request with this tag, as [step, row]; a row is an object. */
export function rowsOf(tag) {
  const found = [];
  for (const step of live.steps) {
    for (const row of step.rows ?? []) if (row[7] === tag) found.push([step, asRow(row)]);
  }
  return found;
}

/** Give the numbers of a row their names. */
export const asRow = ([slot, start, count, numPrompt, numLogits, , , tag]) => ({
  slot,
  start,
  count,
  numPrompt,
  numLogits,
  tag,
  isPrefill: start + count <= numPrompt,
});

/** Tokens that the engine computed in a second, of the last one. */
export function tokenRate() {
  if (!live.counts?.num_running) return 0;
  const [[, before]] = totals; // counted a second ago, or before a pause
  return (live.counts.num_tokens - before) / RATE_S;
}
