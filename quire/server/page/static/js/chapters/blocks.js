// Chapter 4: the KV cache in blocks. Who holds which, what is shared, and what a second request finds there.

import { html, useRef, useState } from "../../vendor/preact.js";
import { answers, randomIds, recorded, recordedFrame, tryPrompt } from "../api.js";
import { bytes, integer, ms } from "../format.js";
import { live, useLive } from "../live.js";
import { Action, Chapter, Choice, Empty, Figure, Formula, Legend, Slider, Stat } from "../parts.js";
import { ownerOf, useWidth } from "../parts.js";

const NUM_TOKENS = [512, 192], // of the answers, at most: long enough for both to be seen
  ATTEMPTS = 3, // on a busy machine the second may come too late
  TAIL = 12; // tokens at the end of a prompt that the other one does not have
const CELL = 15,
  HIGH = 240; // of the map, in pixels
const LISTED = 6; // block tables
const OWN = ["first", "second"];
const FIELDS = [
  ["prompt_tokens", "tokens of the prompt", integer],
  ["cached_tokens", "found in the cache", integer],
  ["computed_tokens", "computed", integer],
  ["cached_saved_ms", "time saved, predicted", ms, "predicted"],
];
const LEGEND = [
  ["owner-0", "held by one sequence"],
  ["shared-ink", "shared"],
  ["hollow shared-ink", "held by none, findable"],
  ["hollow muted-ink", "free"],
];

/** Blocks of a group by number: holders, findable, tone, and the tables they are in. */
function blocksOf({ blocks, tables }, tags) {
  const found = new Map(blocks.map(([id, holders, findable]) => [id, { id, holders, findable, tags: [] }]));
  for (const { tag, first, blocks: ids } of tables)
    ids.forEach((id, index) => {
      const block = found.get(id);
      if (!block) return;
      block.tags.push(tag);
      block.index = first + index;
      block.tone = block.holders > 1 ? "shared-ink" : toneOf(tag, tags);
    });
  return found;
}

/** The colour of a request; `tags` are this page's own. */
function toneOf(tag, tags) {
  const own = tags.indexOf(tag);
  return `owner-${own < 0 ? ownerOf(tag) : own}`;
}

function wordsOf(id, { holders, findable, index, tags } = {}) {
  const size = live.facts.block_size;
  const at = index * size;
  const held = holders && `, for tokens ${at} to ${at + size - 1} of ${tags.join(" and ")}`;
  return holders == null
    ? `Block ${id} is free.`
    : `Block ${id}: reference count ${holders}${held || ""}.${findable ? " A prompt can find it." : ""}`;
}

/** Blocks in the order of their numbers, up to the last one in use. Of many, a cell stands for several. */
function Memory({ group, known, chosen, onChoose }) {
  const [ref, width] = useWidth();
  const ids = [...known.keys()].sort((a, b) => a - b),
    columns = Math.floor(width / CELL);
  const used = Math.min(group.num_blocks, Math.max(5 * columns, ids.at(-1) + 1 || 0)),
    each = Math.ceil(used / columns / Math.floor(HIGH / CELL));
  const cells = Array(Math.ceil(used / each)).fill(),
    paths = {}; // by class: few elements for thousands of blocks
  for (const block of known.values()) {
    const cell = Math.floor(block.id / each);
    if (!(cells[cell]?.holders >= block.holders)) cells[cell] = block;
  }
  const box = (cell) => {
    const [x, y] = [cell % columns, Math.floor(cell / columns)].map((count) => count * CELL + 1);
    return `M${x} ${y}h12v12h-12z`;
  };
  cells.forEach((block, cell) => {
    const tone = block ? (block.tone ?? "found") : "free";
    paths[tone] = (paths[tone] ?? "") + box(cell);
  });
  const click = (event) => {
    const at = event.currentTarget.getBoundingClientRect();
    const [x, y] = [event.clientX - at.left, event.clientY - at.top].map((far) => Math.floor(far / CELL));
    const cell = y * columns + Math.min(x, columns - 1);
    if (cell < cells.length) onChoose(cells[cell]?.id ?? cell * each);
  };
  const press = (event) => {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!by || !ids.length) return;
    event.preventDefault();
    onChoose(ids[Math.max(0, Math.min(ids.length - 1, ids.indexOf(chosen) + by))]);
  };
  const words =
    chosen == null ? "Click a block, or use the arrow keys." : wordsOf(chosen, known.get(chosen));
  return html`<div ref=${ref} class="memory" onClick=${click} onKeyDown=${press} tabindex="0" role="slider"
      aria-label="Block" aria-valuemin="0" aria-valuemax=${group.num_blocks - 1} aria-valuenow=${chosen ?? 0}
      aria-valuetext=${words}>
      <svg viewBox=${`0 0 ${width} ${Math.ceil(cells.length / columns) * CELL}`} aria-hidden="true">
        ${Object.entries(paths).map(([tone, path]) => html`<path class=${tone} d=${path} />`)}
        ${chosen < used && html`<path class="picked" d=${box(Math.floor(chosen / each))} />`}
      </svg></div>
    <p class="note">${each > 1 && `A square stands for ${each} blocks. `}${
      used < group.num_blocks && `${integer(group.num_blocks - used)} more are free. `
    }${words}</p>`;
}

/** The blocks of a sequence in the order of its tokens. */
function Row({ table, known, tags, chosen, onChoose }) {
  const { tag, num_tokens: count, num_cached_tokens: cached } = table;
  const cell = (id, index) => {
    const { tone, holders } = known.get(id) ?? {},
      full = count >= (table.first + index + 1) * live.facts.block_size;
    return html`<i class=${`${tone} ${full ? "" : "part"} ${id === chosen ? "here" : ""}`}
      onClick=${() => onChoose(id)}><b>${id}${holders > 1 && html`<sup>${holders}</sup>`}</b></i>`;
  };
  return html`<li><i class=${toneOf(tag, tags)}>■</i> <b>${OWN[tags.indexOf(tag)]}</b> <code>${tag}</code>
    <span class="note"> ${integer(count)} tokens${cached > 0 && `, ${integer(cached)} of them found`}</span>
    <div class="cells">${table.blocks.map(cell)}</div></li>`;
}

/** Send two requests with the same beginning, the second while the first one writes its answer. `tags` gets
 * theirs. */
async function sendTwo(numShared, signal, tags) {
  const { vocab_size: size, max_model_len: longest } = live.facts.model,
    shared = randomIds(numShared, size),
    salt = String(Math.random());
  const ask = (number, onChunk) => {
    const promptIds = [...shared, ...randomIds(TAIL, size)],
      numTokens = Math.min(NUM_TOKENS[number], longest - promptIds.length);
    const onTag = (tag) => (tags[number] = tag);
    return tryPrompt({ promptIds, numTokens, salt, signal, onChunk, onTag });
  };
  let first;
  await new Promise((resolve, reject) => {
    first = ask(0, resolve);
    first.then(resolve, reject);
  });
  return Promise.all([first, ask(1)]);
}

/** True while both requests run. */
const bothRun = (cache, tags) =>
  tags.length > 1 && tags.every((tag) => cache?.groups[0].tables.some((table) => table.tag === tag));

export default function Blocks() {
  const { cache, facts } = useLive();
  const [numShared, setNumShared] = useState(200),
    [tags, setTags] = useState([]),
    [pair, setPair] = useState(null),
    [then, setThen] = useState(false), // show the moment when both ran
    [chosen, onChoose] = useState();
  const moment = useRef(null);
  const send = async (signal) => {
    moment.current = null;
    setThen(false);
    let own = [],
      found = answers.filter(({ kind }) => kind === "alike");
    if (recorded) {
      own = found.map(({ tag }) => tag);
      moment.current = (await recordedFrame((frame) => bothRun(frame.cache, own)))?.cache;
    }
    for (let left = recorded ? 0 : ATTEMPTS; left && !moment.current; left -= 1) {
      setTags((own = []));
      live.onFrame = () => bothRun(live.cache, own) && (moment.current = live.cache);
      found = await sendTwo(numShared, signal, own);
    }
    setTags(own);
    setPair(found);
    setThen(!!moment.current);
  };
  const group = (then ? moment.current : cache)?.groups[0];
  const shown = { group, tags, chosen, onChoose, known: group && blocksOf(group, tags) };
  const tables = [...(group?.tables ?? [])].sort((a, b) => tags.includes(b.tag) - tags.includes(a.tag));
  const { kv_bytes_per_token: each, max_model_len: longest = 1024 } = facts?.model ?? {},
    size = facts?.block_size;
  return html`<${Chapter} title="Memory in pages"
    lead="Nobody knows how long an answer will be. So the cache is cut into blocks. A request takes one when
      its last is full, from anywhere in memory; a table says where each is."
    short="Memory is spent on tokens that are there, not on those that might come. And a block can be in many
      tables: what prompts begin with is computed once and kept once.">
    <div class="controls">
      <${Slider} label="tokens they share" value=${numShared} min=${16} log=${true} format=${integer}
        max=${Math.max(32, longest - 2 * NUM_TOKENS[1])} onInput=${setNumShared} />
      <${Action} label="Send two that begin alike" busy="Computing" work=${send} disabled=${!each} />
    </div>
    <${Figure} title="The blocks of the cache" kind="measured">
      ${
        moment.current &&
        html`<${Choice} label="show" value=${then} onChoose=${setThen}
          options=${[
            [true, "while both ran"],
            [false, "now"],
          ]} />`
      }
      ${
        group
          ? html`<${Legend} items=${LEGEND} /><${Memory} ...${shown} />
          <div class="stats">${["held", "free", "findable"].map(
            (name) => html`<${Stat} label=${name} value=${group[`num_${name}`]} format=${integer}
              field=${`cache.num_${name}`} />`,
          )}</div>`
          : html`<${Empty}>Nothing is known of the blocks yet.<//>`
      }
    <//>
    ${
      tables.length > 0 &&
      html`<${Figure} title="Their tables" kind="measured" note="Each number is a place in memory; they are in
        the order of the tokens. The small number is the reference count. A dashed block is not full.">
        <ul class="tables">
          ${tables.slice(0, LISTED).map((table) => html`<${Row} table=${table} ...${shown} />`)}</ul>
      <//>`
    }
    ${
      pair &&
      html`<${Figure} title="The same beginning, twice" kind="measured"><table class="versus">
        <thead><tr><td></td>${OWN.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
        ${FIELDS.map(
          ([field, words, format, kind = "measured"]) =>
            html`<tr><th scope="row">${words}</th>${pair.map(
              ({ timings }) => html`<td class=${kind} data-field=${`timings.${field}`}
              data-value=${timings[field]}>${format(timings[field])}</td>`,
            )}</tr>`,
        )}
      </table><p>Found are full blocks, up to the first token that differs: here
        ${" "}${pair[1].timings.cached_tokens / size}. The answer is the same as if all had been
        computed. In a chat this happens each time: all that was said before is sent again.</p><//>`
    }
    ${
      each &&
      html`<p>Without blocks, a request would reserve memory for the longest answer it might give:
        ${" "}${bytes(longest * each)}. With them it wastes the end of its last block, at most
        ${" "}${bytes((size - 1) * each)}.</p>`
    }
    <${Formula}>n tokens take ⌈n ÷ ${size}⌉ blocks. A full block is named SHA-256(name of the one before, its
      tokens): equal names, equal beginnings. Its reference count is the number of tables it is in. At 0 it
      stays findable until it is taken, as the one unused for longest.<//>
  <//>`;
}
