// Chapter 3: a step computes a row for every sequence that runs; sequences join and leave between steps.

import { html, useState } from "../../vendor/preact.js";
import { chunks, randomIds, recorded } from "../api.js";
import { bytes, duration, integer, percent, percentile } from "../format.js";
import * as law from "../law.js";
import { asRow, live, useLive } from "../live.js";
import { Action, Chapter, Choice, Empty, Figure, Formula, Slider, Stat } from "../parts.js";
import { ownerOf, useWidth } from "../parts.js";
import { Plot } from "../plot.js";
import { BOUNDS } from "../verdict.js";

const LENGTHS = [30, 150, 110, 70]; // of answers, one for each connection: a browser opens few to a server
const CONTEXT = 128; // positions before each token of the predicted curve
const SIZES = Array.from({ length: 32 }, (_, index) => index + 1);
const GUTTER = 22; // for the numbers of slots
const FIELDS = `index num_rows num_tokens num_waiting device_s predicted_s roof_share bound idle_s mask_s
  sampling_s core_wait_s seconds num_free_blocks num_cached_tokens num_preemptions`;

const formatOf = (name) =>
  ({ bound: String, roof_share: percent })[name] ?? (/_s$|^sec/.test(name) ? duration : integer);
const median = (values) => percentile(values, 0.5);

/** Place steps side by side, as wide as they took or all alike: [step, x, width, a long pause before]. */
function place(steps, byTime, width) {
  const longest = 6 * median(steps.map((step) => step.ended_s - step.began_s)); // pauses are cut to this
  let at = 0;
  const placed = steps.map((step, index) => {
    const pause = index ? step.began_s - steps[index - 1].ended_s : 0;
    const wide = byTime ? step.ended_s - step.began_s : 1;
    if (byTime) at += Math.max(0, Math.min(pause, longest));
    at += wide;
    const isNext = step.index === steps[index - 1]?.index + 1; // else steps between them are left out
    return [step, at - wide, wide, pause > longest && (isNext || pause > 1) && pause];
  });
  const scale = (width - GUTTER) / at;
  const seen = placed.map(([one, x, wide, pause]) => [one, GUTTER + scale * x, scale * wide, pause]);
  return { placed: seen, scale };
}

function Timeline({ steps, byTime, sent, chosen, onChoose }) {
  const [ref, width] = useWidth();
  const slots = [...new Set(steps.flatMap((step) => step.rows.map(([slot]) => slot)))].sort((a, b) => a - b);
  const high = Math.max(7, Math.min(24, 300 / slots.length)),
    tall = high * slots.length;
  const { placed, scale } = place(steps, byTime, width),
    unit = 10 ** Math.floor(Math.log10(width / 3 / scale)), // of time
    paths = {}, // by class: few elements for thousands of rows
    ends = {}; // of the sequences that were sent
  for (const [step, x, wide] of placed) {
    for (const row of step.rows.map(asRow)) {
      const lane = slots.indexOf(row.slot) * high;
      const half = (high - 3) / (row.isPrefill ? 2 : 4);
      const name = `owner-${ownerOf(row.tag)}${row.isPrefill ? " prompt" : ""}`;
      const box = `M${x} ${lane + high / 2 - half}h${Math.max(0.6, wide - (wide > 4))}v${2 * half}H${x}z`;
      paths[name] = (paths[name] ?? "") + box;
      if (step.index > sent?.after && sent.prompts.includes(row.numPrompt)) ends[row.tag] = [x + wide, lane];
    }
  }
  let labelled = -1;
  const cuts = placed.flatMap(([, x, , pause]) => {
    if (!pause) return [];
    const hasRoom = x > labelled + 60;
    if (hasRoom) labelled = x;
    return [[x, hasRoom && duration(pause)]];
  });
  const last = Math.max(...Object.values(ends).map(([x]) => x));
  const at = placed.findIndex(([step]) => step === chosen),
    now = chosen ?? steps.at(-1);
  const choose = (index) => onChoose(steps[Math.max(0, Math.min(steps.length - 1, index))]);
  const click = (event) => {
    const x = event.clientX - event.currentTarget.getBoundingClientRect().left;
    choose(placed.findLastIndex(([, begin]) => begin <= x));
  };
  const press = (event) => {
    const from = at < 0 ? steps.length : at;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: steps.length }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  };
  return html`<div ref=${ref} class="timeline" onClick=${click} onKeyDown=${press} tabindex="0" role="slider"
    aria-label="Step of the timeline" aria-valuemin=${steps[0].index} aria-valuemax=${steps.at(-1).index}
    aria-valuenow=${now.index}
    aria-valuetext=${`step ${now.index}: ${now.num_rows} rows, ${now.num_tokens} tokens`}>
    <svg viewBox=${`0 0 ${width} ${tall + 18}`} aria-hidden="true">
      <pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <path d="M0 0V4" /></pattern>
      ${high > 11 && slots.map((slot, lane) => html`<text y=${lane * high + high / 2 + 4}>${slot}</text>`)}
      ${cuts.map(
        ([x, words]) => html`<path class="cut" d=${`M${x} 0V${tall}`} />
          <text x=${x} y=${tall + 15} text-anchor="middle">${words}</text>`,
      )}
      ${byTime && html`<path class="unit" d=${`M${GUTTER} ${tall + 10}h${unit * scale}`} />
        <text x=${GUTTER + unit * scale + 5} y=${tall + 15}>${duration(unit)}</text>`}
      ${Object.entries(paths).map(
        ([name, path]) => html`<path class=${name} d=${path} />
          ${name.endsWith("t") && html`<path fill="url(#hatch)" d=${path} />`}`,
      )}
      ${Object.values(ends).map(
        ([x, top]) => html`<path class="wasted" d=${`M${x} ${top + high / 4}H${last}v${high / 2}H${x}z`} />`,
      )}
      ${at >= 0 && html`<path class="chosen" d=${`M${placed[at][1]} 0v${tall}h${placed[at][2]}V0z`} />`}
    </svg>
  </div>`;
}

/** A step in full: its fields as GET /steps has them, and its rows. */
function Opened({ step }) {
  return html`<${Figure} kind="measured"
    title=${`Step ${step.index}: most of its time went to ${BOUNDS[step.bound]}`}>
    <div class="facts">${FIELDS.split(/\s+/).map(
      (name) => html`<${Stat} label=${name} value=${step[name]} field=${`steps.${step.index}.${name}`}
        format=${formatOf(name)} kind=${name === "predicted_s" && "predicted"} />`,
    )}</div>
    <table class="rows">
      <tr><th>request</th><th>slot</th><th>from position</th><th>tokens</th><th>work</th></tr>
      ${step.rows.map(asRow).map(
        (row) => html`<tr><td><i class=${`owner-${ownerOf(row.tag)}`}>■</i> <code>${row.tag}</code></td>
          <td>${row.slot}</td><td>${row.start}</td><td>${row.count}</td>
          <td>${row.isPrefill ? "prefill" : "decode"}</td></tr>`,
      )}
    </table>
  <//>`;
}

/** The time of a token over the rows of a step: by the law, and the medians of steps that only decoded. */
function Costs({ known, steps }) {
  const features = SIZES.map((size) => law.values(known.law, Array(size).fill([CONTEXT, 1]), size));
  const curve = features.map((found, index) => law.seconds(known.law, found) / SIZES[index]);
  const dots = SIZES.map((size) => {
    const some = steps.filter((one) => one.num_rows === size && one.num_tokens === size + one.num_drafted);
    return some.length ? median(some.map((step) => step.device_s / (size + step.num_accepted))) : null;
  });
  const turn = SIZES.find((_, index) => law.bound(known.law, features[index]) === "arithmetic");
  const read = known.cost && law.cost(known.cost, features[0]).weight_bytes;
  return html`<${Figure} title="The more rows a step has, the less time it takes for each"
    note=${`Dots: measured, the median of the steps that only decoded, right drafts counted. Dashed:
      predicted by the law of this engine without drafts, with ${CONTEXT} positions before each token. Send 1,
      4 and 16 requests for more dots.`}>
    <${Plot} data=${[SIZES, curve, dots]} series=${[
      { label: "predicted", tone: "--muted", dashed: true },
      { label: "measured", tone: "--decode", dots: true },
    ]}
      x=${{ label: "rows of the step", format: String, range: [0, 32.5] }}
      y=${{ label: "time a token", format: duration, log: true }}
      describe=${`Predicted: ${duration(curve[0])} alone, ${duration(curve[31])} among 32`} />
    ${read && html`<p>Each step reads ${bytes(read)} of weights. A token that is alone pays for all of it,
      one among 16 for ${bytes(read / 16)}. ${turn && `From ${turn} rows on, by the prediction, most of the
      time goes to arithmetic, which each token needs for itself: then more rows save little.`}</p>`}
  <//>`;
}

export default function Batching() {
  const { steps: all, law: known, facts } = useLive();
  const [count, setCount] = useState(16),
    [byTime, setByTime] = useState(false),
    [span, setSpan] = useState(150),
    [held, setHeld] = useState(null), // the steps, while paused
    [sent, setSent] = useState(null),
    [chosen, setChosen] = useState(null);
  const viewed = all.filter((step) => step.rows);
  const steps = (held ?? viewed).slice(-span);
  const open = (step) => {
    setHeld(held ?? viewed);
    setChosen(step);
  };
  const send = (signal) => {
    const lengths = LENGTHS.slice(0, count);
    const prompts = Array.from({ length: count }, (_, index) => 24 + 9 * index);
    const empty = 1 - law.sum(lengths) / (lengths.length * Math.max(...lengths));
    setHeld(null);
    setSent({ after: live.steps.at(-1)?.index ?? -1, prompts, empty });
    return Promise.all(
      lengths.map(async (max_tokens, first) => {
        const own = prompts.filter((_, index) => index % lengths.length === first);
        const prompt = own.map((length) => randomIds(length, facts.model.vocab_size));
        const body = { prompt, max_tokens, ignore_eos: true, stream: true };
        for await (const _ of chunks("/v1/completions", body, signal));
      }),
    );
  };
  return html`<${Chapter} title="Nobody waits for the others"
    lead="A step computes one row for every sequence that runs: a piece of its prompt, or the next token of
      its answer. Between two steps, those that are done leave and those that wait join."
    short="A step reads the weights once, whoever takes part. So sixteen tokens in one step cost little more
      than one: that is why a batch is cheaper. And a slot that becomes free is filled at the next step, not
      when the longest answer is done.">
    ${
      recorded ||
      html`<div class="controls">
        <${Choice} label="requests" value=${count} onChoose=${setCount}
          options=${[1, 4, 16].map((n) => [n, n])} />
        <${Action} label="Send at once" busy="Computing" work=${send} disabled=${!facts} />
      </div>`
    }
    <${Figure} title="Who was in which step" kind="measured" note="A lane for each slot, a colour for each
      request. Tall and hatched: a piece of a prompt. Thin: a token of an answer. Dotted line: a pause. If
      steps are very short, some are left out. A browser opens six connections to a server, so sixteen
      requests go as four with four prompts each.">
      ${
        steps.length
          ? html`<div class="controls">
            <${Choice} label="width" value=${byTime} onChoose=${setByTime}
              options=${[[false, "steps"], [true, "time"]]} />
            <button type="button" onClick=${() => setHeld(held ? null : viewed)}>
              ${held ? "Resume" : "Pause"}</button>
            <${Slider} label="shown" value=${span} min=${20} max=${1000} log=${true} onInput=${setSpan}
              format=${(n) => `${n} steps`} />
          </div>
          <${Timeline} steps=${steps} byTime=${byTime} sent=${sent} chosen=${chosen} onChoose=${open} />
          ${!chosen && html`<p>Click a step to open it, or use the arrow keys.</p>`}`
          : html`<${Empty}>No steps yet. Send some requests, or say something in the chat.<//>`
      }
      ${sent?.empty > 0 && html`<${Stat} value=${sent.empty} format=${percent} kind="predicted"
        label="dashed, predicted: rows that a static batch keeps empty until the last answer" />`}
    <//>
    ${chosen && html`<${Opened} step=${chosen} />`}
    ${known && html`<${Costs} known=${known} steps=${all} />`}
    <${Formula}>A step of B tokens of answers takes max(weights ÷ bandwidth, B·2·N ÷ operations per second),
      and the reading of B caches. A token takes that ÷ B: less and less, until arithmetic takes longer than
      reading. A static batch of n answers of mₖ tokens has n·max(mₖ) rows, of which Σmₖ are tokens.<//>
  <//>`;
}
