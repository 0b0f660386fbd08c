// Chapter 7: weights in fewer bits are fewer bytes to read. The demo in three number formats.

import { html } from "../../vendor/preact.js";
import { Bars, Experiment } from "../experiment.js";
import { bytes, integer, ms, number } from "../format.js";
import { Chapter, Formula, Legend } from "../parts.js";

const BITS = {
  bf16: "16 bits a weight, as stored",
  int8: "8 bits and shared scales",
  int4: "4 bits and shared scales",
};

/** The text of an answer; the first token that differs from the one in bf16 is marked. */
function Answer({ base, one }) {
  const { pieces, first_difference: found } = one;
  if (!found) return html`<p class="answer">${pieces.join("")}</p>`;
  const at = found.index,
    word = (kind) => `“${(kind.pieces[at] ?? "the end").trim()}”`;
  return html`<p class="answer"><span>${pieces.slice(0, at).join("")}</span><mark>${
    pieces[at] ?? " ∎"
  }</mark>${pieces.slice(at + 1).join("")}</p>
    <p>Token ${integer(at + 1)} is the first that differs.${
      found.bf16_gap != null &&
      html` In bf16 ${word(base)} was only <b>${number(
        Math.exp(found.bf16_gap),
      )} times</b> as likely as ${word(one)}.`
    }</p>`;
}

function Found({ kinds, question }) {
  const name = (one) => one.kind;
  return html`<${Bars} title="Read for each token" all=${kinds} name=${name} field="weight_read_bytes"
      format=${bytes} />
    <${Bars} title="Time for each token" all=${kinds} name=${name} field="token_ms" format=${ms}
      predicted="weight_read_bytes" />
    <${Legend} items=${[
      ["decode-ink", "measured"],
      ["dashed", "predicted, if only bytes took time"],
    ]} />
    <h3>“${question}”</h3>
    <div class="cards">${kinds.map(
      (one) => html`<div class="card decode">
        <h3>${one.kind}</h3>
        <p>${BITS[one.kind]}: <b data-field=${`${one.at}weight_bytes`} data-value=${one.weight_bytes}>${bytes(
          one.weight_bytes,
        )}</b></p>
        <${Answer} base=${kinds[0]} one=${one} /></div>`,
    )}</div>`;
}

export default function Quantization() {
  return html`<${Chapter} title="Fewer bits, fewer bytes"
    lead="Each token of an answer needs every weight to be read from memory. Rounded to fewer bits the weights
      are fewer bytes, so the token comes sooner. The price is a little precision."
    short="Decode waits for bytes, so fewer bytes take less time. Rounding changes an answer where two tokens
      are almost equally likely; from there on it is another story.">
    <${Experiment} name="quantization" title="One question in three formats" asked=${{}}
      label="Ask in bf16, int8 and int4" empty="Ask the demo in all three: it takes a second or two.">
      ${({ kind, done }) => done && html`<${Found} kinds=${kind} question=${done[0].question} />`}
    <//>
    <${Formula}>A group of weights w is kept as integers q and one scale s, with w ≈ s·q. A token takes
      at least bytes ÷ bandwidth. One token is e^(difference of log-probabilities) times as likely as
      another.<//>
  <//>`;
}
