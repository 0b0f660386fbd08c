// Chapter 9: the latencies of this page's own requests, how many kept a goal, and where their time went.

import { html, useEffect, useState } from "../../vendor/preact.js";
import { answers, tryPrompt } from "../api.js";
import { duration, integer, number, percentile } from "../format.js";
import { useLive } from "../live.js";
import { Action, Chapter, Empty, Figure, Formula, Slider, Stat, useWidth } from "../parts.js";
import { Receipt } from "../receipt.js";

const SHOWN = 12; // answers, and requests of a load
const CONNECTIONS = 4; // of a load: a browser opens few to a server
const HIGH = 250; // of the picture
const SIZES = [1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100]; // marked on its scale

/** The latencies of an answer as this page saw them, in seconds: as quire bench defines them. */
function latencies({ sent_s, token_s }) {
  const gaps = token_s.slice(1).map((at, index) => at - token_s[index]);
  const tpot = gaps.length ? [(token_s.at(-1) - token_s[0]) / gaps.length] : [];
  return { ttft: token_s[0] - sent_s, gaps, tpot };
}

const isDone = (answer) => answer.timings?.total_ms && answer.token_s.length;

/** Draw again when an answer has ended: the engine may have no news then. */
function useAnswers() {
  const [, setNewest] = useState(null);
  useEffect(() => {
    const timer = setInterval(() => setNewest(answers.findLast(isDone)), 200);
    return () => clearInterval(timer);
  }, []);
  return answers.filter(isDone).slice(-SHOWN);
}

/** A line that is dragged, or moved with the arrow keys. */
function Goal({ name, tone, value, scale, width, onChange }) {
  const y = scale.y(value);
  const drag = (event) => {
    if (event.type === "pointerdown") event.currentTarget.setPointerCapture(event.pointerId);
    else if (!event.buttons) return;
    const top = event.currentTarget.ownerSVGElement.getBoundingClientRect().top;
    onChange(scale.back(event.clientY - top));
  };
  const press = (event) => {
    const by = { ArrowUp: -2, ArrowRight: -2, ArrowDown: 2, ArrowLeft: 2 }[event.key];
    if (!by) return;
    event.preventDefault();
    onChange(scale.back(y + by));
  };
  return html`<g class=${`goal ${tone}`} tabindex="0" role="slider" aria-orientation="vertical"
    aria-label=${`${name} goal`} aria-valuenow=${1e3 * value} aria-valuetext=${duration(value)}
    onPointerDown=${drag} onPointerMove=${drag} onKeyDown=${press}>
    <rect y=${y - 12} width=${width} height="24" opacity="0" />
    <rect y=${y - 1.5} width=${width} height="3" />
    <text y=${y + (name === "ITL" ? 15 : -6)}>↕ ${name} goal ${duration(value)}</text></g>`;
}

/** Answers with the seconds to subtract from their times, so that pauses are short; and the span of all. */
function closer(shown) {
  let until = shown[0].sent_s,
    left = until;
  const placed = shown.map((one) => {
    const last = one.token_s.at(-1);
    left += Math.max(0, one.sent_s - until - (last - one.sent_s) / 5);
    until = Math.max(until, last);
    return [one, left];
  });
  return { placed, span: until - left };
}

function Latencies({ shown, found, goals, onGoals }) {
  const [ref, width] = useWidth();
  const ttft = found.map((one) => one.ttft),
    gaps = found.flatMap((one) => one.gaps),
    { placed, span } = closer(shown);
  const low = Math.max(1e-4, Math.min(...ttft, ...gaps)) / 3;
  const ratio = Math.log((3 * Math.max(...ttft, ...gaps)) / low);
  const within = (share) => Math.max(0, Math.min(1, share));
  const scale = {
    y: (value) => HIGH * (1 - within(Math.log(value / low) / ratio)),
    back: (y) => low * Math.exp(ratio * (1 - within(y / HIGH))),
  };
  const square = (at, value, side) => {
    const x = (width * at) / span - side / 2;
    return `M${x} ${scale.y(value) - side / 2}h${side}v${side}H${x}z`;
  };
  const squares = placed.map(([one, left]) => square(one.token_s[0] - left, one.token_s[0] - one.sent_s, 9));
  const dots = placed.flatMap(([{ token_s }, left]) =>
    token_s.slice(1).map((at, index) => square(at - left, at - token_s[index], 3)),
  );
  const lines = (values) =>
    values.length &&
    [0.5, 0.99].map(
      (share) => html`<path d=${`M0 ${scale.y(percentile(values, share))}H${width}`} stroke="currentColor"
        stroke-dasharray=${share > 0.5 && "2 4"} />`,
    );
  const goal = (name, tone) => html`<${Goal} name=${name.toUpperCase()} tone=${tone} value=${goals[name]}
    scale=${scale} width=${width} onChange=${(value) => onGoals({ ...goals, [name]: value })} />`;
  return html`<div ref=${ref}><svg class="latencies" viewBox=${`0 0 ${width} ${HIGH + 20}`} role="group"
    aria-label="TTFT and ITL of each answer over time, and a goal for each">
    ${SIZES.filter((size) => size > low && Math.log(size / low) < ratio).map(
      (size) => html`<path class="rule" d=${`M0 ${scale.y(size)}H${width}`} />
        <text x=${width} y=${scale.y(size) - 4} text-anchor="end">${duration(size)}</text>`,
    )}
    <g class="decode-ink"><path d=${dots.join("")} />${lines(gaps)}</g>
    <g class="prefill-ink"><path d=${squares.join("")} />${lines(ttft)}</g>
    ${goal("ttft", "prefill-ink")}${goal("itl", "decode-ink")}
    <text y=${HIGH + 17}>0 s</text>
    <text x=${width} y=${HIGH + 17} text-anchor="end">${duration(span)}</text>
  </svg></div>`;
}

/** Send requests at random moments, so many a second on average. */
function load(perSecond, facts, signal) {
  let at = performance.now();
  const moments = Array.from({ length: SHOWN }, () => {
    at -= (1e3 / perSecond) * Math.log(1 - Math.random());
    return at;
  });
  const send = async () => {
    while (moments.length) {
      await new Promise((resolve) => setTimeout(resolve, moments.shift() - performance.now()));
      signal.throwIfAborted();
      const numPrompt = 16 + Math.floor(400 * Math.random()),
        numTokens = 16 + Math.floor(48 * Math.random());
      const sizes = { numPrompt, numTokens, vocabSize: facts.model.vocab_size };
      await tryPrompt({ ...sizes, signal });
    }
  };
  return Promise.all(Array.from({ length: CONNECTIONS }, send));
}

function Body({ shown }) {
  const [goals, setGoals] = useState({ ttft: 0.2, itl: 0.05 }),
    [picked, setPicked] = useState(null); // an answer, else the newest
  const found = shown.map(latencies);
  const kept = found.filter(
    ({ ttft, gaps }) => ttft <= goals.ttft && !(percentile(gaps, 0.99) > goals.itl),
  ).length;
  const end = Math.max(...shown.map((one) => one.token_s.at(-1))),
    answer = shown.includes(picked) ? picked : shown.at(-1);
  const measure = (name, of, words) => {
    const values = found.flatMap(of);
    const times = [0.5, 0.99].map((share) => (values.length ? duration(percentile(values, share)) : "–"));
    return html`<li><b>${name}</b> ${words} <b>Median ${times[0]}, p99 ${times[1]}.</b></li>`;
  };
  return html`<${Figure} title="The newest answers on this page" kind="measured"
      note="Squares: the first token. Dots: the gap before each later one, at the lower edge if both came at
        once; pauses are cut short. Thin lines: medians; dotted: p99. Drag the goals, or use the arrow keys.">
      <${Latencies} shown=${shown} found=${found} goals=${goals} onGoals=${setGoals} />
      <div class="stats">
        <${Stat} label="answers within both goals" value=${kept} format=${(n) => `${n} of ${shown.length}`} />
        <${Stat} label="goodput, answers a second" value=${kept / (end - shown[0].sent_s)} format=${number} />
      </div>
      <ul class="terms">
        ${measure("TTFT,", (one) => one.ttft, "time to first token: from sending the request.")}
        ${measure("ITL,", (one) => one.gaps, "inter-token latency: the gap between two pieces of an answer.")}
        ${measure("TPOT,", (one) => one.tpot, "time per output token: the mean gap of an answer.")}
        <li><b>Goodput,</b> answers a second that keep both goals; of an answer's gaps, the p99 counts.</li>
      </ul>
    <//>
    <${Figure} title="Where the time of an answer went" kind="measured">
      ${
        shown.length > 1 &&
        html`<${Slider} label="answer" value=${shown.indexOf(answer) + 1} min=${1} max=${shown.length}
          onInput=${(n) => setPicked(shown[n - 1])} format=${(n) => `${n} of ${shown.length}`} />`
      }
      <${Receipt} timings=${answer.timings} />
    <//>`;
}

export default function Metrics() {
  const { facts } = useLive();
  const [perSecond, setPerSecond] = useState(20),
    shown = useAnswers();
  return html`<${Chapter} title="Fast for whom?"
    lead="A reader waits for the first token, and then for each next one. So a server is not simply
      fast or slow: it keeps both times within what its readers want, for all of them or only for some."
    short="The first token waits for a place and for the prompt; each later one waits for a step, and for what
      others have in it. More load lengthens both. What counts is goodput: not all answers a second, but those
      that came in time.">
    <div class="controls">
      <${Slider} label="arrivals a second" value=${perSecond} min=${1} max=${200} log=${true}
        onInput=${setPerSecond} format=${integer} />
      <${Action} label=${`Send ${SHOWN} requests`} busy="Sending" disabled=${!facts}
        work=${(signal) => load(perSecond, facts, signal)} />
    </div>
    ${
      shown.length
        ? html`<${Body} shown=${shown} />`
        : html`<${Empty}>No answers yet. Send some requests, or say something in the chat.<//>`
    }
    <${Formula}>queue + prefill + decode + preempted = total. Interference is the part of prefill and decode
      that belongs to other requests, by the predicted time of each step with and without them. Requests
      arrive at random, −ln(1 − u) ÷ rate apart, and at most ${CONNECTIONS} of this page are open at once.<//>
  <//>`;
}
