// Chapter 6: drafted tokens are verified together, in the time of little more than one.

import { html, useState } from "../../vendor/preact.js";
import { answers, ask, recorded } from "../api.js";
import { duration, integer, ms, number } from "../format.js";
import * as law from "../law.js";
import { live, useLive } from "../live.js";
import { Action, Chapter, Choice, Empty, Figure, Formula, Legend, Slider, Stat } from "../parts.js";
import { Plot } from "../plot.js";
import { BOUNDS } from "../verdict.js";

const CONTEXT = 128; // positions before the drafted tokens
const LARGE = 16e9; // bytes of 8 billion parameters, and the operations of a token
const LONGEST = 12;
const LENGTHS = Array.from({ length: LONGEST + 1 }, (_, length) => length);

const user = (content) => ({ role: "user", content });
const STORY = "Tell me a story about a fox and a lantern.";
const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string" },
    animal: { enum: ["fox", "dog", "cat"] },
    age: { type: "integer" },
  },
  required: ["name", "animal", "age"],
};
const FIRST = "a story",
  AGAIN = "the same again";
/** What can be asked, and the fields of its request; some need the story. */
const TRIES = {
  [FIRST]: () => ({ messages: [user(STORY)] }),
  [AGAIN]: (story) => ({
    messages: [
      user(STORY),
      { role: "assistant", content: story },
      user("Tell me the story about a fox and a lantern again, word for word."),
    ],
  }),
  "with a prediction": (story) => ({
    messages: [user("Tell me a story about a wolf and a lantern.")],
    prediction: { type: "content", content: story },
  }),
  "JSON by a schema": () => ({
    messages: [user("Write this as JSON: Rita is a fox. She is 4 years old.")],
    response_format: { type: "json_schema", json_schema: { name: "animal", schema: SCHEMA } },
  }),
};
let story = "";

/** Ask the engine one of them. */
async function attempt(name, signal) {
  const fieldsOf = TRIES[name];
  if (fieldsOf.length && !story) await attempt(FIRST, signal);
  const body = {
    max_tokens: 200,
    temperature: 0,
    stream_options: { include_usage: true, include_drafting: true },
    ...fieldsOf(story),
  };
  const { text } = await ask("/v1/chat/completions", body, { signal });
  if (name === FIRST) story = text;
}

const COUNTED = ["drafted_tokens", "accepted_tokens"];
const WALL = ["idle_s", "device_s", "mask_s", "draft_s"]; // of a step, one after the other
const SOURCES = {
  text: "from its own text",
  store: "from an earlier answer",
  grammar: "by its grammar, which allows nothing else",
  model: "by the draft model",
};
const WHY_NONE = {
  "nothing proposed": "its last words were found nowhere before",
  slower: "verifying would have taken longer than it saves",
  off: "looking for drafts did not pay so far",
  "no room": "the step had no room for it",
};

const shown = (token) => token.replaceAll("\n", "↵") || "?"; // a word of somebody else is not told

/** An answer, token by token: what was drafted for each step and accepted, or refused for the model's own. */
const Tokens = ({ steps, picked, onPick }) =>
  html`<p class="tokens">${steps.map(({ tokens, drafted = [], num_accepted: right = 0 }, at) => {
    const cells = (kind, texts) => texts.map((text) => html`<${kind}>${shown(text)}<//>`);
    const refused = cells("del", drafted.slice(right));
    refused.splice(1, 0, cells("b", tokens.slice(right)));
    return html`<span class=${at === picked && "picked"} onClick=${() => onPick(at)}>${cells(
      "mark",
      tokens.slice(0, right),
    )}${refused}</span>`;
  })}</p>`;

/** Why a step drafted what it did. */
function Why({ step }) {
  const { drafted, num_accepted, source, match, why_none } = step;
  const { expected_tokens: expected, predicted_ms: predicted, plain_ms: plain } = step;
  if (!drafted)
    return html`<p>Nothing was drafted for this step${WHY_NONE[why_none] && `: ${WHY_NONE[why_none]}`}.</p>`;
  return html`<p>Drafted ${SOURCES[source]}${
    match > 0 && source !== "grammar" && `, where its last ${match} tokens stood before`
  }.</p>
    <div class="stats">
      <${Stat} label="drafted" value=${drafted.length} format=${integer} />
      <${Stat} label="accepted" value=${num_accepted ?? 0} format=${integer} />
      ${
        plain > 0 &&
        html`<${Stat} label="expected tokens" value=${expected} format=${number} kind="predicted" />
          <${Stat} label="this step" value=${predicted} format=${ms} kind="predicted" />
          <${Stat} label="without drafts" value=${plain} format=${ms} kind="predicted" />`
      }
    </div>`;
}

/** The answer that was drafted for last, here or in the chat. */
function Drafted() {
  const [chosen, setChosen] = useState(AGAIN),
    [at, setAt] = useState();
  const { drafting: steps = [], timings } = answers.findLast((one) => one.drafting?.length) ?? {};
  const sizes = steps.map(({ drafted = [] }) => drafted.length),
    picked = steps[at] ? at : sizes.indexOf(Math.max(...sizes));
  const ask = async (signal) => {
    setAt(null);
    await attempt(chosen, signal);
    setAt(undefined); // draws the end, whether or not the engine has news
  };
  return html`<${Figure} title="An answer, and what was drafted for it" kind="measured"
    note="Answers in the chat appear here, too. Only you see them: of others the page is told no words.">
    <div class="controls">
      <${Choice} label="ask for" value=${chosen} onChoose=${setChosen}
        options=${Object.keys(TRIES).map((name) => [name, name])} />
      <${Action} label="Ask" busy="Answering" work=${ask} disabled=${recorded}
        why="Start quire serve to ask an engine of your own." />
    </div>
    ${
      steps.length
        ? html`<${Tokens} steps=${steps} picked=${picked} onPick=${setAt} />
          <${Legend} items=${[
            ["shared-ink", "drafted and accepted"],
            ["bad-ink", "refused; after it, what the model said instead"],
            ["muted-ink", "struck out: lost with it"],
          ]} />
          <${Slider} label="step" value=${picked} min=${0} max=${steps.length - 1} onInput=${setAt}
            format=${(index) => `${index + 1} of ${steps.length}`} />
          <${Why} step=${steps[picked]} />
          <h3>The whole answer</h3>
          <${Worth} counts=${COUNTED.map((name) => timings?.[name])}
            fields=${COUNTED.map((name) => `timings.${name}`)}
            saved=${timings?.drafting_saved_ms} took=${timings?.decode_ms}>
            <${Stat} label="tokens a step" value=${timings?.completion_tokens / steps.length || null}
              format=${number} />
          <//>`
        : html`<${Empty}>Ask for something: what is drafted for it appears here.<//>`
    }
  <//>`;
}

/** What drafting was worth, against none. */
const Worth = ({ counts, saved, took, fields = [], children }) => html`<div class="stats">
  ${["drafted tokens", "accepted"].map(
    (label, at) =>
      html`<${Stat} label=${label} value=${counts[at]} format=${integer} field=${fields[at]} />`,
  )}
  ${children}
  <${Stat} label="times as fast" value=${1 + saved / took || null} format=${number} kind="predicted" />
</div>`;

/** What it was worth for everyone, in the steps that this page knows. */
function Everyone({ steps }) {
  const sum = (name) => law.sum(steps.map((step) => step[name] ?? 0));
  return html`<${Figure} title="All requests" kind="measured"
      note=${`In the last ${integer(steps.length)} steps.`}>
    <${Worth} counts=${[sum("num_drafted"), sum("num_accepted")]} saved=${sum("drafting_saved_s")}
      took=${law.sum(WALL.map(sum))} />
  <//>`;
}

/** The mean tokens of a verification of `k` drafted tokens, each of which is right with probability `a`. */
const expected = (a, k) => LENGTHS.slice(0, k + 1).reduce((total, power) => total + a ** power, 0);

/** A step of a model with 16 GB of weights, at the ceilings of this machine. */
function large({ memory_bytes_per_s: bandwidth, bf16_operations_per_s: peak }, tokens) {
  const reading = LARGE / bandwidth,
    computing = (LARGE * tokens) / peak; // two bytes and two operations a parameter
  const bound = reading > computing ? "memory" : "arithmetic";
  return { seconds: Math.max(reading, computing), bound };
}

/** What is predicted for each draft length: the time of a step, and the gain in speed. */
function predict({ a, batch, share, isLarge }) {
  const times = LENGTHS.map((k) => {
    if (isLarge) return large(live.facts.ceilings, batch * (k + 1));
    const known = live.law.law;
    const found = law.values(known, Array(batch).fill([CONTEXT, k + 1]), batch * (k + 1));
    return { seconds: law.seconds(known, found), bound: law.bound(known, found) };
  });
  const [{ seconds: plain }] = times;
  return times.map((time, k) => ({ ...time, gain: expected(a, k) / (time.seconds / plain + k * share) }));
}

function Gain({ settings, onLarge }) {
  const { k, batch, isLarge } = settings,
    found = predict(settings);
  const gains = found.map((one) => one.gain),
    best = gains.indexOf(Math.max(...gains)),
    chosen = found[k];
  const only = (at) => gains.map((gain, index) => (index === at ? gain : null));
  const slower = chosen.seconds / found[0].seconds;
  return html`<${Figure} title="How many times as fast, by draft length" kind="predicted"
    note="This model: by the law that the engine fits to its steps. The other: at the ceilings of this
      machine.">
    <${Choice} label="model" value=${isLarge} onChoose=${onLarge}
      options=${[
        [false, "this one"],
        [true, "one of 8 billion parameters"],
      ]} />
    <${Plot} data=${[LENGTHS, gains, gains.map(() => 1), only(k), only(best)]} series=${[
      { label: "speed-up", tone: "--decode", dashed: true },
      { tone: "--muted", width: 1 },
      { label: "your choice", tone: "--ink", dots: true, size: 6 },
      { label: "best", tone: "--good", dots: true },
    ]}
      x=${{ label: "drafted tokens", format: String, range: [-0.2, LONGEST + 0.2] }}
      y=${{ label: "times as fast", format: number }}
      describe=${`Times as fast, from 0 drafted tokens on: ${gains.map(number).join(", ")}`} />
    <div class="stats">
      <${Stat} label="a step without drafts" value=${found[0].seconds} format=${duration} kind="predicted" />
      <${Stat} label="a step that verifies" value=${chosen.seconds} format=${duration} kind="predicted" />
      <${Stat} label="times as fast" value=${chosen.gain} format=${number} kind="predicted" />
      <${Stat} label="best draft length" value=${best} format=${integer} kind="predicted" />
    </div>
    <p>${
      chosen.gain >= 1
        ? `A step that verifies takes ${number(slower)} times as long as one without drafts, and brings
            ${number(expected(settings.a, k))} tokens instead of one.`
        : `Here it is slower. A step that verifies takes ${number(slower)} times as long, most of it for
            ${BOUNDS[chosen.bound]}. It computes ${integer(batch * (k + 1))} tokens instead of ${batch}: it is
            a small prefill.`
    }</p>
  <//>`;
}

export default function Speculation() {
  const [accept, setAccept] = useState(70),
    [k, setK] = useState(4),
    [batch, setBatch] = useState(1),
    [draft, setDraft] = useState(5),
    [isLarge, setLarge] = useState(false);
  const a = accept / 100,
    { law: known, facts, steps } = useLive();
  return html`<${Chapter} title="Guess, then verify"
    lead="A decode step reads all weights for one token, while most arithmetic is idle. So Quire guesses the
      next few tokens, and one step verifies all of them, as if they were a small prompt. The answer stays the
      same, token for token."
    short="Speculation spends idle arithmetic to read the weights less often. It pays while decode waits for
      memory: with few sequences, and guesses that are mostly right. In a large batch nothing is idle, and so
      nothing is drafted.">
    <${Drafted} />
    <${Everyone} steps=${steps} />
    <h3>How long a draft pays</h3>
    <${Slider} label="a guess is right" value=${accept} min=${0} max=${95} onInput=${setAccept}
      format=${(n) => `${n} %`} />
    <${Slider} label="drafted tokens" value=${k} min=${1} max=${LONGEST} onInput=${setK} />
    <${Slider} label="sequences in the step" value=${batch} min=${1} max=${256} log=${true}
      onInput=${setBatch} />
    <${Slider} label="drafting a token takes" value=${draft} min=${0} max=${50} onInput=${setDraft}
      format=${(n) => `${n} % of a step`} />
    ${
      known && facts?.ceilings
        ? html`<${Gain} settings=${{ a, k, batch, share: draft / 100, isLarge }} onLarge=${setLarge} />`
        : html`<${Empty}>A prediction needs the speed of this machine: run quire probe, and start again.<//>`
    }
    <${Formula}>Tokens a step: 1 + α + … + αᵏ = (1 − αᵏ⁺¹) ÷ (1 − α). Times as fast: that ÷
      (Tₖ₊₁ ÷ T₁ + k·c), where Tₙ is the time of a step with n tokens a sequence, and c·T₁ that
      of drafting one. Before each step Quire looks for the best k, with the α of drafts like these.<//>
  <//>`;
}
