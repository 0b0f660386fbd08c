// The choice of a model, where the server has several, and how one is loaded.

import { html } from "../vendor/preact.js";
import { json } from "./api.js";
import { choose, live } from "./live.js";
import { Action } from "./parts.js";

const about = ({ id, parent, state = "loaded" }) =>
  `${id}${parent ? ` of ${parent}` : ""} · ${state === "unloaded" ? "not loaded" : state}`;

/** A select of the models and, while the chosen one is not loaded, a button that loads it. */
export function ModelChoice() {
  const { id, state = "loaded" } = live.model;
  return html`<label class="model">Model${" "}
    <select value=${id} onChange=${({ target }) => choose(target.value)}>
      ${live.models.map((one) => html`<option value=${one.id}>${about(one)}</option>`)}
    </select></label>
    ${
      state !== "loaded" &&
      html`<${Action} key=${id} label="Load it" busy="Loading" disabled=${state !== "unloaded"}
        work=${(signal) => json("/tokenize", { prompt: "" }, signal)} />`
    }`;
}
