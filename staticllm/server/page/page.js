// The page: its views, the list of conversations, the settings, and the theme.

import { Chat } from "./chat.js";
import { Conversations, SETTINGS } from "./conversations.js";
import { Dictation } from "./dictation.js";
import { Documents } from "./documents.js";
import { announce, byId, el, iconButton, setText } from "./dom.js";
import { SchedulerView } from "./scheduler.js";
import { apiKey, getJson } from "./server.js";

const THEME = "staticllm.theme";
const NOTICE_MS = 8000;
const NARROW = matchMedia("(max-width: 760px)");

const store = new Conversations({ onChange: showChanged, isBusy: (id) => chat.runs.has(id) });
const chat = new Chat(store, {
  changed: () => showList(),
  needsKey: () => openSettings("api-key"),
  notify,
  answered: (name) => {
    const model = models.find((each) => each.id === name);
    if (model) model.status = "loaded";
  },
  isLoaded: (name) => models.some((each) => each.id === name && each.status === "loaded"),
  passagesFor: (...given) => documents.passagesFor(...given),
});
const scheduler = new SchedulerView({ needsKey: () => openSettings("api-key") });
const dictation = new Dictation(byId("dictate"), byId("message"), byId("recording"), { notify });
const documents = new Documents(
  { list: byId("documents"), button: byId("attach"), input: byId("attach-file"), target: byId("chat-view"), note: byId("no-embedder") },
  { conversation: () => chat.conversation, changed: (conversation) => store.save(conversation) || notify("The documents are too long to be kept in this browser."), notify },
);
let models = [];

// ---- models

const defaultModel = () => models.find((each) => each.status === "loaded")?.id ?? models[0]?.id ?? null;

async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    models = data.filter((each) => each.type === "chat");
    dictation.offer(data.find((each) => each.type === "speech" && each.reads_files)?.id);
    documents.offer(data.find((each) => each.type === "embedding")?.id);
    byId("model-error").hidden = true;
    if (!models.length) showModelError("No chat model is served.");
  } catch (error) {
    models = [];
    showModelError(error.message);
    if (error.status === 401) openSettings("api-key");
  }
  if (!models.some((each) => each.id === chat.conversation.model)) chat.conversation.model = chat.conversation.model ?? defaultModel();
  showModels();
}

function showModelError(message) {
  byId("model-error").hidden = false;
  setText(byId("model-error-text"), message);
}

function showModels() {
  const { model } = chat.conversation;
  const names = models.map((each) => each.id);
  const options = names.map((name) => el("option", { value: name, selected: name === model }, name));
  if (model && !names.includes(model)) options.unshift(el("option", { value: model, selected: true }, `${model} (not served)`));
  byId("model").replaceChildren(...options);
  byId("model").disabled = !options.length;
}

// ---- conversations

function open(conversation) {
  chat.show(conversation);
  documents.show();
  chat.countSoon();
  conversation.model ??= defaultModel();
  showModels();
  showList();
  setText(byId("title"), conversation.title || "New conversation");
}

function openNew() {
  const { conversation } = chat;
  open(conversation && !conversation.messages.length ? conversation : store.create(defaultModel()));
  go("chat");
  byId("message").focus();
}

function showList() {
  const { conversation } = chat;
  if (!conversation) return;
  setText(byId("title"), conversation.title || "New conversation");
  const all = store.list();
  byId("no-conversations").hidden = all.length > 0;
  const shown = JSON.stringify([all.map((each) => [each.id, each.title, chat.isRunning(each), chat.unread.has(each.id)]), conversation.id]);
  if (shown === showList.shown) return;
  showList.shown = shown;
  const focused = document.activeElement?.closest?.("#conversations [data-id]")?.dataset.id;
  byId("conversations").replaceChildren(...all.map(listItem));
  if (focused) byId("conversations").querySelector(`[data-id="${focused}"]`)?.focus();
}

function listItem(each) {
  const isRunning = chat.isRunning(each);
  const state = isRunning ? "answering" : chat.unread.has(each.id) ? "new answer" : "";
  const mark = el("span", { class: `mark ${isRunning ? "is-running" : state ? "is-unread" : ""}`, "aria-hidden": "true" });
  const select = () => {
    open(each);
    go("chat");
    if (NARROW.matches) byId("message").focus();
  };
  const button = el(
    "button",
    { type: "button", class: "conversation", data: { id: each.id }, "aria-current": each.id === chat.conversation.id ? "true" : null, title: each.title, onclick: select },
    mark,
    el("span", { class: "name" }, each.title),
    state && el("span", { class: "only-read" }, `, ${state}`),
  );
  return el("li", {}, button, iconButton("trash", `Delete “${each.title}”`, () => remove(each), { class: "icon-button delete" }));
}

/** Show what another tab has changed. */
function showChanged(id) {
  if (chat.conversation.id === id) open(store.get(id) ?? store.create(defaultModel()));
  showList();
}

function remove(conversation) {
  store.remove(conversation.id);
  chat.runs.get(conversation.id)?.stop();
  if (chat.conversation === conversation) open(store.list()[0] ?? store.create(defaultModel()));
  showList();
  byId("new").focus();
  notify(`Deleted “${conversation.title.slice(0, 40)}”.`, "Undo", () => {
    store.save(conversation);
    open(conversation);
    byId("message").focus();
  });
}

function moveInList(step) {
  const all = store.list();
  const at = all.findIndex((each) => each.id === chat.conversation.id);
  const next = all[Math.min(all.length - 1, Math.max(0, at + step))];
  if (next && next !== chat.conversation) {
    open(next);
    announce(next.title);
  }
}

// ---- notices

function notify(text, action = "", onAction = () => {}) {
  const close = () => byId("notice").replaceChildren();
  clearTimeout(notify.timer);
  const act = () => {
    close();
    onAction();
  };
  byId("notice").replaceChildren(el("span", {}, text), action && el("button", { type: "button", class: "quiet", onclick: act }, action));
  notify.timer = setTimeout(close, NOTICE_MS);
}

// ---- settings

function openSettings(focus = "system") {
  const { settings } = chat.conversation;
  byId("system").value = settings.system;
  for (const name of Object.keys(SETTINGS)) byId(name).value = settings[name] ?? "";
  byId("api-key").value = apiKey.get();
  byId("theme").value = localStorage.getItem(THEME) ?? "system";
  if (!byId("settings").open) byId("settings").showModal();
  byId(focus).focus();
}

function takeSettings() {
  const settings = { system: byId("system").value };
  for (const name of Object.keys(SETTINGS)) {
    const field = byId(name);
    if (!field.reportValidity()) return false;
    if (field.value !== "") settings[name] = Number(field.value);
  }
  Object.assign(chat.conversation, { settings });
  store.setDefaults(settings);
  store.save(chat.conversation);
  const key = byId("api-key").value.trim();
  if (key !== apiKey.get()) {
    apiKey.set(key);
    loadModels();
    scheduler.retry();
  }
  return true;
}

function listenToSettings() {
  for (const [name, { min, max, step }] of Object.entries(SETTINGS)) Object.assign(byId(name), { min, max, step });
  for (const name of Object.keys(SETTINGS)) byId(name).step = "any";
  for (const name of ["top_k", "max_tokens", "seed"]) byId(name).step = "1";
  byId("settings-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (takeSettings()) byId("settings").close();
  });
  byId("settings-cancel").addEventListener("click", () => byId("settings").close());
  byId("settings").addEventListener("close", () => showTheme(localStorage.getItem(THEME)));
  byId("settings").addEventListener("click", (event) => {
    if (event.target === byId("settings")) byId("settings").close();
  });
  byId("settings-reset").addEventListener("click", () => {
    for (const name of [...Object.keys(SETTINGS), "system"]) byId(name).value = "";
    announce("The model's own settings.");
  });
  byId("theme").addEventListener("change", () => {
    localStorage.setItem(THEME, byId("theme").value);
    showTheme(byId("theme").value);
  });
}

function showTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

// ---- views

function go(view) {
  if (location.hash !== `#${view}`) location.hash = `#${view}`;
  showView();
}

function showView() {
  const view = location.hash === "#scheduler" ? "scheduler" : "chat";
  for (const name of ["chat", "scheduler"]) {
    byId(`${name}-view`).hidden = name !== view;
    for (const link of document.querySelectorAll(`a[href="#${name}"]`)) {
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
  byId("skip").setAttribute("href", view === "chat" ? "#message" : "#scheduler-body");
  document.title = view === "chat" ? "staticllm" : "Scheduler · staticllm";
  scheduler.setVisible(view === "scheduler" && !document.hidden);
  showDrawer(false);
}

function showDrawer(isOpen) {
  document.body.classList.toggle("has-drawer", isOpen);
  byId("sidebar").inert = NARROW.matches && !isOpen;
  for (const name of ["chat-view", "scheduler-view"]) byId(name).inert = NARROW.matches && isOpen;
  byId("shade").hidden = !isOpen;
  for (const button of document.querySelectorAll(".menu")) button.setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("new").focus();
}

function onKey(event) {
  if (byId("settings").open) return;
  const isMain = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && !event.isComposing) {
    if (document.body.classList.contains("has-drawer")) {
      showDrawer(false);
      document.querySelector("main:not([hidden]) .menu").focus();
    } else if (!byId("chat-view").hidden && chat.isRunning(chat.conversation)) chat.stop();
  } else if (isMain && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    openNew();
  } else if (event.altKey && !isMain && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
    event.preventDefault();
    moveInList(event.key === "ArrowUp" ? -1 : 1);
  }
}

showTheme(localStorage.getItem(THEME));
listenToSettings();
chat.addExamples();
byId("new").addEventListener("click", openNew);
byId("retry-models").addEventListener("click", loadModels);
byId("model").addEventListener("change", () => {
  chat.conversation.model = byId("model").value;
  store.save(chat.conversation);
});
for (const button of document.querySelectorAll(".open-settings")) button.addEventListener("click", () => openSettings());
for (const button of document.querySelectorAll(".menu")) button.addEventListener("click", () => showDrawer(true));
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the view
  byId(byId("skip").getAttribute("href").slice(1)).focus();
});
byId("shade").addEventListener("click", () => showDrawer(false));
NARROW.addEventListener("change", () => showDrawer(false));
addEventListener("keydown", onKey);
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => scheduler.setVisible(location.hash === "#scheduler" && !document.hidden));
open(store.list()[0] ?? store.create(null));
showView();
loadModels();
if (!NARROW.matches && location.hash !== "#scheduler") byId("message").focus();
