// The button that makes a trace of the last seconds, to save or to open in Perfetto.

import { html, useRef, useState } from "../vendor/preact.js";
import { file } from "./api.js";
import { bytes } from "./format.js";
import { live } from "./live.js";
import { Action, Choice, modelName } from "./parts.js";

const PERFETTO = "https://ui.perfetto.dev";
const NAME = "quire.pftrace";
const SPANS = [
  ["30s", "30 seconds"],
  ["120s", "2 minutes"],
  ["600s", "10 minutes"],
];
const PING_MS = 50;
const PATIENCE_MS = 30_000;

/** Give a trace to a new tab of Perfetto, which answers PONG once it listens. Call it in a click. */
function openInPerfetto(buffer, signal) {
  const tab = open(PERFETTO);
  return new Promise((resolve, reject) => {
    const begin = performance.now();
    const timer = setInterval(() => {
      if (tab && !tab.closed && performance.now() - begin < PATIENCE_MS) return tab.postMessage("PING", "*");
      end(reject, { message: "Perfetto did not answer.", hint: "Save the trace and open it there." });
    }, PING_MS);
    const take = ({ source, origin, data }) => {
      if (source !== tab || origin !== PERFETTO || data !== "PONG") return;
      tab.postMessage({ perfetto: { buffer, title: "Quire", fileName: NAME } }, PERFETTO);
      end(resolve);
    };
    const end = (settle, outcome) => {
      clearInterval(timer);
      removeEventListener("message", take);
      settle(outcome);
    };
    addEventListener("message", take);
    signal.addEventListener("abort", () => end(reject, signal.reason));
  });
}

function save(buffer) {
  const url = URL.createObjectURL(new Blob([buffer]));
  Object.assign(document.createElement("a"), { href: url, download: NAME }).click();
  setTimeout(() => URL.revokeObjectURL(url), PATIENCE_MS);
}

/** What a trace contains and where it goes, then the buttons that make it, save it and open it. */
function Making() {
  const [last, setLast] = useState("30s"), [trace, setTrace] = useState(null);
  return html`
    <p>A trace has every step of the last seconds, and for each request when it waited, was computed and
      ended. It contains times and lengths; no prompts, no answers, no names and no keys.</p>
    <${Choice} label="the last" value=${last} options=${SPANS} onChoose=${setLast} />
    <${Action} label="Make the trace"
      work=${async (signal) => setTrace(await file(`/trace?last=${last}`, signal))} />
    ${
      trace &&
      html`<p role="status">The trace has ${bytes(trace.byteLength)}.</p>
      <p>Perfetto is a viewer of traces at ui.perfetto.dev that runs in your browser. A new tab loads it from
        there and gets the trace from this tab: nothing is uploaded. Or save the trace as a file, and it goes
        nowhere.</p>
      <p class="choices"><${Action} label="Open in Perfetto" busy="Opening"
        work=${(signal) => openInPerfetto(trace, signal)} />
        <button type="button" onClick=${() => save(trace)}>Save as a file</button></p>`
    }`;
}

/** The button for the header, and its dialog. */
export function TraceButton() {
  const dialog = useRef(null), [shown, setShown] = useState(false);
  const show = () => {
    setShown(true);
    dialog.current.showModal();
  };
  return html`<button type="button" onClick=${show}>Trace</button>
    <dialog ref=${dialog} class="sheet" aria-labelledby="trace-title" onClose=${() => setShown(false)}>
      <h2 id="trace-title">A trace of the engine</h2>
      ${
        shown && live.facts.recording
          ? html`<${Making} />`
          : html`<p>Nothing is recorded. A server that was started with <code>--record DIR</code> keeps
            its last steps in memory, without prompts and answers:</p>
            <p><code>quire serve ${modelName()} --record traces</code></p>`
      }
      <p><button type="button" onClick=${() => dialog.current.close()}>Close</button></p>
    </dialog>`;
}
