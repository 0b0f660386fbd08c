// The page: a header with the pulse of the engine, the chat, and the chapters.

import { html, render, useEffect, useRef, useState } from "../vendor/preact.js";
import { recorded, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { integer } from "./format.js";
import { follow, live, tokenRate, useLive } from "./live.js";
import { ModelChoice } from "./models.js";
import { Problem, modelName } from "./parts.js";
import { TraceButton } from "./trace.js";

const CHAPTERS = [
  ["prefill", "Prefill and decode", () => import("./chapters/prefill.js")],
  ["cache", "The KV cache", () => import("./chapters/cache.js")],
  ["batching", "Continuous batching", () => import("./chapters/batching.js")],
  ["blocks", "Paged memory", () => import("./chapters/blocks.js")],
  ["attention", "Attention in parts", () => import("./chapters/attention.js")],
  ["speculation", "Speculation", () => import("./chapters/speculation.js")],
  ["quantization", "Fewer bits", () => import("./chapters/quantization.js")],
  ["heads", "Grouped heads", () => import("./chapters/heads.js")],
  ["metrics", "Latency and goodput", () => import("./chapters/metrics.js")],
  ["roofline", "The roofline", () => import("./chapters/roofline.js")],
  ["scale", "At scale", () => import("./chapters/scale.js")],
];
const WORDS = { lost: "no connection", unloaded: "not loaded" };
const LOST = { message: "The connection to the server was lost." };
const NO_CHAPTER = "This chapter could not be loaded.";

/** The chapter that the address names, as an index. */
function chapterOf() {
  const found = CHAPTERS.findIndex(([name]) => location.hash === `#/${name}`);
  return found < 0 ? 0 : found;
}

function Header() {
  const { facts, counts, state, model } = useLive();
  const about = [!model && modelName(), facts?.model?.quantization];
  return html`<header class="top">
    <h1><a class="wordmark" href="#/prefill">
      <img src="page/icon.svg" alt="" width="26" height="26" />Quire</a></h1>
    <span class=${`pulse ${state}`} role="status">${WORDS[state] ?? state}</span>
    ${model && html`<${ModelChoice} />`}
    <span class="model">${about.filter(Boolean).join(" · ")}</span>
    <span class="counts" aria-hidden="true">
      ${
        counts && [
          html`<b>${integer(tokenRate())} tokens/s</b>`,
          html`<span>${integer(counts.num_running)} running</span>`,
          html`<span>${integer(counts.num_waiting)} waiting</span>`,
        ]
      }
    </span>
    ${facts && html`<${TraceButton} />`}
  </header>`;
}

const UNKNOWN_KEY = { message: "The server does not know this key." };

function Locked() {
  const { state } = useLive(),
    [tried, setTried] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    setTried(true);
    setKey(event.target.elements.key.value);
    live.state = "connecting";
    follow();
  };
  return html`<form class="locked" onSubmit=${submit}>
    <h2>This server asks for a key</h2>
    <p>The key stays in this tab until you close it. It is sent in a header, to this server alone.</p>
    <label>API key <input name="key" type="password" autocomplete="off" required /></label>
    <button class="primary">Open</button>
    ${tried && state === "locked" && html`<${Problem} error=${UNKNOWN_KEY} />`}
  </form>`;
}

/** The chosen chapter, loaded when it is first shown. */
function Inside({ index }) {
  const [chapter, setChapter] = useState({}),
    shown = useRef(false);
  const [name, title, load] = CHAPTERS[index];
  useEffect(() => {
    let wanted = true;
    load().then(
      (module) => wanted && setChapter({ name, body: module.default }),
      (error) => wanted && setChapter({ name, error }),
    );
    return () => {
      wanted = false;
    };
  }, [name]);
  useEffect(() => {
    document.title = `${title} · Quire`;
    if (shown.current && chapter.name === name) document.querySelector(".chapter h2")?.focus();
    shown.current ||= chapter.name === name;
  }, [chapter]);
  const step = (by, words) => {
    const other = CHAPTERS[index + by];
    return other
      ? html`<a class=${words} href=${`#/${other[0]}`} rel=${words}>
          <small>${words === "prev" ? "previous" : words}</small>${other[1]}</a>`
      : html`<span></span>`;
  };
  return html`<section class="inside" aria-label="Inside the engine">
    <nav class="stepper" aria-label="Chapters"><ol>
      ${CHAPTERS.map(
        ([other, words], number) => html`<li><a href=${`#/${other}`}
        aria-current=${number === index ? "page" : undefined}><b>${
          number + 1
        }</b><span>${words}</span></a></li>`,
      )}
    </ol></nav>
    ${
      chapter.error
        ? html`<${Problem} error=${{ message: NO_CHAPTER, hint: chapter.error.message }} />`
        : chapter.name === name
          ? html`<${chapter.body} key=${name} />`
          : html`<p class="empty">Loading …</p>`
    }
    <footer class="turn">${step(-1, "prev")}${step(1, "next")}</footer>
  </section>`;
}

function App() {
  const { state, error, model } = useLive();
  const [index, setIndex] = useState(chapterOf),
    [tab, setTab] = useState("inside");
  useEffect(() => {
    const moved = () => {
      setIndex(chapterOf());
      setTab("inside");
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  if (state === "locked") return html`<${Header} /><main><${Locked} /></main>`;
  const choose = (name, words) =>
    html`<button type="button" aria-pressed=${tab === name} onClick=${() => setTab(name)}>${words}</button>`;
  return html`<${Header} />
    ${
      recorded &&
      html`<p class="banner">This is a recording of the demo model. With <code>quire
      serve</code> the same page shows an engine of your own.</p>`
    }
    ${state === "lost" && html`<${Problem} error=${error ?? LOST} />`}
    <div class="tabs">${choose("chat", "Chat")}${choose("inside", "Inside the engine")}</div>
    <main class=${`split show-${tab}`}><${Chat} /><${Inside} key=${model?.id} index=${index} /></main>`;
}

follow();
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
