// What the engine does, as frames of /page/events tell it. Components call useLive() and read `live`.

import { useEffect, useState } from "../vendor/preact.js";
import { answers, chosen, json, jsonLines, recorded } from "./api.js";

const RING = 4096; // steps that are kept
const RETRY_MS = 1500;
const RATE_S = 1; // of the rate of tokens
const LOOK_MS = 5000; // how often the states of several models are asked for
const MODEL = "quire-model"; // kept by this tab
const NOTHING = { steps: [], facts: null, law: null, counts: null, cache: null };

/** The newest of everything; `steps` are the oldest first. `t` and times of steps: seconds of the server's
 * clock. */
export const live = {
  t: 0,
  ...NOTHING,
  // "live", "recorded", "lost" (with `error`), "locked": a key is needed; or the state of a model not loaded
  state: "connecting",
  error: null,
  models: [], // of the server, as /v1/models has them
  model: null, // the chosen one of several
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

/** The only model of a server has no state. */
const isLoaded = ({ state = "loaded" }) => state === "loaded";

/** Learn which models and adapters there are, and their states. Of the names of one the first is taken. */
async function look() {
  const { data } = await json("/v1/models");
  const isFirst = ({ root, parent }, at) => parent || data.findIndex((one) => one.root === root) === at;
  live.models = data.filter(isFirst);
  pick(sessionStorage[MODEL]);
}

/** Take the model of this name, else a loaded one, else the first. */
function pick(name) {
  const { models } = live;
  live.model = models[1] && (models.find(({ id }) => id === name) ?? models.find(isLoaded) ?? models[0]);
  chosen.name = live.model?.id;
  if (live.model) sessionStorage[MODEL] = chosen.name;
  changed();
}

let leave; // ends the frames of a model

/** Show another model. */
export function choose(name) {
  Object.assign(live, NOTHING, { state: "connecting" });
  answers.length = 0;
  pick(name);
  leave.abort();
}

setInterval(() => live.model && look().catch(() => {}), LOOK_MS);

/** Follow the engine, or that of the chosen model, for as long as the page is open. */
export async function follow() {
  for (;;) {
    leave = new AbortController();
    try {
      if (!recorded) await look();
      if (live.model && !isLoaded(live.model)) live.state = live.model.state;
      else {
        for await (const frame of jsonLines("/page/events", undefined, leave.signal)) {
          live.state = recorded ? "recorded" : "live";
          live.error = null;
          take(frame);
        }
        if (recorded) return;
        live.state = live.model ? "connecting" : "lost"; // one of several may be unloaded now
      }
    } catch (error) {
      if (error.name === "AbortError") continue;
      live.state = error.status === 401 ? "locked" : "lost";
      live.error = error;
      if (live.state === "locked") return changed();
    }
    changed();
    await new Promise((resolve) => {
      setTimeout(resolve, RETRY_MS);
      leave.signal.onabort = resolve;
    });
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
