// Talks to the server: JSON, and streams of chat chunks.

const KEY = "staticllm.key";

/** The API key, which is kept until the tab is closed. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** An answer of the server that is an error, or no answer (status 0). */
export class ServerError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(more = {}) {
  const key = apiKey.get();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function send(path, options) {
  try {
    return await fetch(path, { ...options, headers: headers(options.headers), credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // no JSON: the status says enough
  }
  if (response.status === 401) return new ServerError("This server needs an API key.", 401, "invalid_api_key");
  return new ServerError(oneLine(error.message) || `The server answered with status ${response.status}.`, response.status, error.code);
}

const oneLine = (text) => (typeof text === "string" ? text.replace(/\s+/g, " ").trim().slice(0, 400) : "");

/** Return the JSON of a path. `anyStatus`: also of an error. */
export async function getJson(path, { anyStatus = false, signal } = {}) {
  const response = await send(path, { signal });
  if (!response.ok && !anyStatus) throw await errorOf(response);
  return response.json();
}

async function post(path, body, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await send(path, options);
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

/** Return how many tokens a text or conversation has (`count`), and how many the model reads at once (`max_prompt_len`). */
export const countTokens = (body, signal) => post("tokenize", body, signal);

/** Return the vectors of texts. */
export async function embed(body, signal) {
  const { data } = await post("v1/embeddings", body, signal);
  return data.map((each) => each.embedding);
}

/** Return what a speech model hears in a recording. */
export async function transcribe(recording, model) {
  const body = new FormData();
  body.append("model", model);
  body.append("file", recording, "dictation.wav");
  const response = await send("v1/audio/transcriptions", { method: "POST", body });
  if (!response.ok) throw await errorOf(response);
  return (await response.json()).text;
}

/** Post a chat request, and call `onChunk` with each chunk of its stream. */
export async function streamChat(body, { signal, onChunk }) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await send("v1/chat/completions", options);
  if (!response.ok) throw await errorOf(response);
  let isDone = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        isDone = true;
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(oneLine(chunk.error.message) || "The answer failed.", 500, chunk.error.code);
      onChunk(chunk);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection was lost.");
  }
  if (!isDone) throw new ServerError("The connection was lost.");
}

/** Yield the data of server-sent events. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trimStart();
      }
      if (done) return;
    }
  } finally {
    reader.releaseLock();
  }
}
