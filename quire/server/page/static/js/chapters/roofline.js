// Chapter 10: the roofline. A dot for each step, from its exact cost and its measured time.

import { html, useMemo } from "../../vendor/preact.js";
import { chunks, randomIds, recorded } from "../api.js";
import { bytes, duration, integer, number, percent, percentile, rate } from "../format.js";
import { live } from "../live.js";
import { Action, Chapter, Figure, Formula, Kind, Legend } from "../parts.js";
import { Plot } from "../plot.js";
import { BOUNDS, Judged, bytesOf, planned } from "../verdict.js";

const SHOWN = 300, // steps
  NEWEST = 50, // of them, drawn in full
  CONTEXT = 64; // positions before the tokens that are predicted, and tokens that are sent and answered
const BATCHES = [1, 4, 16];
const SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
const X = [0.5, 400]; // operations a byte

const place = (step, seconds) => [step.flops / bytesOf(step), step.flops / seconds];
const decoding = (batch) => planned(Array(batch).fill([CONTEXT, 1]));

/** The lines that no step can be above; those of memory and of the model's arithmetic are bold. */
function roofs(ceilings, kind) {
  const top = Math.max(...Object.values(ceilings));
  return Object.entries(ceilings).map(([name, value]) => {
    const [note, unit] = name.split("_"),
      slope = unit === "bytes";
    const ends = slope ? [X[0], top / value] : [value / ceilings.L1_bytes_per_s, X[1]];
    return {
      tone: slope ? "--decode" : "--prefill",
      width: note === "memory" || note === kind ? 3 : 1,
      points: ends.map((x) => [x, slope ? x * value : value]),
      note,
      anchor: slope && note !== "L1" ? "start" : "end",
    };
  });
}

/** One step in words. */
function tell(step) {
  const field = (name, format) => html`<b data-field=${`steps.${step.index}.${name}`}
    data-value=${step[name]}>${format(step[name])}</b>`;
  return html`Step ${step.index}, tokens: ${field("num_tokens", integer)}, moved: ${bytes(bytesOf(step))},
    time: ${field("device_s", duration)}, predicted: ${field("predicted_s", duration)}, of the roof:
    ${" "}${field("roof_share", percent)}, most of its time: ${BOUNDS[step.bound]}.`;
}

/** What a token costs in a batch: medians of steps that only decode, beside the prediction without drafts. */
function Batches({ steps }) {
  const head = (words) => html`<th scope="col">${words}</th>`;
  return html`<table class="batches"><thead>
      <tr><td></td>${["a step", "a token", "a token", "weights"].map(head)}</tr>
      <tr>${head("answers")}<td colspan="2"><${Kind} kind="measured" /></td>
        <td><${Kind} kind="predicted" /></td>${head("a token")}</tr></thead><tbody>
    ${SIZES.slice(0, 5).map((batch) => {
      const some = steps.filter((step) => step.num_rows === batch),
        median = (time) => duration(percentile(some.map(time), 0.5)),
        step = decoding(batch);
      return html`<tr><th scope="row">${batch}</th>
        <td><b>${median((step) => step.device_s)}</b></td>
        <td><b>${median((step) => step.device_s / (batch + step.num_accepted))}</b></td>
        <td class="predicted">${duration(step.predicted_s / batch)}</td>
        <td>${bytes(step.weight_bytes / batch)}</td></tr>`;
    })}</tbody></table>`;
}

function Body() {
  const { ceilings, ceilings_age_s: age, model } = live.facts;
  const [lines, turn] = useMemo(() => {
    const prompts = Array.from({ length: 512 }, (_, at) => planned([[0, at + 1]]));
    const line = (steps) => steps.map((step) => place(step, step.predicted_s));
    const batches = BATCHES.map((batch) => ({
      tone: "--decode",
      dots: true,
      hollow: true,
      size: 6,
      points: line([decoding(batch)]),
      note: batch,
      anchor: "middle",
    }));
    const found = [
      { tone: "--decode", dashed: true, points: line(SIZES.slice(0, 7).map(decoding)) },
      { tone: "--prefill", dashed: true, points: line(SIZES.map((count) => prompts[count - 1])) },
    ];
    return [[...found, ...batches], prompts.findIndex((step) => step.bound === "arithmetic") + 1];
  }, [live.law]);
  const shown = live.steps.slice(-SHOWN).filter((step) => step.rows && step.device_s > 0);
  const decodes = (step) => step.num_tokens === step.num_rows + step.num_drafted;
  const dots = (tone, chosen) => ({
    tone,
    dots: true,
    points: shown.flatMap((step, at) =>
      chosen(step) ? [[...place(step, step.device_s), at < shown.length - NEWEST ? 0.25 : 1, step]] : [],
    ),
  });
  const kind = live.law.law.stages.find((one) => one.name === "products")?.kind ?? "f32";
  const list = Object.entries(ceilings).map(
    ([name, value]) => html`${name.split("_")[0]} <span data-field=${`ceilings.${name}`} data-value=${value}>
      ${rate(value, name.includes("bytes") ? "B" : "op")}</span>, `,
  );
  const send = (count, numPrompt, numTokens) => async (signal) => {
    const prompt = Array.from({ length: count }, () => randomIds(numPrompt, model.vocab_size));
    const body = { prompt, max_tokens: numTokens, ignore_eos: true, stream: true };
    for await (const _ of chunks("/v1/completions", body, signal));
  };
  const newest = shown.at(-1);
  const controls = html`<div class="controls">
    <${Action} label="Send a prompt" work=${send(1, CONTEXT * 6, 1)} />
    ${BATCHES.map(
      (count) => html`<${Action} label=${count > 1 ? `${count} answers at once` : "1 answer"}
        work=${send(count, CONTEXT, CONTEXT)} />`,
    )}</div>`;
  return html`${recorded || controls}
    <${Figure} title="Steps under the ceilings of this machine"
      note=${html`Ceilings: ${list}measured ${integer(age / 60)} minutes ago.`}>
      ${
        shown.some((step) => step.roof_share > 1) &&
        html`<p class="problem">A step was faster than these ceilings, so the machine was busy when they
        were measured. Run quire probe again.</p>`
      }
      <${Plot} height=${400} x=${{ label: "operations a byte", format: number, log: true, range: X }}
        y=${{ label: "operations a second", format: (value) => rate(value, "op"), log: true }}
        series=${[
          ...roofs(ceilings, kind),
          ...lines,
          dots("--prefill", (step) => !decodes(step)),
          dots("--decode", decodes),
        ]}
        read=${([, , , step]) => tell(step)} rest=${newest && tell(newest)}
        describe="Operations a second over operations a byte: ceilings of the machine, and dots for steps" />
      <${Legend} items=${[
        ["prefill-ink", "with prefill"],
        ["decode-ink", "decode"],
        ["muted-ink dashed", "predicted, for up to 512 tokens of a prompt and 64 answers"],
      ]} />
    <//>
    <${Figure} title="Why a batch is cheaper"><${Batches} steps=${shown.filter(decodes)} />
      <p>One reading of the weights serves every answer in a step. From memory that pays up to
        ${" "}${number(ceilings[`${kind}_operations_per_s`] / ceilings.memory_bytes_per_s)} operations a byte,
        where the bold lines meet.${
          turn > 0 &&
          ` For this model, arithmetic is predicted to limit steps of
        ${turn} or more tokens.`
        } What each answer needs for itself is not shared: its keys and values, and
        the choice of its token.</p>
    <//>`;
}

export default function Roofline() {
  return html`<${Chapter} title="Under the roof"
    lead="Each step of the engine does some arithmetic and moves some bytes. A machine can do only so much of
      either a second, and the two limits make a roof: bandwidth, rising from the left, and arithmetic,
      level on the right. Every dot is a step that this engine made."
    short="A step with few operations for each byte stays under the slope: reading is the limit. Each further
      answer in it adds operations but no reading of weights, so its dot moves right and up, until it
      reaches the level roof. That is why a batch is cheaper.">
    <${Judged} body=${Body} />
    <${Formula}>highest rate = min(peak operations per second, bandwidth × operations per byte). Operations
      and bytes are exact: sums of what each op of the model states. Of the roof = time at the ceilings ÷
      time it took. Weights that fit a cache are read at its speed, so dots may lie above memory's
      slope.<//>
  <//>`;
}
