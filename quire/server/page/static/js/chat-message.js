// A message, what can be done with it, and the receipt of an answer.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { AddImages, Images, imageOf } from "./chat-images.js";
import { add, anySeed, answer, update, wrongOf } from "./chat-store.js";
import { Code, Copy, Markdown, memo } from "./chat-text.js";
import { integer, ms, number } from "./format.js";
import { live } from "./live.js";
import { ownerOf } from "./parts.js";
import { Receipt } from "./receipt.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

export const button = (words, onClick, more) =>
  html`<button type="button" onClick=${onClick} ...${more}>${words}</button>`;
export const quiet = (words, onClick, more) => button(words, onClick, { class: "quiet", ...more });

function Summary({ timings, usage, finish, seed, tag, model }) {
  const [open, setOpen] = useState(false);
  const box = useRef(null);
  useEffect(() => open && box.current.scrollIntoView({ block: "nearest" }), [open]);
  const value = (field, format) =>
    html`<span data-field=${`timings.${field}`} data-value=${timings[field]}>${format(timings[field])}<//>`;
  if (!timings.total_ms)
    return html`<p class="receipt">
      ${integer(usage.completion_tokens ?? 0)} tokens · ${finish || "interrupted"}</p>`;
  const rate = ((timings.completion_tokens - 1) / timings.decode_ms) * 1e3;
  return html`<details class="receipt" ref=${box} onToggle=${({ target }) => setOpen(target.open)}>
    <summary>${value("completion_tokens", integer)} tokens in ${value("total_ms", ms)}
      ${rate > 0 && ` · ${number(rate)} tokens/s`} · first ${value("ttft_ms", ms)}
      ${finish === "length" && " · cut"}${model && ` · ${model}`}</summary>
    ${
      open &&
      html`<${Receipt} timings=${timings} />
        ${
          timings.interference_ms > 0 &&
          html`<p>by others: ${value("interference_prefill_ms", ms)} for their prompts, ${" "}
            ${value("interference_decode_ms", ms)} for their decoding</p>`
        }
        ${timings.grammar_ms > 0 && html`<p>masks of the schema: ${value("grammar_ms", ms)}</p>`}
        <p>prompt: ${value("prompt_tokens", integer)} tokens, of them ${value("cached_tokens", integer)}${" "}
        from the cache · seed ${seed} · in the chapters${" "}
        <i class=${`owner-${ownerOf(tag)}`}>■</i> <code>${tag}</code></p>`
    }
  </details>`;
}

/** A text to write and to send: Enter sends, Shift+Enter breaks. With `sees` images go with it. */
export function Box({ label, place, action, first = "", busy, sees, onSend, onCancel, children }) {
  const [text, setText] = useState(first);
  const [images, setImages] = useState([]);
  const [error, setError] = useState("");
  const area = useRef(null);
  useEffect(() => first && area.current.focus(), []);
  const send = (event) => {
    event.preventDefault();
    if (busy) onSend();
    else if (text.trim() && onSend(text, images) !== false) {
      setText("");
      setImages([]);
    }
  };
  const take = async (files) => {
    setError("");
    for (const file of files)
      try {
        const url = await imageOf(file);
        setImages((others) => [...others, url]);
      } catch ({ message }) {
        setError(message);
      }
    area.current.focus();
  };
  const given = (event) => {
    const { files = [] } = event.clipboardData ?? event.dataTransfer;
    if (!files.length || !sees || !live.facts?.model?.sees) return;
    event.preventDefault();
    take([...files]);
  };
  const key = (event) => {
    if (event.key === "Escape") onCancel?.();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (busy) event.preventDefault();
    else send(event);
  };
  const remove = (at) => setImages(images.filter((_, other) => other !== at));
  return html`<form class=${`box ${place}`} onSubmit=${send} onPaste=${given} onDrop=${given}
      onDragOver=${(event) => sees && event.preventDefault()}>
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    <${Images} images=${images} onRemove=${remove} />
    <textarea ref=${area} rows=${Math.min(8, text.split("\n").length)} value=${text} onKeyDown=${key}
      aria-label=${label} placeholder=${label} onInput=${({ target }) => setText(target.value)}></textarea>
    ${sees && html`<${AddImages} onFiles=${take} />`}
    <button class="primary" disabled=${!busy && !text.trim()}>${action}</button>${children}</form>`;
}

/** Say something, or the same in other words, and have it answered; false if the settings are wrong. */
export function say(talk, values) {
  if (wrongOf(talk)) return false;
  answer(talk, add(talk, { role: "user", ...values }));
}

function Failure({ talk, node: { error, until, parent } }) {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 250);
    return () => clearInterval(timer);
  }, []);
  const wait_s = Math.ceil((until - now) / 1e3);
  return html`<p class="problem" role="alert">${error}</p>${button(
    wait_s > 0 ? `Try again in ${wait_s} s` : "Try again",
    () => answer(talk, parent),
    { disabled: wait_s > 0 },
  )}`;
}

function pretty(args) {
  try {
    return JSON.stringify(JSON.parse(args), null, 1);
  } catch {
    return args; // not complete, or not JSON
  }
}

export const Message = memo(({ talk, node, at, count, before, after, busy }) => {
  const [plain, setPlain] = useState(false);
  const [editing, setEditing] = useState(false);
  const { role, content, reasoning, calls, parent } = node;
  const own = role === "assistant";
  const turn = (other, label, sign) =>
    quiet(sign, () => update(talk, other.id, { picked: Date.now() }), {
      "aria-label": label,
      disabled: !other,
    });
  const close = () => {
    setEditing(false);
    document.querySelector(".messages").focus(); // what had it is gone
  };
  const edited = (text) => {
    if (say(talk, { ...node, content: text }) === false) return false;
    close();
  };
  const again = own
    ? quiet("Ask again", () => answer(talk, parent, anySeed()), { title: "with another seed" })
    : quiet("Edit", () => setEditing(true));
  const text = own && !plain ? html`<${Markdown} text=${content} />` : content;
  return html`<li class=${`message ${role}`}>
    <h2 class=${role === "tool" ? "" : "visually-hidden"}>${NAMES[role]}</h2>
    ${
      reasoning &&
      html`<details class="note"><summary>Reasoning</summary>
      <p class="plain">${reasoning}</p></details>`
    }
    ${
      editing
        ? html`<${Box} label="Message" action="Ask again" first=${content} onSend=${edited} onCancel=${close}>
            ${quiet("Cancel", close)}<//>`
        : html`<${Images} images=${node.images} />${
            content &&
            html`<div class=${`text ${own && !plain ? "" : "plain"}`} dir="auto">${text}</div>`
          }`
    }
    ${calls.map(
      ({ name, args }) => html`<${Code} place="call" title=${`Calls ${name}`} text=${pretty(args)} />`,
    )}
    ${node.error && html`<${Failure} talk=${talk} node=${node} />`}
    ${busy && html`<span class="spinner" aria-hidden="true"></span>`}
    ${!busy && own && !node.error && html`<${Summary} ...${node} />`}
    ${
      !busy &&
      html`<div class="actions">
        ${
          count > 1 &&
          html`<span class="versions">${turn(before, "Previous version", "‹")}
            ${at + 1} / ${count}${turn(after, "Next version", "›")}</span>`
        }
        ${content && html`<${Copy} text=${content} />`}
        ${content && own && quiet("Plain text", () => setPlain(!plain), { "aria-pressed": plain })}
        ${talk && !node.error && again}
      </div>`
    }</li>`;
});
