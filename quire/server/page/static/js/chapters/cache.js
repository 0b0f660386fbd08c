// Chapter 2: keys and values are kept. What they weigh, and what computing them again would take.

import { html, useState } from "../../vendor/preact.js";
import { DIFFERS, Experiment } from "../experiment.js";
import { bytes, integer, ms } from "../format.js";
import { useLive } from "../live.js";
import { Chapter, Empty, Figure, Formula, Slider, Stat } from "../parts.js";
import { Plot } from "../plot.js";

const tokens = (n) => `${integer(n)} tokens`;
const blocks = (n) => `${integer(n)} blocks`;

/** Bytes of the weights and of the cache, over the context of each of some sequences. */
function Sizes({ model, numSequences }) {
  const { weight_bytes: weights, max_model_len: longest } = model;
  const each = model.kv_bytes_per_token * numSequences;
  const crossing = Math.ceil(weights / each);
  const line = (size) => [0, crossing, longest].filter((x) => x <= longest).map((x) => [x, size(x)]);
  const words =
    crossing <= longest
      ? `From ${tokens(crossing)} each on, the cache is larger.`
      : "Even at the longest context the cache stays smaller.";
  return html`<${Plot} height=${250} describe=${words}
      series=${[
        { label: "weights", tone: "--prefill", note: "weights", points: line(() => weights) },
        { label: "cache", tone: "--decode", fill: true, note: "KV cache", points: line((x) => x * each) },
      ]}
      x=${{ label: "tokens of each sequence", format: integer }} y=${{ label: "", format: bytes }} />
    <p>The weights take ${bytes(weights)}, the cache ${bytes(model.kv_bytes_per_token)} for each token.
      ${" "}${words} ${model.windows.some(Boolean) && "Layers with a window stop growing there."}</p>`;
}

/** The time of each token with the cache and without it, and the sums. */
function Times({ token, done }) {
  const sum = (kind, tone) => html`<${Stat} label=${`${kind}: ${tokens(done[`${kind}_tokens`])} computed`}
    value=${done[`${kind}_ms`]} format=${ms} field=${`${done.at}${kind}_ms`} tone=${tone} />`;
  return html`<${Plot} data=${["index", "with_ms", "without_ms"].map((name) => token.map((one) => one[name]))}
      series=${[
        { label: "with", tone: "--decode", note: "with the cache" },
        { label: "without", tone: "--prefill", note: "without it" },
      ]}
      x=${{ label: "token of the answer", format: (i) => integer(i + 1) }} y=${{ label: "", format: ms }}
      describe="With the cache, tokens after the first take little time; without it, more and more" />
    ${
      done &&
      html`<div class="stats">${sum("with", "decode")}${sum("without", "prefill")}</div>
      <p>${
        done.tokens_equal
          ? `Both gave the same ${tokens(done.num_tokens)}: the cache changes the time, never the answer.`
          : DIFFERS
      } The first token takes equally long: there is nothing to remember yet.</p>`
    }`;
}

export default function Cache() {
  const { facts, counts } = useLive();
  const [numSequences, setNumSequences] = useState(4),
    [numPrompt, setNumPrompt] = useState(128),
    [numTokens, setNumTokens] = useState(64);
  const model = facts?.model;
  const used = counts && counts.num_blocks - counts.num_free_blocks;
  return html`<${Chapter} title="Remember, do not recompute"
    lead="To choose a token, attention looks back at the key and the value of every token before it. They
      never change, so the engine computes them once and keeps them: this is the KV cache."
    short="The cache makes the work of each further token almost independent of what came before it. Its
      price is memory, which grows with every token of every sequence.">
    <${Figure} title="What the memory holds">
      <${Slider} label="sequences" value=${numSequences} min=${1} log=${true} max=${facts?.num_slots ?? 64}
        onInput=${setNumSequences} format=${integer} />
      ${
        model
          ? html`<${Sizes} model=${model} numSequences=${numSequences} />
      <div class="stats">
        <${Stat} label="blocks free" value=${counts?.num_free_blocks} format=${integer}
          field="load.num_free_blocks" />
        ${
          model.windows.length > 1 // blocks of other layers, and so of other sizes
            ? html`<${Stat} label="in use now" tone="decode" value=${used} format=${blocks} />`
            : html`<${Stat} label="in use now" tone="decode" format=${bytes}
                value=${used * facts.block_size * model.kv_bytes_per_token} />`
        }
      </div>`
          : html`<${Empty}>Waiting for the server …<//>`
      }
    <//>
    <${Experiment} name="cache" title="One answer, with the cache and without it" label="Compute it both ways"
      asked=${{ prompt_tokens: numPrompt, num_tokens: numTokens }}
      empty="Without the cache, each token computes the whole prompt and answer again. Try it: it takes a
        second or two."
      controls=${html`<${Slider} label="prompt" value=${numPrompt} min=${16} max=${768} log=${true}
          onInput=${setNumPrompt} format=${tokens} />
        <${Slider} label="answer" value=${numTokens} min=${8} max=${64} onInput=${setNumTokens}
          format=${tokens} />`}>
      ${({ token, done }) => token && html`<${Times} token=${token} done=${done?.[0]} />`}
    <//>
    <${Formula}>bytes of a token = 2 (key and value) × layers × KV heads × size of a head × bytes of a number.
      For a prompt of n tokens and an answer of m, the cache computes n + m − 1 tokens; without it there are
      m·n + m(m − 1)/2.<//>
  <//>`;
}
