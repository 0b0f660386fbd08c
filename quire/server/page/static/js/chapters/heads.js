// Chapter 8: several query heads share one key and value head, so that a memory holds more sequences.

import { html, useState } from "../../vendor/preact.js";
import { Bars, DIFFERS, Experiment } from "../experiment.js";
import { bytes, integer, ms } from "../format.js";
import { useLive } from "../live.js";
import { Bar, Chapter, Choice, Empty, Figure, Formula, Slider, Stat } from "../parts.js";

const WIDTH = 640;
const named = (count) => `${integer(count)} KV head${count > 1 ? "s" : ""}`;

/** Query heads above, the key and value heads that they share below. */
function Heads({ numHeads, numKV }) {
  const [shown, setShown] = useState(null);
  const size = Math.min(34, (WIDTH / numHeads) * 0.72),
    each = numHeads / numKV;
  const at = (index, count) => ((index + 0.5) * WIDTH) / count;
  const group = (_, index) => {
    const x = at(index, numKV),
      show = () => setShown(index),
      hide = () => setShown(null);
    return html`<g tabindex="0" role="img" aria-label=${`KV head ${index + 1} serves ${each} query heads`}
        class=${shown == null || shown === index ? "" : "dim"}
        onMouseEnter=${show} onMouseLeave=${hide} onFocus=${show} onBlur=${hide}>
      ${Array.from({ length: each }, (_, i) => at(index * each + i, numHeads)).map(
        (top) => html`<path class="join" d=${`M${top} 28C${top} 54 ${x} 44 ${x} 70`} />
          <circle class="prefill-ink" cx=${top} cy="16" r=${size / 2.6} />`,
      )}
      <rect class="decode-ink" x=${x - size / 2} y="70" width=${size} height="26" rx="5" /></g>`;
  };
  return html`<p class="note">query heads</p>
    <svg viewBox=${`0 0 ${WIDTH} 100`}>${Array.from({ length: numKV }, group)}</svg>
    <p class="note">key and value heads, kept in the cache</p>`;
}

/** The pictures of a model: its heads, and the sequences that a memory holds. */
function Room({ facts }) {
  const [picked, setPicked] = useState(null),
    [asked, setMemory] = useState(null),
    [wanted, setContext] = useState(512);
  const { model, block_size: block } = facts;
  const { num_heads: most, num_kv_heads: own, kv_bytes_per_token: token, max_model_len: longest } = model;
  const counts = [...new Set([most, own, 1])];
  const chosen = picked ?? own,
    context = Math.min(wanted, longest),
    memory = asked ?? 32 * token * longest;
  const batch = (count) => Math.floor(memory / ((Math.ceil(context / block) * block * token * count) / own));
  return html`<${Figure} title="Who looks into which cache">
      <${Choice} label="key and value heads" value=${chosen} onChoose=${setPicked}
        options=${counts.map((count) => [count, count === own ? `${own}, as in this model` : count])} />
      <${Heads} numHeads=${most} numKV=${chosen} />
      <div class="stats"><${Stat} label="in the cache for each token" value=${(token * chosen) / own}
        format=${bytes} field=${chosen === own && "server_info.model.kv_bytes_per_token"} /></div>
    <//>
    <${Figure} title="Sequences that a memory holds" kind="predicted">
      <${Slider} label="memory" value=${memory} min=${token * longest} log=${true}
        max=${token * longest * 4096} onInput=${setMemory} format=${bytes} />
      <${Slider} label="context" value=${context} min=${16} max=${longest} log=${true} onInput=${setContext}
        format=${(n) => `${integer(n)} tokens`} />
      ${counts.map(
        (count) => html`<${Bar} label=${named(count)} tone="decode" kind="predicted" format=${() =>
          integer(batch(count))} share=${batch(count) / Math.max(batch(1), 1)} />`,
      )}
    <//>`;
}

function Found({ all }) {
  const [repeated] = all,
    name = (one) => named(one.num_kv_heads);
  return html`<${Bars} title="Keys and values read by a step" all=${all} name=${name} field="kv_read_bytes"
      format=${bytes} />
    <${Bars} title="Time of a step" all=${all} name=${name} field="step_ms" format=${ms} />
    <p>${
      repeated.tokens_equal
        ? `With ${name(repeated)} each of the demo's is repeated: the same answers, token for token.`
        : DIFFERS
    } With one, only the time counts: the demo was not trained so.</p>`;
}

export default function Grouped() {
  const { facts } = useLive();
  return html`<${Chapter} title="Heads that share"
    lead="Each layer looks back with several query heads. If a few of them share one key and value head, the
      cache holds less for each token: more sequences fit into the memory, and each step reads less."
    short="Fewer key and value heads mean fewer bytes a token, hence larger batches and shorter steps at long
      contexts. A model must be trained so; the engine cannot choose.">
    ${
      facts?.model.num_kv_heads
        ? html`<${Room} facts=${facts} />`
        : html`<${Empty}>No heads to show yet.<//>`
    }
    <${Experiment} name="heads" title="A step of eight long sequences" label="Measure it" asked=${{}}
      empty="Measure the demo with 8, 4 and 1 KV heads: it takes a few seconds.">
      ${({ heads, done }) => done && html`<${Found} all=${heads} />`}
    <//>
    <${Formula}>batch = ⌊ memory ÷ (⌈context ÷ block⌉ × block × bytes of a token) ⌋, where a block has
      ${" "}${facts?.block_size} tokens.<//>
  <//>`;
}
