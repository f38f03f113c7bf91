// Shows Markdown. The text comes from a model and is hostile: only known elements are built, only text is set on them, HTML is
// shown as text, links lead to the web or to mail only, and images are not loaded but shown as links.

import { el, iconButton, copyText } from "./dom.js";

const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const MAX_DEPTH = 8;
const MAX_INLINE = 20000; // characters of a paragraph with marks; a longer one is shown as it is
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/; // of a line without spaces at its ends

/** Show text in a container. Blocks that have not changed since the last call keep their nodes, so that selections survive. */
export function showMarkdown(container, text) {
  const blocks = parseBlocks(text.replace(/\r\n?/g, "\n").split("\n"));
  const before = container.shownBlocks ?? [];
  let same = 0;
  while (same < before.length && same < blocks.length && before[same] === blocks[same].source) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(nodeOf(block, 0));
  container.shownBlocks = blocks.map((block) => block.source);
}

/** Return a URL that may be a link, or null. */
export function safeUrl(text) {
  let url;
  try {
    url = new URL(text.trim());
  } catch {
    return null;
  }
  return PROTOCOLS.has(url.protocol) ? url.href : null;
}

function parseBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = fenced(lines, at) ?? heading(lines, at) ?? list(lines, at) ?? quote(lines, at) ?? table(lines, at) ?? paragraph(lines, at);
    block.source = `${block.kind}\n${lines.slice(at, block.end).join("\n")}`;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function fenced(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, mark, language] = open;
  let end = at + 1;
  const isClosed = (line) => line.trim().length >= mark.length && line.trim() === mark[0].repeat(line.trim().length);
  while (end < lines.length && !isClosed(lines[end])) end += 1;
  return { kind: "code", language, text: lines.slice(at + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (found) return { kind: "heading", level: found[1].length, text: withoutMarks(found[2].trimEnd()), end: at + 1 };
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

/** Return the text of a heading without the marks at its end; a regular expression would look for them from every space. */
function withoutMarks(text) {
  let end = text.length;
  while (end && text[end - 1] === "#") end -= 1;
  return end && !/\s/.test(text[end - 1]) ? text : text.slice(0, end).trimEnd();
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const depth = line.length - line.trimStart().length;
    if (item && depth <= indent + 1) {
      if (depth < indent || /\d/.test(item[2]) !== isOrdered || RULE.test(line)) break;
      items.push([item[3]]);
    } else if (!line.trim()) {
      const next = lines[end + 1];
      const goesOn = next?.trim() && (next.startsWith(" ".repeat(indent + 2)) || (ITEM.test(next) && !RULE.test(next)));
      if (!goesOn) break;
      items.at(-1).push("");
    } else if (depth > indent) {
      items.at(-1).push(line.slice(Math.min(depth, indent + 2)));
    } else if (items.at(-1).at(-1) && !startsBlock(line)) {
      items.at(-1).push(line);
    } else break;
    end += 1;
  }
  return { kind: "list", isOrdered, start: isOrdered ? Number.parseInt(first[2], 10) : 1, items, end };
}

function quote(lines, at) {
  const inner = [];
  let end = at;
  for (let found; end < lines.length && (found = QUOTE.exec(lines[end])); end += 1) inner.push(found[1]);
  return inner.length ? { kind: "quote", lines: inner, end } : null;
}

function table(lines, at) {
  const rule = lines[at + 1];
  if (!lines[at].includes("|") || rule === undefined || !rule.includes("-") || !TABLE_RULE.test(rule.trim())) return null;
  const head = cells(lines[at]);
  const marks = cells(rule);
  if (marks.length !== head.length) return null;
  const aligns = marks.map((mark) => (/^:-+:$/.test(mark) ? "center" : /-:$/.test(mark) ? "end" : "start"));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|") && lines[end].trim(); end += 1) rows.push(cells(lines[end]));
  return { kind: "table", head, aligns, rows, end };
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).map((line) => line.trim()).join("\n"), end };
}

function nodeOf(block, depth) {
  if (block.kind === "code") return codeBlock(block);
  if (block.kind === "rule") return el("hr");
  if (block.kind === "heading") return el(`h${Math.min(6, block.level + 1)}`, {}, inline(block.text));
  if (block.kind === "list") {
    const start = block.isOrdered && block.start !== 1 ? block.start : null;
    return el(block.isOrdered ? "ol" : "ul", { start }, block.items.map((item) => el("li", {}, nested(item, depth))));
  }
  if (block.kind === "quote") return el("blockquote", {}, nested(block.lines, depth));
  if (block.kind === "table") return tableNode(block);
  return el("p", {}, inline(block.text));
}

/** Return the nodes of lines inside a list item or a quote; a single paragraph is shown without its element. */
function nested(lines, depth) {
  if (depth >= MAX_DEPTH) return [lines.join("\n")];
  const blocks = parseBlocks(lines);
  return blocks.map((block, index) => (index === 0 && block.kind === "paragraph" ? inline(block.text) : [nodeOf(block, depth + 1)])).flat();
}

function codeBlock(block) {
  const code = el("code", {}, block.text);
  const button = iconButton("copy", "Copy code", () => copyText(block.text, button));
  const bar = el("div", { class: "code-bar" }, el("span", {}, block.language.slice(0, 40) || "text"), button);
  return el("div", { class: "code" }, bar, el("pre", { tabindex: "0", role: "region", "aria-label": "Code" }, code));
}

function tableNode({ head, aligns, rows }) {
  const cell = (tag) => (text, index) => el(tag, { class: `align-${aligns[index]}`, scope: tag === "th" ? "col" : null }, inline(text ?? ""));
  const body = rows.map((row) => el("tr", {}, head.map((_, index) => cell("td")(row[index], index))));
  const whole = el("table", {}, el("thead", {}, el("tr", {}, head.map(cell("th")))), el("tbody", {}, body));
  return el("div", { class: "table-frame", tabindex: "0", role: "region", "aria-label": "Table" }, whole);
}

/** Return the nodes of a text with marks inside a line. */
export function inline(text) {
  return text.length > MAX_INLINE ? [text] : new Inline(text, 0).nodes();
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

class Inline {
  constructor(text, depth, isInLink = false) {
    this.isInLink = isInLink;
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = "";
    this.found = [];
    this.unclosed = new Set(); // marks that have no end in the rest of the text, so that none is searched for twice
  }

  nodes() {
    while (this.at < this.text.length) {
      if (!this.special()) this.plain += this.text[this.at++];
    }
    this.flush();
    return this.found;
  }

  flush() {
    if (this.plain) this.found.push(this.plain);
    this.plain = "";
  }

  push(node, end) {
    this.flush();
    this.found.push(node);
    this.at = end;
    return true;
  }

  special() {
    const char = this.text[this.at];
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(this.text[this.at + 1] ?? "")) {
      this.plain += this.text[this.at + 1];
      this.at += 2;
      return true;
    }
    if (char === "\n") return this.push(el("br"), this.at + 1);
    if (char === "`") return this.code();
    if (this.isInLink) return "*_~".includes(char) && this.mark();
    if (char === "[" || (char === "!" && this.text[this.at + 1] === "[")) return this.link();
    if (char === "h" || char === "<") return this.bareLink();
    return "*_~".includes(char) && this.mark();
  }

  code() {
    const mark = /^`+/.exec(this.text.slice(this.at, this.at + 32))[0];
    let end = this.unclosed.has(mark) ? -1 : this.text.indexOf(mark, this.at + mark.length);
    while (end >= 0 && this.text[end + mark.length] === "`") {
      while (this.text[end] === "`") end += 1;
      end = this.text.indexOf(mark, end);
    }
    if (end < 0) {
      this.unclosed.add(mark);
      this.plain += mark;
      this.at += mark.length;
      return true;
    }
    const inner = this.text.slice(this.at + mark.length, end).replace(/\n/g, " ");
    return this.push(el("code", {}, /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner), end + mark.length);
  }

  link() {
    const rest = this.text.slice(this.at, this.at + 2500);
    const found = /^!?\[((?:[^[\]\\\n]|\\.){0,400})\]\(\s*<?([^\s<>()]{1,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)>?(?:\s+"[^"\n]{0,200}")?\s*\)/.exec(rest);
    if (!found) return false;
    const isImage = rest[0] === "!";
    const url = safeUrl(found[2]);
    const label = isImage ? [`Image: ${found[1] || "without description"}`] : this.inner(found[1], true);
    return this.push(url ? anchor(url, label) : el("span", { class: "no-link", title: "This link is not opened from here." }, label), this.at + found[0].length);
  }

  bareLink() {
    const before = this.text[this.at - 1] ?? " ";
    const found = /^(?:<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>|(https?:\/\/[^\s<>"'`]{1,2000}))/.exec(this.text.slice(this.at, this.at + 2050));
    if (!found || (found[2] && /\w/.test(before))) return false;
    const shown = found[1] ?? found[2].replace(/[.,;:!?*_)\]]+$/, "");
    const url = safeUrl(shown);
    return url ? this.push(anchor(url, [shown]), this.at + (found[1] ? found[0].length : shown.length)) : false;
  }

  mark() {
    const before = this.text[this.at - 1] ?? " ";
    for (const [mark, tag] of MARKS) {
      if (!this.text.startsWith(mark, this.at)) continue;
      const begin = this.at + mark.length;
      if (/\s/.test(this.text[begin] ?? " ") || (mark[0] === "_" && /\w/.test(before))) continue;
      const end = this.endOf(mark, begin);
      if (end > begin) return this.push(el(tag, {}, this.inner(this.text.slice(begin, end))), end + mark.length);
    }
    return false;
  }

  endOf(mark, begin) {
    if (this.unclosed.has(mark) || this.depth >= MAX_DEPTH) return -1;
    let end = this.text.indexOf(mark, begin);
    while (end >= 0) {
      const isDouble = mark.length === 1 && (this.text[end + 1] === mark || this.text[end - 1] === mark);
      const isInWord = mark[0] === "_" && /\w/.test(this.text[end + mark.length] ?? " ");
      if (end > begin && !isDouble && !isInWord && !/\s/.test(this.text[end - 1])) return end;
      end = this.text.indexOf(mark, end + (isDouble ? 2 : 1));
    }
    this.unclosed.add(mark);
    return -1;
  }

  inner(text, isInLink = this.isInLink) {
    return new Inline(text, this.depth + 1, isInLink).nodes();
  }
}

function anchor(url, label) {
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", referrerpolicy: "no-referrer" }, label);
}
