// Documents of a conversation: texts that are dropped onto the page. What fits a question goes into its prompt.

import { announce, el, iconButton, setText } from "./dom.js";
import { countTokens, embed, ServerError } from "./server.js";

const MAX_BYTES = 2_000_000; // of a file: conversations are kept in this browser, which has room for about five million characters
const MAX_DOCUMENTS = 8;
const PASSAGE = 900; // characters
const BATCH = 32; // passages that are embedded at once
const SHARE = 0.6; // of what the model reads at once, for passages
const ANSWER = 64; // tokens that an answer has at least
const KINDS = /\.(txt|text|md|markdown|mdown|rst|csv|tsv|log|json|ya?ml|toml|ini|html?|xml|css|[cm]?js|ts|py|c|h|cpp|rs|go|java|sh)$/i;
export const SERVE = "staticllm serve MODEL EMBEDDER";

/** Return the passages of a text: paragraphs, joined or cut to about PASSAGE characters. */
export function passagesOf(text) {
  const parts = text.replace(/\r\n?/g, "\n").split(/\n\s*\n/).flatMap((each) => cut(each.trim()));
  const found = [];
  for (const part of parts) {
    if (!part) continue;
    const last = found.at(-1);
    if (last !== undefined && last.length + part.length + 2 <= PASSAGE) found[found.length - 1] = `${last}\n\n${part}`;
    else found.push(part);
  }
  return found;
}

/** Cut a long paragraph at the ends of lines, sentences or words. */
function cut(text) {
  const found = [];
  let rest = text;
  while (rest.length > PASSAGE) {
    const head = rest.slice(0, PASSAGE);
    const ends = [head.lastIndexOf("\n"), Math.max(head.lastIndexOf(". "), head.lastIndexOf("? "), head.lastIndexOf("! ")) + 1, head.lastIndexOf(" ")];
    const at = ends.find((each) => each > PASSAGE / 3) ?? PASSAGE - (/[\ud800-\udbff]$/.test(head) ? 1 : 0);
    found.push(rest.slice(0, at).trim());
    rest = rest.slice(at).trim();
  }
  return [...found, rest];
}

/** Return the numbers of the passages that are nearest to a question, best first: those with the largest cosine. */
export function nearest(question, vectors) {
  const length = (vector) => Math.sqrt(vector.reduce((sum, each) => sum + each * each, 0)) || 1;
  const own = length(question);
  const scores = vectors.map((vector) => vector.reduce((sum, each, at) => sum + each * question[at], 0) / (length(vector) * own));
  return scores.map((score, at) => [score, at]).sort((one, other) => other[0] - one[0] || one[1] - other[1]).map(([, at]) => at);
}

/** Return the text that goes before a question: passages with the names of their documents. */
export function contextOf(passages) {
  const shown = passages.map(({ name, number, total, text }) => `[${name}${total > 1 ? `, passage ${number} of ${total}` : ""}]\n${text}`);
  return `Answer from these passages, and name the document that you use. If they do not say it, say so.\n\n${shown.join("\n\n")}\n\nQuestion: `;
}

/** The list of documents beside the field, the ways to add one, and what a question takes from them. */
export class Documents {
  constructor({ list, button, input, target, note }, { conversation, changed, notify }) {
    this.list = list;
    this.button = button;
    this.note = note;
    this.conversation = conversation;
    this.changed = changed;
    this.notify = notify;
    this.embedder = null;
    this.vectors = new Map(); // by embedder and passage; they are computed again after a reload
    button.addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
    });
    this.takeDrops(target);
  }

  takeDrops(target) {
    let depth = 0; // of the elements that the pointer has entered
    const isFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    const show = (by) => {
      depth = Math.max(0, depth + by);
      target.classList.toggle("is-drop", depth > 0);
    };
    addEventListener("dragenter", (event) => isFile(event) && show(1));
    addEventListener("dragleave", (event) => isFile(event) && show(-1));
    addEventListener("dragover", (event) => isFile(event) && event.preventDefault()); // else the browser opens the file
    addEventListener("drop", (event) => {
      if (!isFile(event)) return;
      event.preventDefault();
      show(-depth);
      this.add([...event.dataTransfer.files]);
    });
  }

  /** Say which embedder is served; null for none. */
  offer(embedder) {
    this.embedder = embedder ?? null;
    this.show();
  }

  async add(files) {
    const conversation = this.conversation();
    const documents = (conversation.documents ??= []);
    for (const file of files) {
      const problem = await this.read(file, documents);
      if (problem) this.notify(problem);
    }
    this.changed(conversation);
    this.show();
  }

  /** Read a file; return what is wrong with it, or nothing. */
  async read(file, documents) {
    const name = file.name.slice(0, 120);
    if (!file.type.startsWith("text/") && !KINDS.test(name)) return `${name} is no text file: plain text and Markdown can be read.`;
    if (file.size > MAX_BYTES) return `${name} has ${megabytes(file.size)}, at most ${megabytes(MAX_BYTES)} can be read: cut it into parts.`;
    if (documents.length >= MAX_DOCUMENTS) return `A conversation has at most ${MAX_DOCUMENTS} documents: remove one first.`;
    let text = "";
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()).trim();
    } catch {
      return `${name} is no text in UTF-8.`;
    }
    if (!text || text.includes("\0")) return `${name} has no text.`;
    const at = documents.findIndex((each) => each.name === name);
    documents.splice(at < 0 ? documents.length : at, at < 0 ? 0 : 1, { name, text });
    announce(`${name} was added.`);
    return "";
  }

  remove(name) {
    const conversation = this.conversation();
    conversation.documents = conversation.documents.filter((each) => each.name !== name);
    this.changed(conversation);
    this.show();
    this.button.focus();
    announce(`${name} was removed.`);
  }

  show() {
    const documents = this.conversation()?.documents ?? [];
    const item = ({ name, text }) =>
      el("li", {}, el("span", { class: "name" }, name), el("small", {}, `${passagesOf(text).length} passages`), iconButton("close", `Remove ${name}`, () => this.remove(name)));
    this.list.replaceChildren(...documents.map(item));
    this.list.hidden = !documents.length;
    this.note.hidden = !documents.length || Boolean(this.embedder);
    setText(this.note, `No embedding model is served, so that documents are sent whole, if they fit. Serve one beside it: ${SERVE}`);
  }

  /**
   * Return the passages for a question: `{ context, sources }`, or nothing without documents.
   * `fits(context)` resolves to whether a prompt with this context fits, `limit` are the tokens that the model reads at once.
   */
  async passagesFor(conversation, question, { model, limit, fits, signal, onHint }) {
    const documents = conversation.documents ?? [];
    if (!documents.length) return null;
    const all = documents.flatMap(({ name, text }) => passagesOf(text).map((each, at, { length }) => ({ name, number: at + 1, total: length, text: each })));
    const whole = documents.map(({ name, text }) => ({ name, number: 1, total: 1, text }));
    if (!this.embedder) {
      if (await fits(contextOf(whole))) return { context: contextOf(whole), sources: documents.map(({ name }) => `${name}, whole`) };
      const names = documents.map(({ name }) => name).join(", ");
      throw new ServerError(`${names}: too long for this model, which reads ${limit ?? "fewer"} tokens at once. Serve an embedding model beside it (${SERVE}), or raise --max-prompt-len.`);
    }
    const order = nearest(await this.vectorOf(question, signal), await this.vectorsOf(all, signal, onHint));
    let chosen = await this.withinShare(order.map((at) => all[at]), model, limit, signal);
    while (chosen.length > 1 && !(await fits(contextOf(chosen)))) chosen = chosen.slice(0, Math.ceil(chosen.length / 2));
    chosen.sort((one, other) => all.indexOf(one) - all.indexOf(other));
    return { context: contextOf(chosen), sources: chosen.map(({ name, number }) => `${name}, passage ${number}`) };
  }

  /** Return the best passages that fit into the share of the prompt, by the tokens that the best ones have. */
  async withinShare(passages, model, limit, signal) {
    const sample = passages.slice(0, 4).map(({ text }) => text).join("\n\n");
    const { count } = await countTokens({ model, content: sample }, signal);
    const characters = ((limit ?? 1024) - ANSWER) * SHARE * (sample.length / Math.max(count, 1));
    let used = 0;
    const found = passages.filter(({ text }) => (used += text.length) <= characters);
    return found.length ? found : passages.slice(0, 1);
  }

  async vectorOf(question, signal) {
    const [vector] = await embed({ model: this.embedder, input: [question], input_type: "query" }, signal);
    return vector;
  }

  async vectorsOf(passages, signal, onHint) {
    const key = ({ text }) => `${this.embedder}\n${text}`;
    const missing = [...new Map(passages.filter((each) => !this.vectors.has(key(each))).map((each) => [key(each), each])).values()];
    for (let at = 0; at < missing.length; at += BATCH) {
      onHint("Reading the documents, passages", at, missing.length);
      const part = missing.slice(at, at + BATCH);
      const vectors = await embed({ model: this.embedder, input: part.map(({ text }) => text), input_type: "document" }, signal);
      part.forEach((each, index) => this.vectors.set(key(each), vectors[index]));
    }
    return passages.map((each) => this.vectors.get(key(each)));
  }
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
