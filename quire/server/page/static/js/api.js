// Requests to the server of this page, or to a recording of one.

export const recorded = document.querySelector('meta[name="quire-data"]').content === "recorded";
const recording = recorded ? fetch("page/recorded.json").then((reply) => reply.json()) : null;
const KEY = "quire-key"; // kept by this tab only, and sent in a header, never in an address

/** An error of the server: its message, and a hint what to do. */
export class ApiError extends Error {
  constructor(status, message, hint) {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

/** The name that requests give of a model, where the server has several. */
export const chosen = {};

export const setKey = (key) => sessionStorage.setItem(KEY, key);
const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};

async function send(path, body, signal) {
  const options = { headers: headers(), signal, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const url = new URL(path.slice(1), document.baseURI);
  if (chosen.name) url.searchParams.set("model", chosen.name);
  let reply;
  try {
    reply = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.", "Is it still running?");
  }
  if (!reply.ok) throw await problem(reply);
  return reply;
}

async function problem(reply) {
  let error = {};
  try {
    const content = await reply.json();
    error = typeof content.error === "object" ? content.error : { message: content.error };
  } catch {
    /* not JSON: the status says enough */
  }
  const message = error.message ?? `The server answered ${reply.status}.`;
  const found = new ApiError(reply.status, message, error.hint);
  found.retry_s = Number(reply.headers.get("retry-after"));
  return found;
}

/** Return the JSON of a GET, or of a POST if there is a body. */
export async function json(path, body, signal) {
  if (recorded) {
    const replies = (await recording).replies;
    const [name] = path.split("?");
    if (!(name in replies)) throw new ApiError(404, "This was not recorded.");
    return replies[name];
  }
  return (await send(path, body, signal)).json();
}

/** Return the bytes of a GET. */
export async function file(path, signal) {
  if (recorded) return (await fetch("page/recorded.pftrace", { signal })).arrayBuffer();
  return (await send(path, undefined, signal)).arrayBuffer();
}

async function* textLines(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield* lines;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Yield the objects of a stream of JSON lines. */
export async function* jsonLines(path, body, signal) {
  if (recorded) {
    yield* replay(await recording, path);
    return;
  }
  for await (const line of textLines(await send(path, body, signal))) if (line) yield JSON.parse(line);
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let replayed_s = 0; // the time of the last frame

async function* replay(content, path) {
  if (path === "/page/events") {
    const begin = performance.now(),
      [first] = content.frames;
    for (const frame of content.frames) {
      const wait = (frame.t - first.t) * 1e3 - (performance.now() - begin);
      if (wait > 0) await sleep(wait);
      replayed_s = frame.t;
      yield frame;
    }
    await sleep(1500);
    yield { t: replayed_s + 1.5 }; // nothing has happened since
    return;
  }
  const lines = content.experiments[path.split("/").pop()];
  if (!lines) throw new ApiError(404, "This was not recorded.");
  yield* lines;
}

/** Stream a generation: yield the chunks of its events; `onTag` gets its tag. */
export async function* chunks(path, body, signal, onTag = () => {}) {
  if (recorded)
    throw new ApiError(
      0,
      "This page shows a recording.",
      "Start quire serve to ask an engine of your own.",
    );
  const reply = await send(path, { ...body, model: chosen.name }, signal);
  onTag(reply.headers.get("x-quire-tag"));
  for await (const line of textLines(reply)) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new ApiError(chunk.error.code ?? 500, chunk.error.message, chunk.error.hint);
    yield chunk;
  }
}

/** Answers of this page's own requests, the newest last: {tag, sent_s, token_s: [...], timings, text,
 * drafting}. Times: performance.now. */
export const answers = [];
if (recorded) recording.then((content) => answers.push(...content.answers));

/** The last frame of the recording that fits. */
export const recordedFrame = async (fits) => (await recording).frames.findLast(fits);

/** Send a request, and note its answer as it comes: `onChunk` gets each chunk, `onTag` the tag that its rows
 * have in live.steps. Return the answer. */
export async function ask(path, body, { signal, onTag, onChunk }) {
  const sent_s = performance.now() / 1e3;
  const answer = { tag: null, sent_s, token_s: [], timings: null, text: "", drafting: [] };
  answers.push(answer);
  if (answers.length > 100) answers.shift();
  const tagged = (tag) => {
    answer.tag = tag;
    onTag?.(tag);
  };
  for await (const chunk of chunks(path, { ...body, stream: true }, signal, tagged)) {
    const { text, delta = {}, drafting } = chunk.choices[0] ?? {};
    if (drafting) answer.drafting.push(drafting);
    if (text || delta.content || delta.reasoning_content || delta.tool_calls)
      answer.token_s.push(performance.now() / 1e3);
    answer.text += text ?? delta.content ?? "";
    answer.timings = chunk.timings ?? answer.timings;
    onChunk?.(chunk);
  }
  return answer;
}

/** Return the recorded answer to a prompt of random tokens that is nearest in length. */
async function nearest(numPrompt, onTag) {
  const far = ({ timings }) => Math.abs(Math.log(timings.prompt_tokens / numPrompt));
  const tried = (await recording).answers.filter(({ kind }) => kind === "alone");
  const found = tried.reduce((best, one) => (far(one) < far(best) ? one : best));
  onTag?.(found.tag);
  while (replayed_s < found.token_s.at(-1)) await sleep(50);
  return found;
}

/** Send random tokens as a prompt to the engine, and return the answer: for chapters that try something.
 * A recording has a few lengths. */
export async function tryPrompt({
  numPrompt,
  numTokens,
  vocabSize,
  promptIds,
  salt,
  signal,
  onTag,
  onChunk,
}) {
  if (recorded) return nearest(promptIds?.length ?? numPrompt, onTag);
  const body = {
    prompt: promptIds ?? randomIds(numPrompt, vocabSize),
    max_tokens: numTokens,
    ignore_eos: true,
    temperature: 2, // nothing repeats, so that drafts do not end it at once
    seed: 1,
    cache_salt: salt ?? String(crypto.getRandomValues(new Uint32Array(4))),
    stream_options: { include_usage: true },
  };
  return ask("/v1/completions", body, { signal, onTag, onChunk });
}

export const randomIds = (count, vocabSize) =>
  Array.from({ length: count }, () => 16 + Math.floor(Math.random() * (vocabSize - 16)));
