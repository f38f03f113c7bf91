// Keeps the conversations in the browser: one entry each, bounded in number and size, the oldest are dropped first.

const PREFIX = "staticllm.conversation.";
const DEFAULTS = "staticllm.defaults";
export const MAX_CONVERSATIONS = 60;
export const MAX_CHARACTERS = 4_000_000; // browsers keep about five million

const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

/** Return a message. `state` is "done", "streaming", "stopped" or "error". */
export function newMessage(role, content, state = "done") {
  return { id: newId(), role, content, state };
}

/** The conversations of this browser, newest first. `onChange(id)` is called when another tab has changed one, unless it `isBusy(id)` here. */
export class Conversations {
  constructor({ onChange, isBusy }) {
    this.isBusy = isBusy;
    this.all = new Map();
    for (const key of Object.keys(localStorage)) {
      const found = key.startsWith(PREFIX) && parse(localStorage.getItem(key));
      if (found) this.all.set(found.id, found);
    }
    this.timers = new Map();
    addEventListener("pagehide", () => this.flush());
    addEventListener("storage", (event) => {
      if (!event.key?.startsWith(PREFIX)) return;
      const id = event.key.slice(PREFIX.length);
      const found = parse(event.newValue);
      if (this.isBusy(id)) return; // it is streamed here: this tab writes it
      if (found) this.all.set(id, found);
      else this.all.delete(id);
      onChange(id);
    });
  }

  list() {
    return [...this.all.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.all.get(id);
  }

  /** Return whether a conversation is kept: it was neither deleted nor replaced by that of another tab. */
  has(conversation) {
    return this.all.get(conversation.id) === conversation;
  }

  /** Return a new conversation. It is kept as soon as it has a message. */
  create(model) {
    const defaults = parseObject(localStorage.getItem(DEFAULTS)) ?? {};
    const now = Date.now();
    return { id: newId(), title: "", model, settings: cleanSettings(defaults), messages: [], created: now, updated: now };
  }

  /** Let new conversations begin with these settings. */
  setDefaults(settings) {
    write(DEFAULTS, JSON.stringify(settings));
  }

  /** Keep a conversation: soon while it is streamed, else now. Return whether there was room. */
  save(conversation, isSoon = false) {
    if (!conversation.messages.length) return true;
    this.all.set(conversation.id, conversation);
    if (isSoon) {
      if (!this.timers.has(conversation.id)) {
        this.timers.set(conversation.id, setTimeout(() => this.save(conversation), 1000));
      }
      return true;
    }
    clearTimeout(this.timers.get(conversation.id));
    this.timers.delete(conversation.id);
    const text = JSON.stringify(conversation);
    if (text.length > MAX_CHARACTERS) return false; // it would take the place of all others, and not fit
    this.makeRoom(conversation.id, text.length);
    while (!write(PREFIX + conversation.id, text)) {
      if (!this.dropOldest(conversation.id)) return false;
    }
    return true;
  }

  remove(id) {
    clearTimeout(this.timers.get(id));
    this.timers.delete(id);
    this.all.delete(id);
    localStorage.removeItem(PREFIX + id);
  }

  /** Write what waits to be written. */
  flush() {
    for (const id of [...this.timers.keys()]) this.save(this.all.get(id));
  }

  makeRoom(id, length) {
    const sizes = () => [...this.all.keys()].reduce((sum, each) => sum + (each === id ? 0 : (localStorage.getItem(PREFIX + each)?.length ?? 0)), length);
    while (this.all.size > MAX_CONVERSATIONS || sizes() > MAX_CHARACTERS) {
      if (!this.dropOldest(id)) return;
    }
  }

  dropOldest(exceptId) {
    const oldest = this.list().filter((each) => each.id !== exceptId && !this.timers.has(each.id)).at(-1);
    if (oldest) this.remove(oldest.id);
    return Boolean(oldest);
  }
}

function write(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // the quota is used up
  }
}

function parseObject(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

/** Return a conversation that was written, or null. An answer that was streamed when the page was left counts as stopped. */
function parse(text) {
  const found = parseObject(text);
  if (!found || typeof found.id !== "string" || !Array.isArray(found.messages)) return null;
  const messages = found.messages.filter((each) => each && typeof each.content === "string" && ["user", "assistant"].includes(each.role));
  for (const message of messages) {
    if (message.state === "streaming") message.state = "stopped";
  }
  const documents = (Array.isArray(found.documents) ? found.documents : []).filter((each) => typeof each?.name === "string" && typeof each.text === "string");
  for (const message of messages) {
    if (!Array.isArray(message.sources) || !message.sources.every((each) => typeof each === "string")) message.sources = [];
    if (typeof message.context !== "string") message.context = "";
  }
  return { ...found, documents, title: String(found.title ?? ""), updated: Number(found.updated) || 0, settings: cleanSettings(found.settings ?? {}), messages };
}

/** The sampling settings, with their limits; absent ones are the model's own. */
export const SETTINGS = {
  temperature: { min: 0, max: 2, step: 0.05 },
  top_p: { min: 0.01, max: 1, step: 0.01 },
  top_k: { min: 1, max: 100000, step: 1 },
  repetition_penalty: { min: 0.5, max: 2, step: 0.05 },
  max_tokens: { min: 1, max: 1000000, step: 1 },
  seed: { min: 0, max: 2147483647, step: 1 },
};

function cleanSettings(settings) {
  const found = { system: typeof settings.system === "string" ? settings.system : "" };
  for (const name of Object.keys(SETTINGS)) {
    if (typeof settings[name] === "number" && Number.isFinite(settings[name])) found[name] = settings[name];
  }
  return found;
}
