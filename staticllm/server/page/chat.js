// The chat: shows one conversation, and streams answers into any number of them at once.

import { announce, byId, copyText, el, icon, iconButton, setText } from "./dom.js";
import { newMessage, SETTINGS } from "./conversations.js";
import { showMarkdown } from "./markdown.js";
import { countTokens, getJson, ServerError, streamChat } from "./server.js";

const RENDER_MS = 50; // between two renderings of an answer that is streamed
const LOADING_MS = 1000;
const COUNT_MS = 400; // after the last key, the prompt is counted
const EXAMPLES = ["What is an NPU?", "Explain prefill and decode in two sentences.", "Tell me a story about a lighthouse."];

/** An answer that is being streamed. It goes on while another conversation is shown. */
class Run {
  constructor(conversation, message, onUpdate) {
    this.conversation = conversation;
    this.message = message;
    this.onUpdate = onUpdate;
    this.controller = new AbortController();
    this.hint = null;
  }

  /** Answer. `prepare(signal, onHint)` resolves to the body of the request. */
  async start(prepare) {
    const { message } = this;
    const begin = performance.now();
    this.loading = setInterval(() => this.lookAtLoading(), LOADING_MS);
    const onHint = (text, done = 0, total = 0) => {
      this.hint = { text, done, total };
      this.onUpdate(this);
    };
    let first = 0;
    let last = 0;
    let num = 0;
    let rate = null; // as the server has measured it
    const onChunk = (chunk) => {
      const read = chunk.prompt_progress;
      if (read) {
        clearInterval(this.loading);
        onHint("Reading the prompt, tokens", read.processed, read.total);
      }
      const choice = chunk.choices?.[0];
      const delta = choice?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        last = performance.now();
        first ||= last;
        num += 1;
        message.content += delta.content ?? "";
        if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
        this.stopLooking();
      }
      const reason = choice?.finish_reason;
      const seconds = (last - first) / 1000;
      const stats = { ttft: first ? first - begin : null, reason: reason ?? message.stats?.reason, output: chunk.usage?.completion_tokens ?? num };
      if (chunk.usage) Object.assign(stats, { prompt: chunk.usage.prompt_tokens, cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0 });
      rate = chunk.timings?.predicted_per_second || rate;
      stats.rate = rate ?? (stats.output > 1 && seconds > 0 ? (stats.output - 1) / seconds : null);
      message.stats = stats;
      this.onUpdate(this);
    };
    try {
      const { signal } = this.controller;
      await streamChat(await prepare(signal, onHint), { signal, onChunk });
      message.state = "done";
    } catch (error) {
      if (error.name === "AbortError") message.state = "stopped";
      else {
        message.state = "error";
        const isKnown = error instanceof ServerError;
        message.error = isKnown ? error.message : "The page failed to read the answer.";
        message.code = error.code;
        if (!isKnown) console.error(error);
      }
    } finally {
      this.stopLooking();
    }
  }

  stop() {
    this.controller.abort();
  }

  stopLooking() {
    clearInterval(this.loading);
    this.hint = null;
  }

  /** While nothing comes, say whether the model is being loaded. */
  async lookAtLoading() {
    try {
      const { loading } = await getJson("health", { anyStatus: true, signal: this.controller.signal });
      const found = loading?.find((each) => each.model === this.conversation.model);
      if (found) this.hint = { text: `Loading ${found.model}${found.stage ? `: ${found.stage},` : ""}`, done: Math.round((found.fraction ?? 0) * 1000) / 10, total: 100, unit: " %" };
      else if (this.hint?.unit) this.hint = null;
      this.onUpdate(this);
    } catch {
      // the stream tells what is wrong
    }
  }
}

/** Shows a conversation. `hooks`: changed(conversation), needsKey(). */
export class Chat {
  constructor(store, hooks) {
    this.store = store;
    this.hooks = hooks;
    this.runs = new Map();
    this.unread = new Set();
    this.views = new Map();
    this.conversation = null;
    this.log = byId("log");
    this.input = byId("message");
    this.scroller = byId("scroller");
    this.isAtEnd = true;
    this.listen();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendInput();
    });
    byId("stop").addEventListener("click", () => this.stop());
    addEventListener("beforeunload", () => {
      for (const run of this.runs.values()) run.stop(); // else their connections would be lost, which is an error
    });
    this.input.addEventListener("input", () => {
      this.fitInput();
      this.countSoon();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.sendInput();
    });
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < 60;
      byId("to-end").hidden = this.isAtEnd;
    });
    const onSize = new ResizeObserver(() => this.follow());
    onSize.observe(this.scroller);
    onSize.observe(this.log);
    byId("to-end").addEventListener("click", () => {
      this.isAtEnd = true;
      this.follow();
      this.input.focus();
    });
  }

  /** Show a conversation. Its draft is empty: a draft belongs to the page, not to a conversation. */
  show(conversation) {
    this.conversation = conversation;
    this.unread.delete(conversation.id);
    this.views.clear();
    this.log.replaceChildren();
    for (const message of conversation.messages) this.addView(message);
    this.isAtEnd = true;
    this.refresh();
    this.follow();
  }

  isRunning(conversation) {
    return this.runs.has(conversation.id);
  }

  sendInput() {
    const text = this.input.value.trim();
    if (!text || this.isRunning(this.conversation)) return;
    this.input.value = "";
    this.fitInput();
    this.countSoon();
    this.send(text);
  }

  send(text) {
    const { conversation } = this;
    conversation.title ||= text.replace(/\s+/g, " ").slice(0, 80);
    const message = newMessage("user", text);
    conversation.messages.push(message);
    this.addView(message);
    this.isAtEnd = true;
    this.answer(conversation);
  }

  /** Stop the answer that is shown. What has come stays. */
  stop() {
    this.runs.get(this.conversation.id)?.stop();
    this.input.focus();
  }

  /** Answer a conversation whose last message is the user's. */
  async answer(conversation) {
    const question = conversation.messages.at(-1);
    const message = newMessage("assistant", "", "streaming");
    const prepare = (signal, onHint) => this.prepare(conversation, question, message, signal, onHint);
    conversation.messages.push(message);
    conversation.updated = Date.now();
    const run = new Run(conversation, message, (changed) => this.update(changed));
    this.runs.set(conversation.id, run);
    if (this.conversation === conversation) this.addView(message);
    this.store.save(conversation);
    this.refresh();
    this.follow();
    announce("The model is answering.");
    await run.start(prepare);
    this.runs.delete(conversation.id);
    this.end(run);
  }

  /** Return the body of a request for a question, with what its documents say about it. */
  async prepare(conversation, question, message, signal, onHint) {
    const { model } = conversation;
    const before = conversation.messages.slice(0, conversation.messages.indexOf(message));
    const body = () => requestOf({ ...conversation, messages: before });
    question.context = "";
    question.sources = [];
    if (conversation.documents?.length) {
      const fits = async (context) => {
        question.context = context;
        const { count, max_prompt_len: most } = await countTokens({ ...(model && { model }), messages: body().messages }, signal);
        return count <= most;
      };
      const { max_prompt_len: limit } = await countTokens({ ...(model && { model }), content: "" }, signal);
      const found = await this.hooks.passagesFor(conversation, question.content, { model, limit, fits, signal, onHint });
      Object.assign(question, found);
      onHint("Waiting for the first token");
      this.views.get(question.id)?.showUser();
    }
    return body();
  }

  /** Count the prompt when nobody has typed for a moment. */
  countSoon() {
    clearTimeout(this.counting);
    this.counting = setTimeout(() => this.count(), COUNT_MS);
  }

  /** Show how many tokens the prompt would have, if the model is loaded: counting must not load one. */
  async count() {
    const { conversation } = this;
    const text = this.input.value.trim();
    const node = byId("count");
    const isKnown = text && this.hooks.isLoaded(conversation.model);
    if (!isKnown) return this.showCount(node, "", false);
    const messages = [...conversation.messages, newMessage("user", text)];
    try {
      const { count, max_prompt_len: most } = await countTokens({ model: conversation.model, messages: requestOf({ ...conversation, messages }).messages });
      if (this.conversation !== conversation || this.input.value.trim() !== text) return; // it was typed on
      const isLong = count > most;
      this.showCount(node, isLong ? `Too long: ${count} tokens, the model reads ${most} at once` : `${count} of ${most} tokens`, isLong);
    } catch {
      this.showCount(node, "", false); // sending tells what is wrong
    }
  }

  showCount(node, text, isLong) {
    setText(node, text);
    node.classList.toggle("is-long", isLong);
    if (isLong && !this.wasLong) announce(text);
    this.wasLong = isLong;
  }

  /** Show what has come, at most every RENDER_MS. */
  update(run) {
    if (!this.store.has(run.conversation)) return; // it was deleted
    this.store.save(run.conversation, true);
    run.timer ??= setTimeout(() => {
      run.timer = null;
      if (this.conversation !== run.conversation || this.runs.get(run.conversation.id) !== run) return;
      const begin = performance.now();
      this.views.get(run.message.id)?.update(run.hint);
      this.follow();
      run.renderMs = performance.now() - begin;
    }, Math.max(RENDER_MS, 4 * (run.renderMs ?? 0)));
  }

  end(run) {
    const { conversation, message } = run;
    clearTimeout(run.timer);
    if (!this.store.has(conversation)) return; // it was deleted
    conversation.updated = Date.now();
    const isKept = this.store.save(conversation);
    if (!isKept) this.hooks.notify("This conversation is too long to be kept in this browser.");
    const isShown = this.conversation === conversation;
    if (isShown) this.views.get(message.id)?.update();
    else this.unread.add(conversation.id);
    this.refresh();
    this.follow();
    const where = isShown ? "" : `In “${conversation.title}”: `;
    const said = { done: `Answer: ${message.content.slice(0, 1500)}`, stopped: "The answer was stopped.", error: `Error: ${message.error}` };
    announce(where + said[message.state]);
    if (message.state === "done") this.hooks.answered(conversation.model);
    if (message.code === "invalid_api_key" && isShown) this.hooks.needsKey();
  }

  /** Answer again from a message on: it and what follows is dropped. `text` replaces that of the user's message. */
  redo(message, text = null) {
    const { conversation } = this;
    if (this.isRunning(conversation)) return;
    const { messages } = conversation;
    let at = messages.indexOf(message);
    if (at < 0) return;
    if (message.role === "assistant") at -= 1;
    if (text !== null) messages[at] = newMessage("user", text);
    messages.splice(at + 1);
    if (at === 0 && text !== null) conversation.title = text.replace(/\s+/g, " ").slice(0, 80);
    this.show(conversation);
    this.answer(conversation);
    this.input.focus();
  }

  addView(message) {
    const view = new MessageView(message, this);
    this.views.set(message.id, view);
    this.log.append(view.node);
  }

  refresh() {
    const { conversation } = this;
    const isRunning = this.isRunning(conversation);
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    byId("empty").hidden = conversation.messages.length > 0;
    this.log.classList.toggle("is-running", isRunning);
    this.log.setAttribute("aria-busy", String(isRunning));
    this.hooks.changed(conversation);
  }

  follow() {
    if (this.isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, innerHeight * 0.4)}px`;
  }

  /** Fill the list of examples of an empty conversation. */
  addExamples() {
    const button = (text) => el("li", {}, el("button", { type: "button", class: "example", onclick: () => this.send(text) }, el("span", {}, text), icon("send")));
    byId("examples").replaceChildren(...EXAMPLES.map(button));
  }
}

/** Return the body of a request. Users' messages without an answer between them become one: templates ask for turns. */
function requestOf({ model, settings, messages }) {
  const turns = settings.system.trim() ? [{ role: "system", content: settings.system.trim() }] : [];
  const last = messages.findLast(({ role }) => role === "user"); // passages go before the newest question only
  for (const message of messages) {
    const { role } = message;
    const content = message === last && message.context ? message.context + message.content : message.content;
    if (role === "user" && turns.at(-1)?.role === "user") turns.at(-1).content += `\n\n${content}`;
    else if (content) turns.push({ role, content });
  }
  const sampling = Object.fromEntries(Object.keys(SETTINGS).filter((name) => name in settings).map((name) => [name, settings[name]]));
  return { ...(model && { model }), messages: turns, stream: true, stream_options: { include_usage: true }, return_progress: true, ...sampling };
}

/** One message: what it says, what is known about it, and what can be done with it. */
class MessageView {
  constructor(message, chat) {
    this.message = message;
    this.chat = chat;
    const isUser = message.role === "user";
    this.body = el("div", { class: "body" });
    this.foot = el("div", { class: "foot" });
    this.node = el("article", { class: `message ${message.role}`, "aria-label": isUser ? "You" : "Answer" }, this.body, this.foot);
    if (isUser) this.showUser();
    else this.prepareAnswer();
  }

  showUser() {
    const { message, chat } = this;
    setText(this.body, message.content);
    this.body.hidden = false;
    const sources = message.sources ?? [];
    if (sources.length) {
      const list = el("ul", {}, ...sources.map((each) => el("li", {}, each)));
      this.body.append(el("details", { class: "sources" }, el("summary", {}, icon("file"), `With ${sources.length} ${sources.length > 1 ? "passages" : "passage"}`), list));
    }
    const copy = iconButton("copy", "Copy message", () => copyText(message.content, copy));
    const edit = iconButton("edit", "Edit message", () => this.edit());
    edit.classList.add("needs-rest");
    this.foot.replaceChildren(el("div", { class: "actions" }, copy, edit));
  }

  edit() {
    const { message, chat } = this;
    if (chat.isRunning(chat.conversation)) return;
    const field = el("textarea", { "aria-label": "Edited message", rows: Math.min(12, message.content.split("\n").length + 1) });
    field.value = message.content;
    const cancel = () => {
      this.node.classList.remove("is-edited");
      form.remove();
      this.showUser();
      this.foot.querySelector(".needs-rest").focus();
    };
    const submit = (event) => {
      event?.preventDefault();
      if (field.value.trim()) chat.redo(message, field.value.trim());
    };
    const buttons = el(
      "div",
      { class: "edit-buttons" },
      el("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Send again"),
    );
    const form = el("form", { class: "edit", onsubmit: submit }, field, buttons);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field) submit(event);
    });
    this.node.classList.add("is-edited");
    this.body.hidden = true;
    this.foot.replaceChildren();
    this.node.append(form);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  prepareAnswer() {
    this.reasoningText = el("div", { class: "reasoning-text" });
    this.reasoningTitle = el("span", {}, "Reasoning");
    this.reasoning = el("details", { class: "reasoning" }, el("summary", {}, icon("chevron"), this.reasoningTitle), this.reasoningText);
    this.text = el("div", { class: "markdown" });
    this.wait = el("p", { class: "wait" }, el("span", { class: "dots", "aria-hidden": "true" }, el("i"), el("i"), el("i")), (this.hint = el("span")), (this.progress = el("progress", { "aria-label": "Progress" })));
    this.error = el("div", { class: "error", role: "alert" });
    this.body.append(this.reasoning, this.text, this.wait, this.error);
    this.stats = el("p", { class: "stats" });
    const { message, chat } = this;
    const copy = iconButton("copy", "Copy answer", () => copyText(message.content, copy));
    const redo = iconButton("redo", "Answer again", () => chat.redo(message));
    redo.classList.add("needs-rest");
    this.actions = el("div", { class: "actions" }, copy, redo);
    this.foot.append(this.stats, this.actions);
    this.update();
  }

  update(hint = null) {
    const { message } = this;
    const isStreaming = message.state === "streaming";
    this.reasoning.hidden = !message.reasoning;
    if (message.reasoning) {
      setText(this.reasoningTitle, isStreaming && !message.content ? "Reasoning…" : "Reasoning");
      setText(this.reasoningText, message.reasoning.trim());
    }
    showMarkdown(this.text, message.content);
    this.text.classList.toggle("is-streaming", isStreaming && Boolean(message.content));
    this.wait.hidden = !isStreaming || Boolean(message.content);
    const figure = hint?.total ? ` ${hint.done}${hint.unit ?? ` of ${hint.total}`}` : "";
    setText(this.hint, hint ? hint.text + figure : message.reasoning ? "" : "Waiting for the first token");
    this.progress.hidden = !hint?.total;
    if (hint?.total) Object.assign(this.progress, { max: hint.total, value: hint.done });
    this.actions.hidden = isStreaming || (message.state === "error" && !message.content);
    this.showStats();
    this.showError();
  }

  showStats() {
    const { message } = this;
    const { output, rate, ttft, prompt, cached, reason } = message.stats ?? {};
    const parts = [];
    if (output) parts.push([`${output} tokens`, "Tokens of the answer"]);
    if (rate) parts.push([`${rate >= 10 ? rate.toFixed(0) : rate.toFixed(1)} tok/s`, "Tokens per second after the first one"]);
    if (ttft != null) parts.push([`first after ${duration(ttft)}`, "Time to the first token (TTFT)"]);
    if (prompt) parts.push([`${cached} of ${prompt} prompt tokens cached`, "Prompt tokens that were not computed again"]);
    if (message.state === "stopped") parts.push(["stopped", "You stopped this answer, or left the page"]);
    else if (reason === "length") parts.push(["cut at the length limit", "The answer has reached its token limit"]);
    const key = JSON.stringify(parts);
    if (key === this.shownStats) return;
    this.shownStats = key;
    this.stats.replaceChildren(...parts.map(([text, title]) => el("span", { title }, text)));
  }

  showError() {
    const { message, chat } = this;
    this.error.hidden = message.state !== "error";
    if (message.state !== "error" || this.error.childNodes.length) return;
    const retry = el("button", { type: "button", class: "quiet", onclick: () => chat.redo(message) }, "Retry");
    const key = message.code === "invalid_api_key" && el("button", { type: "button", class: "quiet", onclick: () => chat.hooks.needsKey() }, "Enter key");
    this.error.append(icon("alert"), el("span", {}, message.error), key || "", retry);
  }
}

export const duration = (ms) => (ms >= 9950 ? `${(ms / 1000).toFixed(0)} s` : ms >= 995 ? `${(ms / 1000).toFixed(1)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`);
