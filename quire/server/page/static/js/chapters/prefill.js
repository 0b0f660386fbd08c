// Chapter 1: prefill computes, decode reads. The same request, predicted and measured.

import { html, useMemo, useState } from "../../vendor/preact.js";
import { tryPrompt } from "../api.js";
import { bytes, duration, integer, ms, percent, rate } from "../format.js";
import * as law from "../law.js";
import { asRow, live, rowsOf } from "../live.js";
import { Action, Chapter, Figure, Formula, Legend, Slider, Versus } from "../parts.js";
import { Plot } from "../plot.js";
import { BOUNDS, Judged, planned, total } from "../verdict.js";

const NUM_TOKENS = 32; // of the answer; the prompt's last step makes the first of them
const LARGE = 8e9; // parameters of a model that no cache holds
const PHASES = { prefill: "Prefill: the whole prompt", decode: "Decode: the answer" };

const each = (all) => all.seconds / all.num_tokens;
const sum = (steps, name) => law.sum(steps.map((step) => step[name]));
const tokens = (count) => (count > 1 ? `${integer(count)} tokens` : "1 token");

/** The steps that a prompt and its answer will need, by phase. */
function plan(numPrompt) {
  const size = live.facts.engine.max_num_batched_tokens,
    prefill = [];
  for (let at = 0; at < numPrompt; at += size) prefill.push(planned([[at, Math.min(size, numPrompt - at)]]));
  const decode = Array.from({ length: NUM_TOKENS - 1 }, (_, at) => planned([[numPrompt + at, 1]]));
  return { prefill, decode };
}

/** The steps of [step, row], by phase. */
function byPhase(pairs) {
  const found = { prefill: [], decode: [] };
  for (const [step, row] of pairs) found[row.isPrefill ? "prefill" : "decode"].push(step);
  return found;
}

/** One phase: what was measured, and beside each number what was predicted. */
function Phase({ name, steps, expected, took }) {
  const done = total(steps, "device_s"),
    hoped = total(done ? steps : expected, "predicted_s");
  const rows = [
    ["tokens", integer, (all) => all.num_tokens],
    ["steps", integer, (all) => all.num_steps],
    ["time", duration, (all) => all.seconds],
    ["time a token", duration, each],
    ["weights read, a token", bytes, (all) => all.weight_bytes / all.num_tokens],
    ["arithmetic in use", percent, (all) => all.arithmetic, "prefill"],
    ["bandwidth in use", percent, (all) => all.reading, "decode"],
  ].map(([label, format, of, bar]) => ({
    label,
    format,
    bar,
    measured: done && of(done),
    predicted: of(hoped),
  }));
  return html`<div class=${`card ${name}`}>
    <h3>${PHASES[name]}</h3>
    <${Versus} rows=${rows} />
    <p class="verdict">Most of the time: <b>${BOUNDS[(done ?? hoped).bound]}</b>.</p>
    ${
      took != null &&
      html`<p>With the work between steps: <b data-field=${`timings.${name}_ms`}
      data-value=${took}>${ms(took)}</b>.</p>`
    }
  </div>`;
}

/** Why: tokens that ride on readings of the weights. Their motion is in chapters.css. */
function Readings({ numPrompt, expected }) {
  const [paused, setPaused] = useState(false);
  const lane = (name, count, steps, more) => {
    const read = sum(steps, "weight_bytes");
    const squares = (length) => Array.from({ length }, () => html`<i></i>`);
    return html`<div class=${`lane ${name}`}>
      <b class=${`${name}-ink`}>${name}</b>${name === "decode" && html`<span class="made"></span>`}
      <div class="ride"><span>${squares(Math.min(count, 48))}</span></div>
      <div class="weights"><div></div>${squares(Math.min(live.facts.model.num_layers, 40) + 2)}</div>
      <p>${bytes(read)} read for ${tokens(count)}: <b>${bytes(read / count)} a token</b>${more}</p>
    </div>`;
  };
  const words = `Prefill reads the weights once for ${tokens(numPrompt)}, decode once for each token`;
  return html`<${Figure} title="What one reading of the weights serves">
    <div class=${`readings ${paused && "paused"}`} role="img" aria-label=${words}>
      ${lane("prefill", numPrompt, expected.prefill)}
      ${lane("decode", 1, expected.decode.slice(0, 1), ", and the same again for the next one")}
    </div>
    <button type="button" class="quiet" onClick=${() => setPaused(!paused)}>
      ${paused ? "Play" : "Pause"}</button>
  <//>`;
}

/** Time a token over the length of the prompt: predicted lines, and dots for requests that were measured. */
function Lengths({ longest }) {
  const plans = useMemo(() => {
    const lengths = Array.from({ length: 41 }, (_, at) => Math.round(longest ** (at / 40)));
    return lengths.map((length) => [length, plan(length)]);
  }, [live.law, longest]);
  const alone = {};
  for (const step of live.steps) {
    if (step.rows?.length === 1) (alone[step.rows[0][7]] ??= []).push([step, asRow(step.rows[0])]);
  }
  const done = Object.values(alone)
    .map(byPhase)
    .filter((one) => one.prefill.length && one.decode.length);
  const series = ["prefill", "decode"].flatMap((name) => {
    const tone = `--${name}`,
      hoped = plans.map(([x, one]) => [x, each(total(one[name], "predicted_s"))]);
    const took = done.map((one) => [
      sum(one.prefill, "num_tokens"),
      sum(one[name], "device_s") / sum(one[name], "num_tokens"),
    ]);
    return [
      { label: `${name} predicted`, tone, dashed: true, points: hoped },
      { label: `${name} measured`, tone, dots: true, points: took },
    ];
  });
  return html`<${Figure} title="The longer the prompt, the cheaper its tokens, until arithmetic is the limit">
    <${Plot} series=${series} x=${{ label: "tokens of the prompt", format: integer, log: true }}
      y=${{ label: "time a token", format: duration, log: true }}
      describe="Time a token over the length of the prompt: falling for prefill, level for decode" />
    <${Legend} items=${[
      ["prefill-ink", "prefill"],
      ["decode-ink", "decode"],
      ["muted-ink dashed", "predicted"],
      ["muted-ink", "dots: measured"],
    ]} />
  <//>`;
}

/** What limited it here, and what would limit a large model. */
function Here() {
  const { model, ceilings } = live.facts;
  const cached = live.law.law.stages.some((one) => one.name === "products" && one.place === "cache");
  const reading = duration((2 * LARGE) / ceilings.memory_bytes_per_s),
    computing = duration((2 * LARGE) / ceilings.bf16_operations_per_s);
  return html`<p>${
    cached &&
    `The weights of this model, ${bytes(model.weight_bytes)}, fit into the processor's cache and are read from
    there, several times faster than from memory: its decode is limited less than usual. `
  }A model of 8 billion parameters has 16 GB of weights. This machine reads
    ${" "}${rate(ceilings.memory_bytes_per_s, "B")} from memory, so each token of an answer would take at
    least ${reading}, and its arithmetic only ${computing}. A token of a long prompt would take little
    more than these ${computing}.</p>`;
}

function Body() {
  const { facts } = live;
  const [numPrompt, setNumPrompt] = useState(256),
    [sent, setSent] = useState({});
  const longest = facts.model.max_model_len - NUM_TOKENS,
    expected = plan(numPrompt);
  const choose = (length) => {
    setNumPrompt(length);
    setSent({});
  };
  const send = async (signal) => {
    const sizes = { numPrompt, numTokens: NUM_TOKENS, vocabSize: facts.model.vocab_size };
    const onTag = (tag) => setSent({ tag });
    setSent(await tryPrompt({ ...sizes, signal, onTag }));
  };
  const steps = byPhase(sent.tag ? rowsOf(sent.tag) : []);
  return html`<div class="controls">
      <${Slider} label="prompt" value=${numPrompt} min=${1} max=${longest} log=${true} onInput=${choose}
        format=${tokens} />
      <${Action} label="Send it" busy="Computing" work=${send} />
    </div>
    <div class="cards">
      ${Object.keys(PHASES).map(
        (name) => html`<${Phase} name=${name} steps=${steps[name]} expected=${expected[name]}
        took=${sent.timings?.[`${name}_ms`]} />`,
      )}
    </div>
    <${Readings} numPrompt=${numPrompt} expected=${expected} />
    <${Lengths} longest=${longest} />
    <${Here} />`;
}

export default function Prefill() {
  return html`<${Chapter} title="Two kinds of work"
    lead="To make one token, a model uses every weight it has, and each must first be read from memory. The
      tokens of a prompt are all known, so they are computed together and share one reading: prefill. The
      tokens of an answer come one after another, and each needs a reading of its own: decode."
    short="Prefill is limited by arithmetic, decode by reading. So a token of the answer takes longer than one
      of the prompt, though both need the same arithmetic, and whatever lets one reading serve more tokens
      makes decode cheaper.">
    <${Judged} body=${Body} />
    <${Formula}>time of a step ≥ max(operations ÷ peak operations per second, bytes ÷ bandwidth). A step
      over n tokens takes about 2·N·n operations and reads the N weights once, whatever n is. A predicted
      time is the sum of this over the parts of the model, at the shares of the peaks that this engine
      reached before.<//>
  <//>`;
}
