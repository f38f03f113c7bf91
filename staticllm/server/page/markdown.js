// Shows Markdown. The text comes from a model and is hostile: markdown-it parses it, and of its tokens only known elements are
// built, with text and never with HTML. HTML is shown as text, links lead to the web or to mail only, and images are not loaded
// but shown as links.

import MarkdownIt from "./markdown-it.js";
import { el, iconButton, copyText } from "./dom.js";

const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const TAGS = { s: "del", h1: "h2", h2: "h3", h3: "h4", h4: "h5", h5: "h6" };
const PLAIN = new Set("blockquote br del em h2 h3 h4 h5 h6 hr li p strong tbody thead tr ul".split(" "));

const parser = new MarkdownIt({ linkify: true, breaks: true, maxNesting: 24 });
parser.disable("reference"); // a definition would change blocks that are shown already
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = () => true; // safeUrl decides

/** Show text in a container. Blocks that have not changed since the last call keep their nodes, so that selections survive. */
export function showMarkdown(container, text) {
  const blocks = blocksOf(text);
  const before = container.shownBlocks ?? [];
  let same = 0;
  while (same < before.length && same < blocks.length && before[same] === blocks[same].source) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const { tokens } of blocks.slice(same)) container.append(...nodesOf(tokens));
  container.shownBlocks = blocks.map(({ source }) => source);
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

/** Return the blocks of a text: the tokens of each, and what it was made of. */
function blocksOf(text) {
  const source = text.replace(/\r\n?/g, "\n");
  const lines = source.split("\n");
  const blocks = [];
  let depth = 0;
  for (const token of parser.parse(source, {})) {
    if (depth === 0) blocks.push({ tokens: [], source: `${token.type}\n${lines.slice(...token.map).join("\n")}` });
    blocks.at(-1).tokens.push(token);
    depth += token.nesting;
  }
  return blocks;
}

/** Build the nodes of tokens. What an opening token begins, its closing token ends. */
function nodesOf(tokens) {
  const open = [[]]; // the children of each element that is open
  const ends = []; // make an element of its children
  for (const token of tokens) {
    if (token.nesting < 0) {
      const node = ends.pop()(open.pop());
      open.at(-1).push(...node);
    } else if (token.nesting > 0) {
      open.push([]);
      ends.push((children) => [element(token, children)].flat());
    } else open.at(-1).push(...leaf(token));
  }
  return open[0];
}

function leaf(token) {
  if (token.type === "inline") return nodesOf(token.children);
  if (token.type === "fence" || token.type === "code_block") return [codeBlock(token)];
  if (token.type === "code_inline") return [el("code", {}, token.content)];
  if (token.type === "image") return [link(token.attrGet("src"), [`Image: ${token.content || "without description"}`])];
  if (token.type === "softbreak" || token.type === "hardbreak") return [el("br")];
  return token.type === "hr" ? [el("hr")] : [token.content];
}

function element(token, children) {
  const tag = TAGS[token.tag] ?? token.tag;
  if (token.hidden) return children; // the paragraph of a tight list
  if (tag === "a") return link(token.attrGet("href"), children);
  if (tag === "ol") return el("ol", { start: token.attrGet("start") }, children);
  if (tag === "th" || tag === "td") return cell(tag, token.attrGet("style"), children);
  if (tag === "table") return el("div", { class: "table-frame", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, children));
  return el(PLAIN.has(tag) ? tag : "span", {}, children);
}

function cell(tag, style, children) {
  const align = /center|right/.exec(style ?? "")?.[0] ?? "start";
  return el(tag, { class: `align-${align === "right" ? "end" : align}`, scope: tag === "th" ? "col" : null }, children);
}

function link(target, label) {
  const url = safeUrl(target ?? "");
  if (!url) return el("span", { class: "no-link", title: "This link is not opened from here." }, label);
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", referrerpolicy: "no-referrer" }, label);
}

function codeBlock(token) {
  const text = token.content.replace(/\n$/, "");
  const button = iconButton("copy", "Copy code", () => copyText(text, button));
  const language = token.info.trim().split(/\s/)[0].slice(0, 40) || "text";
  const bar = el("div", { class: "code-bar" }, el("span", {}, language), button);
  return el("div", { class: "code" }, bar, el("pre", { tabindex: "0", role: "region", "aria-label": "Code" }, el("code", {}, text)));
}
