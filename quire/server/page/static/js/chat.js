// The chat: messages, where the next one is written, and panels with settings and conversations.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { answers, json, recorded } from "./api.js";
import { Box, Message, button, quiet, say } from "./chat-message.js";
import * as store from "./chat-store.js";
import { book, show, touch } from "./chat-store.js";
import { integer } from "./format.js";
import { live, useLive } from "./live.js";
import { Problem, modelName } from "./parts.js";

const PROMPTS = [
  "Tell me a story about a fox and a lantern.",
  "What is 27 + 14?",
  "Sort these words: plum, apple, melon",
];
const NEAR_PX = 48; // of the end: there the view follows it
const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const WEATHER = { name: "get_weather", description: "Get the weather of a city", parameters: CITY };
const EXAMPLES = { schema: CITY, tools: [{ type: "function", function: WEATHER }] };

function Setup({ talk }) {
  const [defaults, setDefaults] = useState({});
  const { facts } = useLive();
  useEffect(() => {
    if (facts)
      json("/props").then(
        ({ default_generation_settings: { params } }) =>
          setDefaults({ ...params, repetition_penalty: params.repeat_penalty }),
        () => {},
      );
  }, [facts]);
  const write = (name, text) => {
    talk.setup = { ...talk.setup, [name]: text };
    touch(talk);
  };
  const input = (name) => ({
    value: talk.setup[name] ?? "",
    onInput: ({ target }) => write(name, target.value),
  });
  const area = (name, words) => html`<label class="field">${words}
    <textarea rows="3" ...${input(name)}></textarea></label>
    ${EXAMPLES[name] && quiet("Example", () => write(name, JSON.stringify(EXAMPLES[name], null, 1)))}`;
  return html`<div class="panel"><h2>Settings of this conversation</h2>
    ${area("system", "System prompt")}
    ${Object.entries(store.SAMPLING).map(
      ([name, [min, max, base]]) => html`<label class="field number">
        <span>${name} <small>${store.rangeOf(min, max)}</small></span>
        <input inputmode="decimal" ...${input(name)}
          placeholder=${defaults[name] >= 0 ? defaults[name] : base} /></label>`,
    )}
    ${area("stop", "Texts that end the answer, one a line")}
    ${area("schema", "JSON schema of the answer")}
    ${area("tools", "Tools that the model may call, as JSON")}
    ${button("Reset to the defaults", () => {
      talk.setup = {};
      touch(talk);
    })}</div>`;
}

function Talks({ onDone }) {
  const [words, setWords] = useState("");
  const [error, setError] = useState(null);
  const [sure, setSure] = useState(null);
  const has = (text) => text.toLowerCase().includes(words.trim().toLowerCase());
  const take = ({ target }) => {
    store
      .importFile(target.files[0])
      .then(onDone, () => setError({ message: "This file has no conversations that were exported here." }));
    target.value = ""; // the same file may be chosen again
  };
  const found = book.all.filter((talk) => has(talk.title) || talk.nodes.some((node) => has(node.content)));
  const choose = (talk) => {
    show(talk);
    onDone();
  };
  return html`<div class="panel"><h2>Conversations</h2><p class="note">They stay in this browser.</p>
    <input type="search" aria-label="Search" placeholder="Search" value=${words}
      onInput=${({ target }) => setWords(target.value)} />
    <ul class="talks">${found.map(
      (talk) =>
        html`<li key=${talk.id}>${button(talk.title, () => choose(talk), {
          class: "title",
          "aria-current": talk === book.open,
        })}${quiet(
          talk === sure ? "Really?" : "Delete",
          () => (talk === sure ? store.remove : setSure)(talk),
          {
            "aria-label": `Delete ${talk.title}`,
          },
        )}</li>`,
    )}</ul>
    ${error && html`<${Problem} error=${error} />`}
    <div class="actions">${button("Export all", () => store.exportFile(book.all))}
      <label class="file">Import
        <input type="file" class="visually-hidden" onChange=${take} /></label></div></div>`;
}

function Greeting({ talk }) {
  useLive();
  return html`<div class="panel greeting"><h2>Ask ${modelName() ?? "the model"} something</h2>
    <p>The chapters show how the engine computes your answer, while it does.</p>
    ${PROMPTS.map((content) => button(content, () => say(talk, { content })))}</div>`;
}

/** Messages, whose end is in view while they grow, unless the reader has scrolled away from it. */
function Messages({ talk, busy, children }) {
  const list = useRef(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  const toEnd = () => {
    list.current.scrollTop = list.current.scrollHeight;
  };
  useLayoutEffect(() => {
    follows.current = true;
    if (document.activeElement === document.body) list.current.focus(); // what had it is gone
  }, [talk, busy]);
  useLayoutEffect(() => {
    if (follows.current) toEnd();
  });
  const scrolled = ({ target }) => {
    follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_PX;
    setAway(!follows.current);
  };
  return html`<ol class="panel messages" tabindex="0" aria-label="Messages" ref=${list}
      onScroll=${scrolled}>${children}</ol>
    ${away && button("To the end", toEnd, { class: "to-end" })}`;
}

/** The first call of the last answer that has no result yet. */
function unanswered(shown) {
  const last = shown.findLastIndex((node) => node.role !== "tool");
  return shown[last]?.calls.find((call) => !shown.slice(last).some((node) => node.callId === call.id));
}

const SAID = { stop: "Answer complete", length: "Answer cut at its limit", stopped: "Stopped" };

function Live() {
  store.useNews();
  const [panel, setPanel] = useState(null);
  const { open: talk, problem, runs } = book;
  const found = store.path(talk);
  const shown = found.map(([node]) => node);
  const last = shown.at(-1);
  const busy = talk.nodes.find((node) => runs.has(node.id))?.id;
  const stop = () => runs.get(busy)?.abort();
  useEffect(() => {
    const key = (event) => event.key === "Escape" && stop();
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  }, [busy]);
  const close = () => setPanel(null);
  const call = busy ? null : unanswered(shown);
  const wrong = store.wrongOf(talk) ?? problem;
  const send = (content, images) => {
    close();
    return say(talk, { parent: last?.id, content, images, ...(call && { role: "tool", callId: call.id }) });
  };
  const begin = () => {
    close();
    if (last) show(); // an empty conversation is new already
  };
  const rename = ({ target }) => {
    talk.title = target.value.trim() || talk.title;
    touch(talk);
  };
  const toggle = (name) =>
    quiet(name, () => setPanel(panel === name ? null : name), { "aria-expanded": panel === name });
  const { prompt_tokens: numPrompt, completion_tokens: numTokens } = last?.usage ?? {};
  const messages = () =>
    html`<${Messages} talk=${talk} busy=${busy}>${found.map(([node, versions]) => {
      const at = versions.indexOf(node);
      return html`<${Message} key=${node.id} talk=${talk} node=${node} busy=${busy === node.id}
        at=${at} count=${versions.length} before=${versions[at - 1]} after=${versions[at + 1]} />`;
    })}<//>`;
  return html`<header class="bar">${toggle("Conversations")}
      <input class="title" aria-label="Name of this conversation" value=${talk.title} onChange=${rename} />
      ${quiet("New", begin)}${toggle("Settings")}</header>
    ${
      {
        Settings: () => html`<${Setup} talk=${talk} />`,
        Conversations: () => html`<${Talks} onDone=${close} />`,
      }[panel]?.() ?? (last ? messages() : html`<${Greeting} talk=${talk} />`)
    }
    <p class="visually-hidden" role="status">${busy ? "Answering" : SAID[last?.finish]}</p>
    ${wrong && html`<${Problem} error=${wrong} />`}
    <${Box} key=${talk.id} place="composer" label=${call ? `Result of ${call.name}` : "Message"}
      action=${busy ? "Stop" : "Send"} busy=${busy} sees=${!call} onSend=${busy ? stop : send} />
    <p class="note about">${Object.keys(talk.setup)
      .filter((name) => talk.setup[name])
      .join(", ")}<span>${
      numPrompt &&
      `${integer(numPrompt + numTokens)} of ${integer(live.facts?.model?.max_model_len)} tokens`
    }</span></p>`;
}

/** The conversation of a recording, to read. */
function Recorded() {
  useLive();
  const message = (role, content, more) => {
    const node = { role, content, calls: [], images: [], usage: {}, timings: {}, ...more };
    return html`<${Message} node=${node} />`;
  };
  return html`<${Messages}>${answers
    .filter(({ text }) => text)
    .map(({ prompt, text, timings }) => [
      message("user", prompt),
      message("assistant", text, { timings }),
    ])}<//>
    <p class="note about">This conversation was recorded. Start quire serve to have your own.</p>`;
}

export const Chat = () =>
  html`<section class="chat" aria-label="Chat"><${recorded ? Recorded : Live} /></section>`;
