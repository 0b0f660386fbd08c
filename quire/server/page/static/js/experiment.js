// Experiments: measurements that the server makes in a process of their own, and simulations.

import { html, useEffect, useState } from "../vendor/preact.js";
import { ApiError, jsonLines, recorded } from "./api.js";
import { percent } from "./format.js";
import { useLive } from "./live.js";
import { Action, Empty, Figure } from "./parts.js";

const ON_DEMO = "Of the demo model, on one core. Times are of the processor: other programs do not count.";

/**
 * An experiment: `controls` and a button that starts it with the parameters `asked`. `children` is a function
 * that draws what was found so far, as lists by kind; while it returns nothing, `empty` says what to do. A
 * thing found has the beginning of the names of its fields in `at`.
 */
export function Experiment({ name, title, label, asked, controls, empty, kind = "measured", children }) {
  const { facts } = useLive();
  const [found, setFound] = useState({});
  const work = async (signal) => {
    let lines = {},
      index = 0;
    setFound(lines);
    for await (const line of jsonLines(`/page/experiments/${name}`, asked, signal)) {
      if (line.error) throw new ApiError(0, line.error.message);
      const [[what, value]] = Object.entries(line);
      if (what !== "progress") value.at = `experiments.${name}.${index}.${what}.`;
      lines = { ...lines, [what]: [...(lines[what] ?? []), value] };
      index += 1;
      setFound(lines);
    }
  };
  useEffect(() => {
    if (recorded) work().catch(() => {});
  }, []);
  const share = found.progress?.at(-1);
  return html`<${Figure} title=${title} kind=${kind} note=${kind === "measured" && ON_DEMO}>
    <div class="controls">${controls}
      <${Action} label=${label} busy=${`Working ${share ? percent(share) : "…"}`} work=${work}
        disabled=${!facts?.experiments} why=${facts && "Only on the server's own machine, or with a key."} />
    </div>
    ${children(found) || html`<${Empty}>${empty}<//>`}
  <//>`;
}

/**
 * Bars of a field, of which `whole` fills one, else the first does; an outline is the share in another field,
 * `predicted`.
 */
export function Bars({ title, all, name, field, format, predicted, whole }) {
  const bar = (one) => {
    const width = (of) => ({ width: `${(100 * one[of]) / (whole ?? all[0][of])}%` });
    return html`<div class="bar"><span class="label">${name(one)}</span>
      <span class="shares decode"><i style=${width(field)}></i>${
        predicted && html`<i class="predicted" style=${width(predicted)}></i>`
      }</span>
      <span class="value" data-field=${one.at + field} data-value=${one[field]}>${format(one[field])}</span>
    </div>`;
  };
  return html`${title && html`<h3>${title}</h3>`}${all.map(bar)}`;
}

export const DIFFERS = "The answers differ: please report it.";
