// The conversations of this browser, and how they are answered.

import { ask, chosen } from "./api.js";
import { isImage } from "./chat-images.js";
import { news } from "./live.js";

const KEY = "quire-chat:";
const SAVE_MS = 1000;
const EXPORT_MS = 30_000; // until the memory of an exported file is released
const MAX = Number.MAX_SAFE_INTEGER;
/** Sampling settings: least, greatest, and the default where the model has none of its own. */
export const SAMPLING = {
  temperature: [0, 2, 1],
  top_p: [0, 1, 1],
  top_k: [-1, MAX, 0],
  min_p: [0, 1, 0],
  max_tokens: [1, MAX, "to the end"],
  seed: [-MAX, MAX, "random"],
  presence_penalty: [-2, 2, 0],
  frequency_penalty: [-2, 2, 0],
  repetition_penalty: [0, 2, 1],
};
const FULL = {
  message: "The storage of this browser is full or closed: what is new is not kept.",
  hint: "Export conversations, then delete them.",
};
// A conversation is a tree: an edited message, or another answer, is one more child of its parent. Of several
// children the one picked last is shown. Nodes are replaced, not changed: the same node is not drawn again.
const NODE = {
  ...texts("id parent role content reasoning callId finish error tag model"),
  ...{ picked: 0, seed: 0, usage: {}, timings: {}, calls: [texts("id name args")], images: [""] },
};
const TALK = { id: "", title: "", at: 0, setup: {}, nodes: [NODE] };

/** All conversations; the one that is shown; why they are not kept; what stops an answer, by its node. */
export const book = { all: [], open: null, problem: null, runs: new Map() };
export const [draw, useNews] = news();
const dirty = new Set();
const newId = () => Math.random().toString(36).slice(2);

function texts(names) {
  return Object.fromEntries(names.split(" ").map((name) => [name, ""]));
}

/** Give a value the shape of another one. {}: texts and numbers by any name. */
function fit(value, shape) {
  if (Array.isArray(shape)) return Array.isArray(value) ? value.map((one) => fit(one, shape[0])) : [];
  if (typeof shape !== "object") return typeof value === typeof shape ? value : shape;
  const names = Object.keys(shape);
  if (names.length) return Object.fromEntries(names.map((name) => [name, fit(value?.[name], shape[name])]));
  return Object.fromEntries(Object.entries(value ?? {}).filter(([, one]) => typeof one !== "object"));
}

/** A conversation from elsewhere. Parents come before their children, so there are no rings. */
function cleaned(value) {
  const talk = fit(value, TALK);
  const seen = new Set([""]);
  talk.nodes = talk.nodes.filter(({ id, parent }) => seen.has(parent) && !seen.has(id) && seen.add(id));
  for (const node of talk.nodes) node.images = node.images.filter(isImage);
  return talk;
}

/** Show a conversation; without one, begin another with the same settings. */
export function show(talk = fit({ id: newId(), setup: book.open?.setup }, TALK)) {
  book.open = talk;
  sessionStorage[KEY] = talk.id;
  draw();
}

/** Draw and keep what has changed in a conversation. */
export function touch(talk) {
  talk.at = Date.now();
  if (!dirty.size) setTimeout(keep, SAVE_MS);
  if (book.all.includes(talk)) dirty.add(talk);
  draw();
}

function keep() {
  try {
    for (const talk of dirty) localStorage.setItem(KEY + talk.id, JSON.stringify(talk));
    book.problem = null;
  } catch {
    book.problem = FULL;
  }
  dirty.clear();
  draw();
}

/** Add a message; return its id. */
export function add(talk, values) {
  const node = { ...fit(values, NODE), id: newId(), picked: Date.now() };
  talk.nodes.push(node);
  talk.title ||= node.content.trim().slice(0, 60);
  if (!book.all.includes(talk)) book.all.unshift(talk);
  touch(talk);
  return node.id;
}

export function update(talk, id, values) {
  talk.nodes = talk.nodes.map((node) => (node.id === id ? { ...node, ...values } : node));
  touch(talk);
}

/** The messages that are shown, from the first to the last, each with all its versions. */
export function path(talk) {
  const children = {};
  const found = [];
  for (const node of talk.nodes) (children[`${node.parent} `] ??= []).push(node);
  for (let versions = children[" "]; versions; versions = children[`${found.at(-1)[0].id} `])
    found.push([versions.reduce((last, node) => (node.picked < last.picked ? last : node)), versions]);
  return found;
}

export function remove(talk) {
  for (const { id } of talk.nodes) book.runs.get(id)?.abort();
  book.all = book.all.filter((one) => one !== talk);
  dirty.delete(talk);
  localStorage.removeItem(KEY + talk.id);
  if (book.open === talk) show();
  draw();
}

/** Offer conversations as a file. */
export function exportFile(talks) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ conversations: talks }, null, 1)]));
  link.download = "conversations.json";
  link.click();
  setTimeout(URL.revokeObjectURL, EXPORT_MS, link.href);
}

/** Take the conversations of a file, as new ones. */
export async function importFile(file) {
  const found = JSON.parse(await file.text()).conversations.map(cleaned);
  for (const talk of found.filter(({ nodes }) => nodes.length)) {
    talk.id = newId();
    talk.title ||= file.name;
    book.all.unshift(talk);
    touch(talk);
    show(talk);
  }
}

export const rangeOf = (min, max) =>
  max < MAX ? `${min} to ${max}` : min > -MAX ? `${min} or more` : "a number";

function parsed(name, text, wanted, fits) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
  if (!fits(value)) throw new Error(`${name}: must be ${wanted}`);
  return value;
}

/** The fields of a request for these settings. Throws an Error if one is not what it should be. */
function fieldsOf({ system, stop, schema, tools, ...numbers }) {
  const fields = {};
  for (const name in SAMPLING) {
    const text = numbers[name]?.trim();
    const [min, max] = SAMPLING[name];
    if (text && !(text >= min && text <= max)) throw new Error(`${name}: must be ${rangeOf(min, max)}`);
    if (text) fields[name] = Number(text);
  }
  if (stop) fields.stop = stop.split("\n").filter(Boolean);
  if (tools) fields.tools = parsed("Tools", tools, "a list", Array.isArray);
  if (schema) {
    const given = parsed("JSON schema", schema, "an object", (one) => one?.constructor === Object);
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: given } };
  }
  return fields;
}

/** What is wrong with the settings of a conversation, as an Error, if anything. */
export function wrongOf({ setup }) {
  try {
    fieldsOf(setup);
  } catch (error) {
    return error;
  }
}

function messageOf({ role, content, reasoning, calls, callId, images }) {
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  const said = parts.length ? [...parts, { type: "text", text: content }] : content;
  if (role !== "assistant") return { role, content: said, tool_call_id: callId || undefined };
  const called = calls.map(({ id, name, args }) => {
    return { id, type: "function", function: { name, arguments: args } };
  });
  return { role, content, reasoning_content: reasoning || undefined, tool_calls: called[0] && called };
}

export const anySeed = () => Math.floor(Math.random() * 2 ** 31);

/** Add an answer to the message `parent`, in place of one that failed, and fill it as the model goes on. */
export async function answer(talk, parent, seed) {
  if (wrongOf(talk)) return;
  const fields = fieldsOf(talk.setup);
  fields.seed = seed ?? fields.seed ?? anySeed();
  talk.nodes = talk.nodes.filter(
    (node) => node.parent !== parent || node.finish !== "failed" || node.content,
  );
  const shown = path(talk).map(([node]) => node);
  const messages = shown.slice(0, shown.findIndex((node) => node.id === parent) + 1);
  const asked = messages.filter((node) => node.content || node.calls.length).map(messageOf);
  if (talk.setup.system) asked.unshift({ role: "system", content: talk.setup.system });
  const stream_options = { include_usage: true, continuous_usage_stats: true, include_drafting: true };
  const body = { messages: asked, ...fields, stream_options };
  const id = add(talk, { role: "assistant", parent, seed: fields.seed, model: chosen.name });
  const abort = new AbortController();
  book.runs.set(id, abort);
  const node = { content: "", reasoning: "", calls: [], finish: "" };
  const onTag = (tag) => update(talk, id, { tag: tag ?? "" });
  const onChunk = (chunk) => {
    if (chunk.choices[0]?.drafting) return; // adds no text
    take(node, chunk);
    update(talk, id, { ...node, calls: [...node.calls] });
  };
  try {
    await ask("/v1/chat/completions", body, { signal: abort.signal, onTag, onChunk });
    if (!node.finish) throw new Error("The answer broke off.");
  } catch ({ name, message, hint = "", retry_s = 0 }) {
    const failed = { finish: "failed", error: `${message} ${hint}`, until: Date.now() + retry_s * 1e3 };
    update(talk, id, name === "AbortError" ? { finish: "stopped" } : failed);
  }
  book.runs.delete(id);
  draw();
}

/** Add to a node what a chunk has. */
function take(node, { choices, usage, timings }) {
  const { delta, finish_reason } = choices[0] ?? { delta: {} };
  node.content += delta.content ?? "";
  node.reasoning += delta.reasoning_content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = node.calls[index] ?? { id, name: called.name, args: "" };
    node.calls[index] = { ...call, args: call.args + (called.arguments ?? "") };
  }
  node.finish = finish_reason ?? node.finish;
  if (usage) node.usage = usage;
  if (timings) node.timings = timings;
}

/** What is kept under a key, in a list; an empty one if it is damaged. */
function kept(key) {
  try {
    return [cleaned(JSON.parse(localStorage[key]))];
  } catch {
    return [];
  }
}

function load() {
  if (book.runs.size) return;
  if (dirty.size) keep();
  if (book.problem) return; // what is here is nowhere else
  const shown = sessionStorage[KEY];
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(KEY));
  book.all = keys.flatMap(kept).sort((a, b) => b.at - a.at);
  book.open = book.all.find(({ id }) => id === shown) ?? book.open;
  draw();
}

try {
  load();
} catch {
  book.problem = FULL;
}
if (!book.open) show();
addEventListener("storage", load); // another tab has changed something
addEventListener("pagehide", keep);
