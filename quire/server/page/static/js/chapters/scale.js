// Chapter 11: more load than one engine can take, on simulated replicas of it behind a router.

import { html, useState } from "../../vendor/preact.js";
import { Bars, Experiment } from "../experiment.js";
import { duration, integer, ms, number, percent } from "../format.js";
import { Chapter, Choice, Formula, Legend, Slider, Stat, useWidth } from "../parts.js";
import { Plot } from "../plot.js";

const ROUTER = "prefix"; // of the runs with other numbers of replicas
const ROUTERS = { "round-robin": "in turns", "two-choices": "two choices", prefix: "by prefix" };
const TONES = { "round-robin": "muted", "two-choices": "prefill", prefix: "decode" };
const GUTTER = 22; // for the numbers of replicas

/** A lane for each replica, as high as it has requests open; a moment is read with pointer or arrow keys. */
function Lanes({ replicas, end_s: end }) {
  const [ref, width] = useWidth(),
    [at, setAt] = useState(null); // a piece of the time
  const count = replicas[0].open.length,
    most = Math.max(1, ...replicas.flatMap((one) => one.open)),
    high = Math.max(12, Math.min(34, 320 / replicas.length)),
    tall = high * replicas.length;
  const x = (seconds) => GUTTER + ((width - GUTTER) * seconds) / end;
  const place = (piece) => x((end * piece) / count);
  const choose = (piece) => setAt(Math.max(0, Math.min(count - 1, piece)));
  const point = (event) => {
    const left = event.clientX - ref.current.getBoundingClientRect().left;
    choose(Math.floor(((left - GUTTER) / (width - GUTTER)) * count));
  };
  const press = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose((at ?? -1) + by);
  };
  const lane = (one, index) => {
    const foot = high * (index + 1) - 2;
    const top = one.open.map((open, piece) => {
      const y = foot - ((high - 4) * open) / most;
      return `L${place(piece)} ${y}H${place(piece + 1)}`;
    });
    return html`<text y=${foot - 1}>${index + 1}</text>
      <path class="rule" d=${`M${x(one.ready_s)} ${foot}H${x(one.gone_s)}`} />
      <path class="decode-ink" d=${`M${GUTTER} ${foot}${top.join("")}V${foot}z`} />
      <path d=${`M${x(one.started_s)} ${foot}H${x(one.ready_s)}`} stroke="var(--shared)" stroke-width="4" />
      ${one.has_died && html`<text class="bad-ink" x=${x(one.gone_s) + 3} y=${foot - 1}>✕ died</text>`}`;
  };
  const now = at != null && replicas.map((one) => one.open[at]);
  return html`<div ref=${ref}>
    <svg viewBox=${`0 0 ${width} ${tall + 20}`} role="img" tabindex="0" aria-label=${`Open requests of
      ${replicas.length} replicas over ${duration(end)}, at most ${integer(most)} of one`}
      onPointerMove=${point} onPointerDown=${point} onKeyDown=${press}>
      ${replicas.map(lane)}
      ${now && html`<path class="ring" d=${`M${place(at + 0.5)} 0V${tall}`} />`}
      <text x=${GUTTER} y=${tall + 15}>0 s</text>
      <text x=${width} y=${tall + 15} text-anchor="end">${duration(end)}</text>
    </svg>
    <p class="note" aria-live="polite">${
      now
        ? `At ${duration((end * (at + 0.5)) / count)}: ${now.map(number).join(", ")} requests open.`
        : `The highest: ${number(most)} requests. Point at a moment to read it, or use the arrow keys.`
    }</p>
  </div>`;
}

/** What came of the load, with each router and with other numbers of replicas. */
function Found({ setup, routers, sizes, done }) {
  const [wanted, choose] = useState(ROUTER),
    goal = setup.goal_ms;
  const one = routers.find(({ router }) => router === wanted) ?? routers[0];
  const stat = (label, field, format) => html`<${Stat} label=${label} value=${one[field]} format=${format}
    field=${one.at + field} kind="predicted" />`;
  const place = (each) => [each.replica_hours, each.violated_share, 1, each];
  const dot = (each, tone, note, size) => ({ tone, note, size, dots: true, points: [place(each)] });
  const fixed = sizes.filter((each) => !each.autoscaling);
  return html`<p>A lane for each replica shows how many requests it has open. The load rises to its peak in
      the middle, and falls again. Violet: a replica starts, which takes ${duration(setup.start_up_s)}.</p>
    <${Choice} label="router" value=${one.router} options=${Object.entries(ROUTERS)} onChoose=${choose} />
    <${Lanes} ...${one} />
    <div class="stats">
      ${stat("first token, median", "p50_ttft_ms", ms)}
      ${stat("slowest in a hundred", "p99_ttft_ms", ms)}
      ${stat("later than the goal", "violated_share", percent)}
      ${stat("replicas, on average", "replica_hours", number)}
    </div>
    <h3>Time to the first token</h3>
    <p>How long requests waited for their first token, the fastest on the left. What is above the line was
      later than the goal of ${ms(goal)}.</p>
    <${Plot} height=${250} x=${{ label: "% of requests", format: integer }}
      y=${{ label: "time to the first token", format: ms, log: true }}
      series=${[
        { tone: "--bad", width: 1, points: [100, 0].map((x) => [x, goal]), note: "goal", anchor: "start" },
        ...routers.map((each) => ({
          label: ROUTERS[each.router],
          tone: `--${TONES[each.router]}`,
          dashed: each.router === "round-robin", // it hides the other line otherwise
          points: each.ttft_ms,
        })),
      ]}
      describe="Percentiles of the time to the first token, a line for each router" />
    <${Legend} items=${Object.entries(ROUTERS).map(([name, words]) => [`${TONES[name]}-ink`, words])} />
    <h3>Prompts that were cached</h3>
    <p>Each question of a conversation comes with all that was said before. The replica that computed that
      has it cached; any other one computes it again.</p>
    <${Bars} all=${routers} name=${(each) => ROUTERS[each.router]} field="cached_share" whole=${1}
      format=${percent} />
    ${
      fixed.length > 0 &&
      html`<h3>What it costs to be in time</h3>
      <p>Each dot is a run of this load: to the right more replicas were paid for, further down fewer requests
        were late. The line is routing by prefix with fixed numbers of replicas.</p>
      <${Plot} height=${250} x=${{ label: "replica-hours an hour", format: number }}
        y=${{ label: "later than the goal", format: percent }}
        series=${[
          { tone: "--decode", width: 1, points: fixed.map(place) },
          ...fixed.map((each) => dot(each, "--decode", each.num_replicas)),
          ...routers
            .filter((each) => each.router !== ROUTER)
            .map((each) => dot(each, `--${TONES[each.router]}`)),
          ...sizes.filter((each) => each.autoscaling).map((each) => dot(each, "--shared", "scaled", 6)),
        ]}
        read=${([, , , each]) => `${ROUTERS[each.router ?? ROUTER]}, ${
          each.autoscaling ? `1 to ${each.num_replicas} replicas as needed` : `${each.num_replicas} replicas`
        }: ${number(each.replica_hours)} replica-hours an hour, ${percent(each.violated_share)} late,
        ${percent(each.cached_share)} cached.`}
        describe="Late requests fall as more replicas are paid for" />`
    }
    <p class="note">${`${integer(setup.num_requests)} requests, up to ${number(setup.peak_requests_per_s)} a
      second, on ${setup.autoscaling ? "up to " : ""}${setup.replicas} replicas; one completes
      ${number(setup.one_requests_per_s)} a second without a cache. Prompts have
      ${setup.prompt_tokens.join(" to ")} tokens, answers ${setup.output_tokens}. The law is ${setup.law}.
      ${done?.[0].is_complete === false ? "The time ended early." : ""}`}</p>`;
}

export default function Scale() {
  const [replicas, setReplicas] = useState(4),
    [load, setLoad] = useState(8),
    [autoscaling, setAutoscaling] = useState(false),
    [death, setDeath] = useState(false);
  return html`<${Chapter} title="Many engines"
    lead="One engine serves only so much, and beyond that requests wait longer and longer. More load needs
      replicas of it, and a router that chooses one for each request. Here they are simulated: router, scaler
      and schedulers are those of this server, and steps take as long as its law says."
    short="A replica that has the beginning of a prompt cached is done sooner, so routing by prefix needs
      fewer replicas. Too few leave a queue that only grows; too many stand idle. Scaling follows the load,
      but later by what a replica takes to start.">
    <${Experiment} name="fleet" title="One load, several replicas" kind="predicted" label="Simulate it"
      asked=${{ replicas, load, autoscaling, death }}
      empty="Simulate conversations on these replicas, with three routers: it takes some seconds."
      controls=${html`
        <${Slider} label="replicas" value=${replicas} min=${1} max=${16} onInput=${setReplicas} />
        <${Slider} label="peak load" value=${load} min=${1} max=${32} log=${true} onInput=${setLoad}
          format=${(n) => `${n} × one`} />
        <${Choice} label="autoscaling" value=${autoscaling} onChoose=${setAutoscaling}
          options=${[[false, "off"], [true, "on"]]} />
        <${Choice} label="at the peak" value=${death} onChoose=${setDeath}
          options=${[[false, "nothing happens"], [true, "one dies"]]} />`}>
      ${({ setup, router, size, done }) =>
        router && html`<${Found} setup=${setup[0]} routers=${router} sizes=${size ?? []} done=${done} />`}
    <//>
    <${Formula}>The router in turns takes the next replica, the second the one with fewer open requests of two
      drawn at random, the third the one with the lowest predicted time to the first token: its queue, and
      what it has not cached of the prompt. Arrivals are a Poisson process. Load 1 is the rate that one full
      replica completes with nothing cached. Scaling asks how few replicas keep the goal for 99 % of the
      requests; its times are shortened as if the load took half an hour and a start one minute.<//>
  <//>`;
}
