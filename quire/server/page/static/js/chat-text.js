// Text of a model as elements: a part of Markdown. Nothing in it becomes markup, a link or a picture.

import { Component, html, useState } from "../vendor/preact.js";

const MAX_INDENT = 16;
const FENCE = /^ *(```+|~~~+) *([\w+#.-]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(?=\S)/;
const HEADING = /^#{1,6} +/;
const RULE = /^[\s|:]*--[\s|:-]*$/; // below the head of a table
// Code, strong, emphasis, and links or pictures.
const INLINE =
  /(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|!?\[([^[\]\n]*)\]\(([^()\s]+)\)/gs;

/** Draw a component again only when one of its properties is another. */
export const memo = (Inner) =>
  class extends Component {
    shouldComponentUpdate(next) {
      return Object.keys(next).some((name) => next[name] !== this.props[name]);
    }
    render(props) {
      return html`<${Inner} ...${props} />`;
    }
  };

/** A button that copies a text. Without TLS a browser has no clipboard, but obeys an old command. */
export function Copy({ text }) {
  const [done, setDone] = useState(false);
  const click = ({ currentTarget }) => {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    currentTarget.focus();
    setDone(true);
    setTimeout(setDone, 1500, false);
  };
  return html`<button type="button" class="quiet" onClick=${click}>${done ? "Copied" : "Copy"}</button>`;
}

export const Code = ({ title, text, place }) => html`<div class=${`code ${place}`}>
  <p><span>${title}</span><${Copy} text=${text} /></p><pre tabindex="0">${text}</pre></div>`;

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [all, , code, strong, emphasis, words, address] = found;
    parts.push(text.slice(end, found.index));
    end = found.index + all.length;
    if (address) parts.push(words, " ");
    if (code || address) parts.push(html`<code>${code || address}</code>`);
    else parts.push(html`<${strong ? "strong" : "em"}>${inline(strong || emphasis)}<//>`);
  }
  return [...parts, text.slice(end)];
}

/** What kind of block begins with a line. */
function kindOf(line, next = "") {
  if (FENCE.test(line)) return "code";
  if (ITEM.test(line)) return "list";
  if (HEADING.test(line)) return "heading";
  return line.includes("|") && RULE.test(next) ? "table" : line.trim() && "text";
}

// Whether a line goes on with a block of a kind.
const GOES_ON = {
  code: (line, first) => line.trim() !== FENCE.exec(first)[1],
  list: (line) => ITEM.test(line) || /^ +\S/.test(line),
  table: (line) => line.includes("|"),
  text: (line) => kindOf(line) === "text",
};

/** Cut a text into the sources of its blocks. A text that grows changes the last ones only. */
function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  for (let at = 0, end; at < lines.length; at = end) {
    const kind = kindOf(lines[at], lines[at + 1]);
    end = at + 1;
    while (end < lines.length && GOES_ON[kind]?.(lines[end], lines[at])) end += 1;
    if (kind === "code") end += 1; // its last line
    if (kind) found.push([kind, lines.slice(at, end).join("\n")]);
  }
  return found;
}

const row = (line, Cell) =>
  html`<tr>${line
    .replace(/^\s*\||\|\s*$/g, "")
    .split("|")
    .map((cell) => html`<${Cell}>${inline(cell)}<//>`)}</tr>`;

/** A list; lines that begin no item belong to the one before. */
function list(lines) {
  const items = [];
  for (const line of lines) {
    const [mark, indent, sign] = ITEM.exec(line) ?? [];
    if (mark)
      items.push([Math.min(indent.length, MAX_INDENT) / 2, parseInt(sign), line.slice(mark.length)]);
    else items.at(-1)[2] += `\n${line.trim()}`;
  }
  return html`<${items[0][1] >= 0 ? "ol" : "ul"}>${items.map(
    ([indent, value, text]) =>
      html`<li value=${value || null} style=${{ marginLeft: `${indent}em` }}>${inline(text)}</li>`,
  )}<//>`;
}

const Block = memo(({ kind, source }) => {
  const lines = source.split("\n");
  const [first] = lines;
  if (kind === "code") {
    const [, mark, language] = FENCE.exec(first);
    const closed = lines[1] != null && lines.at(-1).trim() === mark;
    return html`<${Code} title=${language} text=${lines.slice(1, closed ? -1 : undefined).join("\n")} />`;
  }
  if (kind === "list") return list(lines);
  if (kind === "heading") return html`<h3>${inline(first.replace(HEADING, ""))}</h3>`;
  if (kind === "text") return html`<p>${inline(source)}</p>`;
  return html`<div class="wide" tabindex="0"><table>${row(first, "th")}${lines
    .slice(2)
    .map((line) => row(line, "td"))}</table></div>`;
});

export const Markdown = ({ text }) =>
  blocks(text).map(([kind, source], key) => html`<${Block} key=${key} kind=${kind} source=${source} />`);
