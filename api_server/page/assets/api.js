// Requests to the server: addresses, the key, and errors with the server's message.
import { askForKey, keep, key } from "./key.js";
import { eventsOf } from "./sse.js";

/** A failed request. status: of HTTP; 0 without a response. */
export class ServerError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Returns the full address of a path; the page may be below a prefix of a proxy. */
export const addressOf = (path) => new URL(path, document.baseURI).href;

/** Fetches a path with the API key; asks the user for a key if the server needs one. */
export async function request(path, options = {}) {
  for (;;) {
    const used = key();
    const headers = { ...options.headers };
    if (used) headers.Authorization = `Bearer ${used}`;
    const response = await reach(path, { ...options, headers });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (used === key() && used) keep(""); // unless it was replaced in the meantime
    if (key()) continue;
    const reason = used
      ? "The server refused this key. Is it complete, and one of this server?"
      : "This server needs an API key. It is kept until this tab is closed.";
    if (!(await askForKey(reason))) throw error;
  }
}

/** Posts a body as JSON, as request() does. */
export const post = (path, body, signal) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

async function reach(path, options) {
  try {
    return await fetch(addressOf(path), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const error = JSON.parse(text).error;
    return new ServerError(error.message, response.status, error.param);
  } catch {
    const words = text.trim().slice(0, 300) || response.statusText;
    return new ServerError(words, response.status);
  }
}

/** Yields the chunks of a streamed generation; throws ServerError, or AbortError after a stop. */
export async function* generate(path, body, signal) {
  const response = await post(path, body, signal);
  try {
    for await (const { event, data } of eventsOf(response)) {
      if (event === "idle") continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, chunk.error.code ?? 500);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
  }
  signal.throwIfAborted();
  throw new ServerError("The connection ended before the response was complete.");
}
