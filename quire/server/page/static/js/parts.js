// The parts that chapters are made of.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { live } from "./live.js";

/** A chapter: `lead` says in a sentence or two what there is to see, `short` what to remember. */
export function Chapter({ title, lead, short, children }) {
  return html`<article class="chapter">
    <h2 tabindex="-1">${title}</h2>
    <p class="lead">${lead}</p>
    ${children}
    ${short && html`<p class="short"><b>In short.</b> ${short}</p>`}
  </article>`;
}

/** A picture with its controls. `kind`: where its numbers come from, "measured" or "predicted". */
export function Figure({ title, kind, note, children }) {
  return html`<figure class="figure">
    ${
      (title || kind) &&
      html`<figcaption><span>${title}</span>${
        kind &&
        html`<${Kind} kind=${kind}
      />`
      }</figcaption>`
    }
    ${children}
    ${note && html`<p class="note">${note}</p>`}
  </figure>`;
}

/** The word "measured" or "predicted", with the sign that goes with it. */
export const Kind = ({ kind }) => html`<span class=${`kind ${kind}`}>${kind}</span>`;

/** A number with its name. `field` is the field of the API it equals, `value` its exact value. */
export function Stat({ label, value, format, field, kind, tone }) {
  return html`<div class=${`stat ${tone ?? ""} ${kind ?? ""}`}>
    <span class="label">${label}</span>
    <span class="value" data-field=${field} data-value=${value ?? undefined}>${
      value == null ? "–" : format(value)
    }</span>
  </div>`;
}

/** A share from 0 to 1 as a bar; a predicted one is an outline. */
export function Bar({ label, share, kind, tone, format, field }) {
  const shown = Math.max(0, Math.min(1, share ?? 0));
  return html`<div class=${`bar ${tone} ${kind}`}>
    <span class="label">${label}</span>
    <span class="track"><span class="fill" style=${{ width: `${100 * shown}%` }}></span></span>
    <span class="value" data-field=${field} data-value=${share ?? undefined}>${
      share == null ? "–" : format(share)
    }</span>
  </div>`;
}

/**
 * A table of numbers, measured and predicted side by side. `rows`: {label, format, measured, predicted, bar};
 * `bar` draws them as shares in this colour.
 */
export const Versus = ({ rows }) => html`<table class="versus">
  <thead><tr><td></td>
    ${["measured", "predicted"].map((kind) => html`<th scope="col"><${Kind} kind=${kind} /></th>`)}
  </tr></thead>
  ${rows.map(({ label, format, bar, ...row }) => {
    const cell = (kind) => html`<td class=${kind} data-value=${row[kind] ?? undefined}>
      ${row[kind] == null ? "–" : format(row[kind])}</td>`;
    const part = (kind) =>
      html`<i class=${kind} style=${{ width: `${100 * Math.min(1, row[kind] ?? 0)}%` }}></i>`;
    const shares = html`<span class=${`shares ${bar}`}>${part("measured")}${part("predicted")}</span>`;
    return html`<tbody>
      <tr><th scope="row">${label}</th>${cell("measured")}${cell("predicted")}</tr>
      ${bar && html`<tr aria-hidden="true"><td colspan="3">${shares}</td></tr>`}
    </tbody>`;
  })}
</table>`;

/** A slider. With `log` equal distances are equal ratios. */
export function Slider({ label, value, min, max, log, onInput, format = String }) {
  const at = log ? (100 * Math.log(value / min)) / Math.log(max / min) : value;
  const back = (raw) => (log ? Math.round(min * (max / min) ** (raw / 100)) : raw);
  return html`<label class="slider">
    <span class="label">${label}</span>
    <input type="range" min=${log ? 0 : min} max=${log ? 100 : max} step=${log ? "any" : 1} value=${at}
      aria-valuetext=${format(value)} onInput=${(event) => onInput(back(Number(event.target.value)))} />
    <output>${format(value)}</output>
  </label>`;
}

/** A choice of a few values, side by side. */
export function Choice({ label, value, options, onChoose }) {
  return html`<fieldset class="choice"><legend>${label}</legend>
    ${options.map(
      ([name, text]) => html`<button type="button" aria-pressed=${name === value}
      onClick=${() => onChoose(name)}>${text}</button>`,
    )}
  </fieldset>`;
}

/** A button that does something that takes a while, and says what went wrong. `work(signal)` does it. */
export function Action({ label, busy = "Working …", work, disabled, why, quiet }) {
  const [state, setState] = useState({ running: false, error: null });
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const click = async () => {
    if (state.running) return abort.current.abort();
    abort.current = new AbortController();
    setState({ running: true, error: null });
    try {
      await work(abort.current.signal);
      setState({ running: false, error: null });
    } catch (error) {
      setState({ running: false, error: error.name === "AbortError" ? null : error });
    }
  };
  return html`<span class="action">
    <button type="button" class=${quiet ? "quiet" : "primary"} disabled=${disabled && !state.running}
      onClick=${click}>
      ${state.running ? html`<span class="spinner" aria-hidden="true"></span>${busy} · stop` : label}
    </button>
    ${disabled && html`<span class="why">${why}</span>`}
    ${state.error && html`<${Problem} error=${state.error} />`}
  </span>`;
}

/** What went wrong, and what to do. */
export const Problem = ({ error }) => html`<p class="problem" role="alert">
  ${error.message}${error.hint ? html` <span class="hint">${error.hint}</span>` : null}</p>`;

/** The formula behind a picture, a click away. */
export const Formula = ({ title = "The formula", children }) => html`<details class="formula">
  <summary>${title}</summary><div>${children}</div></details>`;

/** What to do while there is nothing to show. */
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

/** Names of colours: [[class, text], ...]. */
export const Legend = ({ items }) => html`<ul class="legend">
  ${items.map(([name, text]) => html`<li><i class=${name}></i>${text}</li>`)}</ul>`;

/** A number between 0 and 7 for a tag: the class `owner-N` has its colour. */
export const ownerOf = (tag) => parseInt(tag?.slice(0, 2) ?? "0", 16) % 8;

/** The width of an element, which changes with the window: [ref, width]. */
export function useWidth(first = 640) {
  const ref = useRef(null),
    [width, setWidth] = useState(first);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

/** True if the viewer prefers no motion. */
export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export const modelName = () => live.model?.id ?? live.facts?.names[0];
