// Chapter 5: attention in partitions: of real rows, against stored scores, and how partitions are merged.

import { html, useState } from "../../vendor/preact.js";
import { tryPrompt } from "../api.js";
import { bytes, integer, number } from "../format.js";
import { sum } from "../law.js";
import { asRow, live, useLive } from "../live.js";
import { Action, Chapter, Empty, Figure, Formula, Slider, Stat, useWidth } from "../parts.js";
import { Plot } from "../plot.js";

const PARTITION = 64, // positions: csrc/kernels/attention.h
  SEGMENT = 512, // positions that one thread sums, from partition to partition
  UNIT_ROWS = 64, // tokens times query heads of a tile
  SCORE_BYTES = 4;
const NUM_TOKENS = 16; // of an answer
const SCORES = [2.1, 0.3, 3, 1.2]; // of the example
const VALUES = [4, 1, 7, 2];

/** Bytes of the scores of all layers and heads, if they were stored. */
function scoreBytes(count, seen) {
  const { num_layers: layers, num_heads: heads } = live.facts.model;
  return layers * heads * count * seen * SCORE_BYTES;
}

/** The tiles of a row: its tokens from top to bottom, the positions they see from left to right. */
function Tiles({ row, tone }) {
  const [ref, width] = useWidth();
  const { num_heads: heads, num_kv_heads: shared } = live.facts.model;
  const { start, count } = row,
    seen = start + count,
    unit = Math.max(1, Math.floor((UNIT_ROWS * shared) / heads)),
    height = count === 1 ? 30 : Math.max(40, Math.min(280, (width * count) / seen));
  const x = (position) => (width * position) / seen,
    y = (token) => (height * token) / count;
  const tiles = [];
  for (let top = 0; top < count; top += unit) {
    const last = Math.min(count, top + unit);
    for (let at = 0; at < start + last; at += PARTITION) {
      const end = Math.min(start + last, at + PARTITION);
      tiles.push(html`<rect x=${x(at)} y=${y(top)} width=${x(end - at)} height=${y(last - top)}
        style=${{ animationDelay: `${at / 640}s` }} />`);
    }
  }
  const size = count > 1 ? SEGMENT : live.facts.block_size,
    lines = [];
  for (let at = size; at < seen; at += size)
    lines.push(html`<path class=${at % SEGMENT ? "rule" : "segment"} d=${`M${x(at)} 0V${height}`} />`);
  const words = `${tiles.length} tiles of at most ${PARTITION} positions, left to right, ${
    count > 1 ? `and ${unit} tokens, top to bottom` : `in blocks of ${size}`
  }.`;
  return html`<div ref=${ref}>
    <svg class=${`tiles ${tone}`} viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${words}>
      ${tiles}${count > 1 && html`<path d=${`M${x(start + 1)} 0L${width} ${height}V0Z`} />`}${lines}
    </svg><p class="note">${words}</p></div>`;
}

/** The newest row of a phase that had a step for itself, with the bytes it touched. */
function Computed({ tone, words }) {
  const alone = (step) => step.rows?.length === 1 && asRow(step.rows[0]).isPrefill === (tone === "prefill");
  const step = live.steps.findLast(alone);
  if (!step) return html`<${Empty}>${words}: send a prompt to see one.<//>`;
  const row = asRow(step.rows[0]),
    seen = row.start + row.count,
    title = `${words}: ${integer(row.count)} × ${integer(seen)} scores for each head`;
  return html`<${Figure} title=${title}>
    <${Tiles} row=${row} tone=${tone} />
    <div class="stats">
      <${Stat} label="keys and values read" value=${step.kv_read_bytes} format=${bytes} />
      <${Stat} label="scores, which are not stored" value=${scoreBytes(row.count, seen)} format=${bytes} />
    </div>
  <//>`;
}

/** Bytes over the length of a prompt: what is read, and what stored scores would be. */
function Lengths({ length }) {
  const xs = Array.from({ length: 23 }, (_, at) => PARTITION * 2 ** (at / 2));
  const line = (note, tone, of) => [
    { tone, note, points: xs.map((n) => [n, of(n)]) },
    { tone, dots: true, points: [[length, of(length)]] },
  ];
  const read = (n) => n * live.facts.model.kv_bytes_per_token,
    scores = (n) => scoreBytes(n, n);
  const words = `${integer(length)} tokens: ${bytes(read(length))} of keys and values; scores would be
    ${bytes(scores(length))}, ${number(scores(length) / read(length))} times as much.`;
  return html`<${Figure} title="Bytes of a prompt, by its length">
    <${Plot} series=${[...line("keys, values: n", "--decode", read), ...line("scores: n²", "--bad", scores)]}
      x=${{ label: "tokens", format: integer, log: true }} y=${{ label: "", format: bytes, log: true }}
      read=${() => words} rest=${words} describe=${words} />
  <//>`;
}

/** What is kept of a partition: the highest score, and the sums of weights and of weighted values. */
function sums(scores, values) {
  const highest = Math.max(...scores),
    weights = scores.map((score) => Math.exp(score - highest));
  return { highest, weights: sum(weights), weighted: sum(weights.map((weight, at) => weight * values[at])) };
}

/** What is kept of two partitions together. */
function merge(a, b) {
  const highest = Math.max(a.highest, b.highest);
  const add = (name) => a[name] * Math.exp(a.highest - highest) + b[name] * Math.exp(b.highest - highest);
  return { highest, weights: add("weights"), weighted: add("weighted") };
}

function Merge() {
  const [third, setThird] = useState(30);
  const scores = SCORES.with(2, third / 10);
  const [first, second] = [0, 2].map((at) => sums(scores.slice(at, at + 2), VALUES.slice(at, at + 2)));
  const gap = -Math.abs(first.highest - second.highest),
    found = [first, second, merge(first, second), sums(scores, VALUES)];
  const row = ([label, of]) => html`<tr><th scope="row">${label}</th>
    ${found.map((one) => html`<td>${of(one).toFixed(3)}</td>`)}</tr>`;
  return html`<${Figure} title="Two partitions, merged, give the same as one">
    <p>Four positions with the scores ${scores.join(", ")} and the values ${VALUES.join(", ")}:</p>
    <${Slider} label="third score" value=${third} min=${0} max=${60} onInput=${setThird}
      format=${(score) => number(score / 10)} />
    <table class="sums"><thead><tr><td></td>
      ${["1, 2", "3, 4", "merged", "at once"].map((words) => html`<th scope="col">${words}</th>`)}
    </tr></thead><tbody>${[
      ["highest", (one) => one.highest],
      ["weights", (one) => one.weights],
      ["weights × values", (one) => one.weighted],
      ["result", (one) => one.weighted / one.weights],
    ].map(row)}</tbody></table>
    <ol>
      <li>In a partition, find the highest score. A position's weight is e to the power of its score minus
        that one.</li>
      <li>Keep three numbers: the highest score, the sum of weights, and the sum of weights × values.</li>
      <li>To merge, shrink the sums of the partition whose highest score is lower, here by
        ${" "}e<sup>${gap.toFixed(1)}</sup> = ${Math.exp(gap).toFixed(3)}, and add. At the end, divide.</li>
    </ol>
  <//>`;
}

export default function Attention() {
  const { facts } = useLive();
  const [length, setLength] = useState(384);
  if (!facts) return html`<${Empty}>Waiting for the engine …<//>`;
  const { max_model_len: longest, vocab_size: vocabSize } = facts.model;
  const sizes = { numPrompt: Math.min(length, longest - NUM_TOKENS), numTokens: NUM_TOKENS, vocabSize };
  return html`<${Chapter} title="A little at a time"
    lead="Attention compares the query of a token with the key of every position before it, makes weights of
      these scores, and mixes the values by them. Stored, the scores of a long prompt would fill the memory.
      So the cache is read in partitions of 64 positions, and of each only three numbers are kept."
    short="Keys and values are read partition by partition, and scores are forgotten as soon as they are used.
      So the bytes grow with the length of the context, not with its square. The arithmetic still does.">
    <div class="controls"><${Slider} label="prompt" value=${length} min=${PARTITION} max=${131072} log=${true}
      onInput=${setLength} format=${(count) => `${integer(count)} tokens`} />
      <${Action} label=${`Send ${integer(sizes.numPrompt)} tokens`}
        work=${(signal) => tryPrompt({ ...sizes, signal })} /></div>
    <${Computed} tone="prefill" words="A piece of a prompt" />
    <${Computed} tone="decode" words="A token of an answer" />
    <${Lengths} length=${length} />
    <${Merge} />
    <${Formula}>result = Σ e<sup>sᵢ − m</sup> vᵢ ÷ Σ e<sup>sᵢ − m</sup>, the same for every m. Bytes read:
      each visible position once for a row, in all layers; further tiles find it in the processor's cache.
      Scores: 4 bytes × layers × heads × tokens × positions. Partitions are merged in one order, from position
      0 on, so no batch changes a bit of the result.<//>
  <//>`;
}
