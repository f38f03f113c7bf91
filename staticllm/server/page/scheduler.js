// The live view of the scheduler: which requests wait, prefill and decode, and what each device call held.

import { byId, el, setText, svg } from "./dom.js";
import { duration } from "./chat.js";
import { getJson } from "./server.js";

const POLL_MS = 500;
const RETRY_MS = 3000;
const PAGE = 1024; // calls and ended answers of an answer that the next one continues
const WINDOW = 60; // seconds of the plots
const NUM_CALLS = 160; // in the strip
const NUM_GROUPS = 5; // of calls in the table
const NUM_ANSWERS = 8; // in the table
const RATE_SECONDS = 5;
const MAX_QUEUED = 20; // rows of requests that wait in the server
const PLOT = { width: 280, height: 130, left: 54, bottom: 20, top: 8, right: 6 };
const ORDER = { running: 0, prefilling: 1, swapped: 2, waiting: 3, queued: 4 };
const NAMES = { running: "Decoding", prefilling: "Prefill", swapped: "Swapped", waiting: "Waiting", queued: "Queued" };

/** Reads the feed while it is visible. */
export class SchedulerView {
  constructor(hooks) {
    this.hooks = hooks;
    this.isVisible = this.isPaused = false;
    this.model = null;
    this.clear();
    byId("scheduler-model").addEventListener("change", () => {
      this.model = byId("scheduler-model").value;
      this.clear();
      this.retry();
    });
    byId("pause").addEventListener("click", () => this.setPaused(!this.isPaused));
    byId("scheduler-retry").addEventListener("click", () => this.retry());
    byId("scheduler-key").addEventListener("click", () => this.hooks.needsKey());
  }

  clear() {
    this.cursor = 0;
    this.calls = [];
    this.ended = [];
    this.lastAnswers = [];
    this.seconds = new Map(); // what the calls of each second held
    this.jobs = null; // seconds of texts in the device, and when they were read
    this.rows = new Map();
  }

  setVisible(isVisible) {
    if (isVisible === this.isVisible) return;
    this.isVisible = isVisible;
    this.retry();
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    setText(byId("pause-text"), isPaused ? "Resume" : "Pause");
    this.retry();
  }

  /** Read now, if there is somebody to see it. */
  retry() {
    clearTimeout(this.timer);
    this.abort?.abort();
    if (this.isVisible && !this.isPaused) this.poll();
  }

  async poll() {
    const abort = (this.abort = new AbortController());
    let wait = POLL_MS;
    try {
      const query = new URLSearchParams({ after: this.cursor, ...(this.model && { model: this.model }) });
      const feed = await getJson(`api/scheduler?${query}`, { signal: abort.signal });
      if (abort.signal.aborted) return;
      this.take(feed);
      this.show(feed);
      if (feed.calls.length + feed.ended.length >= PAGE) wait = 0;
      byId("scheduler-error").hidden = true;
    } catch (error) {
      if (abort.signal.aborted) return;
      wait = RETRY_MS;
      this.showError(error);
    }
    this.timer = setTimeout(() => this.poll(), wait);
  }

  showError(error) {
    byId("scheduler-error").hidden = false;
    byId("scheduler-key").hidden = error.status !== 401;
    setText(byId("scheduler-error-text"), error.message);
    byId("scheduler-view").classList.add("is-stale");
  }

  /** Add what is new to what is kept. */
  take(feed) {
    if (feed.cursor < this.cursor) this.clear(); // the server was started again
    this.cursor = feed.cursor;
    this.calls = [...this.calls, ...feed.calls].slice(-NUM_CALLS);
    this.ended = [...this.ended, ...feed.ended].filter((each) => each.end > feed.now - WINDOW || feed.ended.includes(each)).slice(-400);
    for (const call of feed.calls) this.addToSecond(call);
    this.addJobs(feed.totals?.job_seconds ?? 0, feed.now);
    const oldest = feed.now - WINDOW - 2;
    for (const second of this.seconds.keys()) if (second < oldest) this.seconds.delete(second);
    this.lastAnswers = [...this.lastAnswers, ...feed.ended].slice(-NUM_ANSWERS);
  }

  addToSecond(call) {
    if (call.failed) return;
    const found = this.second(Math.floor(call.start + call.ms / 1000));
    const { prefill, decode } = rowsOf(call);
    const share = prefill / (prefill + decode || 1);
    found.prefill += (call.ms / 1000) * share;
    found.decode += (call.ms / 1000) * (1 - share);
    found.proactive += ((call.ms / 1000) * (call.proactive ?? 0)) / (prefill + decode || 1);
    found.gap = Math.max(found.gap, call.gap_ms ?? 0);
    found.tokens += call.decode.length + call.accepted;
  }

  /** Spread the device time of texts, of which only the sum is known, over the seconds since it was read. */
  addJobs(total, now) {
    const before = this.jobs;
    this.jobs = { total, now };
    if (!before || total <= before.total || now <= before.now) return;
    const from = Math.max(before.now, now - WINDOW);
    for (let second = Math.floor(from); second < now; second++) {
      const part = Math.min(now, second + 1) - Math.max(from, second);
      this.second(second).jobs += ((total - before.total) * part) / (now - before.now);
    }
  }

  second(number) {
    const found = this.seconds.get(number) ?? { prefill: 0, decode: 0, jobs: 0, proactive: 0, gap: 0, tokens: 0 };
    this.seconds.set(number, found);
    return found;
  }

  show(feed) {
    byId("scheduler-view").classList.remove("is-stale");
    this.showModels(feed);
    const status = feed.models.find((each) => each.name === feed.model)?.status ?? "unloaded";
    byId("not-loaded").hidden = status === "loaded";
    setText(byId("not-loaded"), feed.model === null ? "No chat model is served: only texts are shown." : status === "loading" ? `${feed.model} is being loaded.` : `${feed.model} is not loaded. Its first request loads it.`);
    this.showCards(feed);
    this.showRequests(feed);
    this.showEncoders(feed);
    this.showClients(feed);
    this.showCalls(feed);
    this.showAnswers();
    this.showPlots(feed.now);
  }

  showModels({ model, models }) {
    const names = models.filter((each) => each.type === "chat").map((each) => each.name);
    const key = JSON.stringify([model, names]);
    if (key === this.shownModels) return;
    this.shownModels = key;
    byId("scheduler-model").hidden = !names.length;
    byId("scheduler-model").replaceChildren(...names.map((name) => el("option", { value: name, selected: name === model }, name)));
  }

  showCards({ requests, waiting_ms: queued, limits, totals, now }) {
    const count = (status) => requests.filter((each) => each.status === status).length;
    const recent = [...this.seconds].filter(([second]) => second >= Math.floor(now) - RATE_SECONDS && second < Math.floor(now)).map(([, each]) => each);
    const sum = (name) => recent.reduce((total, each) => total + each[name], 0);
    const [prefill, decode, jobs] = ["prefill", "decode", "jobs"].map(sum);
    const whole = prefill + decode + jobs;
    const inUse = totals?.slots_in_use ?? 0;
    card("waiting", count("waiting") + queued.length, queued.length ? `${queued.length} queued` : "");
    card("prefilling", count("prefilling"), count("swapped") ? `${count("swapped")} swapped` : "");
    const behind = requests.filter((each) => each.status === "running" && each.class === "proactive").length;
    card("running", count("running"), [limits ? `of ${limits.num_seqs}` : "", behind ? `${behind}\u00a0proactive` : ""].filter(Boolean).join(", "));
    card("rate", (sum("tokens") / RATE_SECONDS).toFixed(0), "per second");
    card("slots", inUse, limits?.kv_slots ? `of ${limits.kv_slots}` : "");
    const percent = (seconds) => (whole ? (seconds / whole) * 100 : 0);
    const parts = [[prefill, "prefill"], [jobs, "texts"], [sum("proactive"), "proactive"]].filter(([seconds, name]) => seconds || name === "prefill");
    const note = parts.map(([seconds, name]) => `${percent(seconds).toFixed(0)}\u00a0%\u00a0${name}`).join(", ");
    card("busy", `${Math.min(100, (whole / RATE_SECONDS) * 100).toFixed(0)} %`, whole ? note : "idle");
    byId("slots-meter").style.width = `${limits?.kv_slots ? Math.min(100, (inUse / limits.kv_slots) * 100) : 0}%`;
    for (const [name, seconds] of Object.entries({ decode, prefill, jobs })) byId(`share-${name}`).style.width = `${percent(seconds)}%`;
  }

  showRequests({ requests, waiting_ms: queued, now }) {
    const ages = queued.slice(0, MAX_QUEUED).map((ms, index) => ({ id: `q${index}`, status: "queued", age: ms }));
    const rows = [...requests.map((each) => ({ ...each, age: (now - each.arrival) * 1000 })), ...ages].sort((one, other) => ORDER[one.status] - ORDER[other.status]);
    const seen = new Set(rows.map((each) => each.id));
    for (const [id, row] of this.rows) {
      if (seen.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    const body = byId("requests");
    rows.forEach((each, index) => {
      let row = this.rows.get(each.id);
      if (!row) this.rows.set(each.id, (row = new RequestRow(each.id)));
      row.update(each);
      if (body.children[index] !== row.node) body.insertBefore(row.node, body.children[index] ?? null);
    });
    byId("no-requests").hidden = rows.length > 0;
    byId("requests-table").hidden = !rows.length;
    const more = queued.length - ages.length;
    byId("more-queued").hidden = more <= 0;
    setText(byId("more-queued"), `and ${more} more in the server's queue`);
  }

  showEncoders({ encoders }) {
    byId("encoders-panel").hidden = !encoders.length;
    const key = JSON.stringify(encoders);
    if (key === this.shownEncoders) return;
    this.shownEncoders = key;
    byId("encoders").replaceChildren(...encoders.flatMap((each) => each.devices.map((device, index) => encoderRow(each, device, index))));
  }

  showClients({ clients }) {
    byId("clients-panel").hidden = clients.length < 2; // all others are one of them
    const key = JSON.stringify(clients);
    if (key === this.shownClients) return;
    this.shownClients = key;
    const whole = clients.reduce((sum, { seconds }) => sum + seconds, 0);
    byId("clients").replaceChildren(...clients.map((each) => clientRow(each, whole)));
  }

  showCalls({ dropped }) {
    const has = this.calls.length > 0;
    byId("no-calls").hidden = has;
    byId("calls-shown").hidden = !has;
    if (!has) return;
    const last = this.calls.at(-1);
    if (this.shownCall === last.number) return;
    this.shownCall = last.number;
    this.mostRows = Math.max(16, this.mostRows ?? 0, ...this.calls.map((call) => call.rows));
    byId("strip").replaceChildren(strip(this.calls, this.mostRows));
    byId("calls").replaceChildren(...grouped(this.calls).slice(-NUM_GROUPS).reverse().map(callRow));
    setText(byId("calls-note"), dropped ? `${dropped} calls were too many to be sent` : "");
  }

  showAnswers() {
    const last = this.lastAnswers.slice().reverse();
    byId("no-answers").hidden = last.length > 0;
    byId("answers-table").hidden = !last.length;
    const key = last[0]?.number;
    if (key === this.shownAnswer) return;
    this.shownAnswer = key;
    byId("answers").replaceChildren(...last.map(answerRow));
  }

  showPlots(now) {
    const inWindow = this.ended.filter((each) => each.ttft_ms !== null && each.end !== null);
    const firsts = inWindow.map((each) => ({ x: each.end, y: each.ttft_ms }));
    const end = Math.floor(now);
    const seconds = Array.from({ length: WINDOW }, (_, index) => end - WINDOW + index).map((second) => ({ second, ...this.seconds.get(second) }));
    plotDots(byId("plot-ttft"), firsts, now);
    plotGaps(byId("plot-gap"), seconds, end);
    plotShare(byId("plot-share"), seconds, end);
    const sorted = firsts.map(({ y }) => y).sort((one, other) => one - other);
    const middle = sorted[Math.floor(sorted.length / 2)];
    setText(byId("ttft-now"), sorted.length ? `median ${duration(middle)}, longest ${duration(sorted.at(-1))}` : "no answer in the last minute");
    const longest = Math.max(0, ...seconds.map((each) => each.gap ?? 0));
    setText(byId("gap-now"), longest ? `longest ${duration(longest)}` : "nothing decoded in the last minute");
    const parts = ["decode", "prefill", "jobs"].map((name) => [name, seconds.reduce((sum, each) => sum + (each[name] ?? 0), 0)]);
    showShares(byId("share-now"), parts.filter(([name, spent]) => spent || name !== "jobs"));
  }
}

/** Say which part of the device's time each kind of call had, with its colour. */
function showShares(node, parts) {
  const whole = parts.reduce((sum, [, spent]) => sum + spent, 0);
  const texts = parts.map(([name, spent]) => `${((spent / whole) * 100).toFixed(0)}\u00a0%\u00a0${name === "jobs" ? "texts" : name}`);
  if (!whole) return setText(node, "idle for a minute");
  if (node.textContent === texts.join(" ")) return;
  node.replaceChildren(...parts.flatMap(([name], index) => [index ? " " : "", el("span", {}, el("i", { class: name }), texts[index])]));
}

function card(name, value, note) {
  setText(byId(`card-${name}`), String(value));
  setText(byId(`card-${name}-note`), note);
}

function rowsOf({ prefill, decode, drafted, rows }) {
  const prompt = prefill.reduce((sum, [, count]) => sum + count, 0);
  return { prefill: prompt, decode: decode.length + drafted, padding: Math.max(0, rows - prompt - decode.length - drafted) };
}

/** One request, whose row stays while it is there. */
class RequestRow {
  constructor(id) {
    this.badge = el("span", {});
    this.behind = el("span", { class: "badge", hidden: true }, "proactive");
    this.parts = ["cached", "prefill", "decode"].map((name) => el("i", { class: name }));
    this.bar = el("div", { class: "bar", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "Progress" }, this.parts);
    this.cells = Object.fromEntries(["prompt", "answer", "ttft", "age"].map((name) => [name, el("td", { class: "number" })]));
    const label = typeof id === "number" ? `#${id}` : "–";
    this.node = el("tr", {}, el("th", { scope: "row" }, label), el("td", { class: "badges" }, this.badge, " ", this.behind), el("td", { class: "wide" }, this.bar), Object.values(this.cells));
  }

  update(request) {
    this.badge.className = `badge ${request.status}`;
    setText(this.badge, NAMES[request.status]);
    this.behind.hidden = request.class !== "proactive";
    setText(this.cells.age, duration(Math.max(0, request.age)));
    if (request.status === "queued") return;
    const { prompt_tokens: prompt, cached_tokens: cached, output_tokens: output, max_output_tokens: max } = request;
    const computed = Math.min(request.computed_tokens, prompt);
    const total = prompt + (max ?? output);
    const widths = [Math.min(cached, computed), Math.max(0, computed - cached), output].map((count) => (count / total) * 100);
    this.parts.forEach((part, index) => (part.style.width = `${widths[index]}%`));
    this.bar.setAttribute("aria-valuenow", Math.round(widths.reduce((sum, each) => sum + each)));
    this.bar.title = `${cached} of ${prompt} prompt tokens cached`;
    setText(this.cells.prompt, `${computed} / ${prompt}`);
    setText(this.cells.answer, max ? `${output} / ${max}` : `${output}`);
    setText(this.cells.ttft, request.ttft_ms === null ? "" : duration(request.ttft_ms));
  }
}

function heldText(call) {
  const prompts = call.prefill.map(([id, count]) => `${count} prompt tokens of #${id}`);
  const decode = call.decode.length ? [`the next token of ${call.decode.map((id) => `#${id}`).join(", ")}`] : [];
  return [...prompts, ...decode].join("; ");
}

/** Return runs of calls of the same program that hold the same requests; a call that failed is a run of its own. */
function grouped(calls) {
  const groups = [];
  let last = null;
  for (const call of calls) {
    const key = call.failed ? null : JSON.stringify([call.rows, call.decode, call.prefill.map(([id]) => id)]);
    if (key !== null && key === last) groups.at(-1).push(call);
    else groups.push([call]);
    last = key;
  }
  return groups;
}

function callRow(calls) {
  const call = calls.at(-1);
  const ms = calls.reduce((sum, each) => sum + each.ms, 0) / calls.length;
  const prefill = call.prefill.map(([id], index) => [id, calls.reduce((sum, each) => sum + each.prefill[index][1], 0)]);
  const { padding } = rowsOf(call);
  const ids = call.decode.slice(0, 8).map((id) => `#${id}`).join(" ") + (call.decode.length > 8 ? ` +${call.decode.length - 8}` : "");
  const chips = [
    ...prefill.slice(0, 4).map(([id, count]) => el("span", { class: "chip prefill" }, `#${id} prefill ${count}`)),
    call.prefill.length > 4 && el("span", { class: "chip prefill" }, `+${call.prefill.length - 4}`),
    call.decode.length > 0 && el("span", { class: "chip decode" }, `decode ${ids}`),
    call.proactive > 0 && el("span", { class: "chip" }, `${call.proactive} proactive`),
    call.drafted > 0 && el("span", { class: "chip" }, `drafts ${call.accepted}/${call.drafted}`),
    call.is_inserted && el("span", { class: "chip" }, "between blocks"),
    call.inserted > 0 && el("span", { class: "chip" }, `with ${call.inserted} between its blocks`),
    padding > 0 && el("span", { class: "chip" }, `padding ${padding}`),
    call.preempted.length > 0 && el("span", { class: "chip bad" }, `preempted ${call.preempted.map((id) => `#${id}`).join(" ")}`),
    call.failed && el("span", { class: "chip bad" }, "failed"),
  ];
  return el("tr", {}, el("th", { scope: "row", class: "wide chips" }, chips, calls.length > 1 && el("span", { class: "times" }, `${calls.length} calls`)), el("td", { class: "number" }, `${call.rows} × ${call.kv_len}`), el("td", { class: "number" }, duration(ms)));
}

/** One device of an encoder, whose calls may be jobs of a chat model's engine. */
function encoderRow({ model, engine }, device, index) {
  const counts = [device.waiting, device.running, device.depth ?? "–", device.embedded].map((count) => el("td", { class: "number" }, `${count}`));
  const state = device.health !== "alive" && el("span", { class: "badge bad" }, device.health);
  const shared = device.is_shared && engine ? `of ${engine}` : "its own";
  return el("tr", {}, el("th", { scope: "row" }, index ? "" : model), el("td", {}, device.name, " ", state), el("td", {}, shared), counts);
}

/** One client with an entry in the config file, or all others. */
function clientRow({ name, share, seconds }, whole) {
  const part = whole ? `${((seconds / whole) * 100).toFixed(0)} %` : "";
  const cells = [`${share}`, seconds ? duration(seconds * 1000) : "–", part].map((text) => el("td", { class: "number" }, text));
  return el("tr", {}, el("th", { scope: "row" }, name), cells);
}

function answerRow(answer) {
  const time = (ms) => el("td", { class: "number" }, ms === null ? "" : duration(ms));
  const reason = el("td", {}, el("span", { class: `badge ${answer.reason === "error" ? "bad" : ""}` }, answer.reason));
  const prompt = answer.cached_tokens ? `${answer.prompt_tokens} (${answer.cached_tokens} cached)` : `${answer.prompt_tokens}`;
  const counts = [prompt, answer.output_tokens].map((count) => el("td", { class: "number" }, `${count}`));
  return el("tr", {}, el("th", { scope: "row" }, `#${answer.id}`), reason, counts, time(answer.ttft_ms), time(answer.tpot_ms), time(answer.longest_gap_ms));
}

/** Return a picture of calls: a column each, as high as its rows. The table below has the same for screen readers. */
function strip(calls, most) {
  const width = 960;
  const height = 84;
  const step = width / NUM_CALLS;
  const scale = (count) => (Math.log2(1 + count) / Math.log2(1 + most)) * height;
  const columns = calls.map((call, index) => {
    const { prefill, decode, padding } = rowsOf(call);
    const whole = scale(call.rows);
    let at = height;
    const parts = [["decode", decode], ["prefill", prefill], ["padding", padding]].filter(([, count]) => count > 0);
    const rects = parts.map(([name, count]) => {
      const size = (count / call.rows) * whole;
      at -= size;
      return svg("rect", { class: call.failed ? "failed" : name, x: (index + NUM_CALLS - calls.length) * step, y: at, width: step - 1, height: size });
    });
    return svg("g", {}, svg("title", {}, `${call.rows} rows, ${duration(call.ms)}: ${heldText(call)}`), rects);
  });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, columns);
}

// ---- plots: the last minute, from left to right

const plotX = (second, end) => PLOT.left + ((second - (end - WINDOW)) / WINDOW) * (PLOT.width - PLOT.left - PLOT.right);
const plotY = (share) => PLOT.top + (1 - share) * (PLOT.height - PLOT.top - PLOT.bottom);

/** Return the next round number from a value on. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value * 0.999);
}

function plotBase(node, top, labelOf) {
  const lines = [0, 0.5, 1].map((share) => [
    svg("line", { class: "grid", x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: plotY(share), y2: plotY(share) }),
    svg("text", { x: PLOT.left - 6, y: plotY(share) + 3.5, "text-anchor": "end" }, labelOf(top * share)),
  ]);
  const times = [["start", PLOT.left, `${WINDOW} s ago`], ["end", PLOT.width - PLOT.right, "now"]];
  const texts = times.map(([anchor, x, text]) => svg("text", { x, y: PLOT.height - 4, "text-anchor": anchor }, text));
  node.replaceChildren(...lines.flat(), ...texts);
}

function plotDots(node, points, end) {
  const top = niceTop(Math.max(10, ...points.map(({ y }) => y)));
  plotBase(node, top, duration0);
  node.append(...points.map(({ x, y }) => svg("circle", { class: "dot", cx: plotX(Math.max(x, end - WINDOW), end), cy: plotY(y / top), r: 3 })));
}

function plotGaps(node, seconds, end) {
  const top = niceTop(Math.max(10, ...seconds.map((each) => each.gap ?? 0)));
  plotBase(node, top, duration0);
  const width = (PLOT.width - PLOT.left - PLOT.right) / WINDOW;
  const known = seconds.filter((each) => each.gap);
  node.append(...known.map(({ second, gap }) => svg("rect", { class: "decode", x: plotX(second, end), y: plotY(gap / top), width: width - 0.8, height: plotY(0) - plotY(gap / top) })));
}

function plotShare(node, seconds, end) {
  plotBase(node, 1, (share) => `${(share * 100).toFixed(0)} %`);
  const width = (PLOT.width - PLOT.left - PLOT.right) / WINDOW;
  for (const { second, prefill = 0, decode = 0, jobs = 0 } of seconds) {
    const [low, high, top] = [decode, decode + prefill, decode + prefill + jobs].map((each) => Math.min(1, each));
    const bar = (name, from, to) => to > from && svg("rect", { class: name, x: plotX(second, end), y: plotY(to), width: width - 0.8, height: plotY(from) - plotY(to) });
    node.append(...[bar("decode", 0, low), bar("prefill", low, high), bar("jobs", high, top)].filter(Boolean));
  }
}

const duration0 = (ms) => (ms === 0 ? "0" : duration(ms));
