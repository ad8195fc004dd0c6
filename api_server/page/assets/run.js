// One generation from the click to its last token: the stream, its abort, its figures, and the line that
// shows them. The caller interprets the chunks and shows the text.
import { generate } from "./api.js";
import { announce, duration, figure, make } from "./dom.js";

const ENDINGS = {
  stop: "complete",
  max_tokens: "cut at Max tokens",
  context: "cut at the end of the context",
  abort: "ended by the server's operator",
  repetition: "ended because it repeated itself",
  tool_calls: "called a tool",
  stopped: "stopped by you",
  interrupted: "interrupted: the page was closed",
  failed: "ended by an error",
};
const GUESSED_AHEAD =
  "The server guessed these tokens before the model computed them, and the model confirmed the guess (speculative decoding). It makes answers faster, not different.";

/** A generation. onChoice(choice) gets each choice of a chunk, and returns its number of tokens. */
export class Run {
  constructor(path, body, onChoice) {
    this.path = path;
    this.body = body;
    this.stopped = new AbortController();
    this.onChoice = onChoice;
    this.summary = make("p", { class: "summary" });
    this.stats = { output: 0, guessed: 0 };
    this.ending = null; // finish_reason, stopped, or failed
    this.error = null; // of a failed one: a ServerError
  }

  /** Closes the connection, which aborts the request in the engine. */
  stop() {
    this.stopped.abort();
  }

  /** Reads the stream to its end; then `ending`, `error` and `stats` are set. */
  async finish() {
    this.begin = performance.now();
    this.summary.textContent = "Waiting for the first token …";
    announce("Generating.");
    try {
      for await (const chunk of generate(this.path, this.body, this.stopped.signal)) {
        this.#processChunk(chunk);
      }
      this.ending = endingOf(this.reason, this.body);
    } catch (error) {
      this.ending = error.name === "AbortError" ? "stopped" : "failed";
      if (this.ending === "failed") this.error = error;
    }
    showSummary(this.summary, this.stats, this.ending, this.error && errorWords(this.error));
    const words = this.error ? `Error: ${this.error.message}` : endingWords(this.ending);
    announce(`${figure(this.stats.output)} tokens, ${words}.`);
  }

  #processChunk(chunk) {
    const { stats } = this;
    if (chunk.usage) {
      stats.prompt = chunk.usage.prompt_tokens;
      stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      stats.output = chunk.usage.completion_tokens;
    }
    for (const choice of chunk.choices) {
      const number = this.onChoice(choice);
      this.reason = choice.finish_reason ?? this.reason;
      stats.guessed += (choice.accepted_drafts ?? []).filter(Boolean).length;
      if (!number) continue;
      const now = performance.now();
      stats.firstMs ??= now - this.begin;
      stats.restMs = now - this.begin - stats.firstMs;
      stats.output += number;
    }
    showSummary(this.summary, stats, null);
  }
}

/** The fields that let an answer be read while it is generated. */
export const STREAMED = { stream: true, stream_options: { include_usage: true } };

/** What ended an answer; of one that was cut, by what. */
const endingOf = (reason, body) =>
  reason === "length" ? (body.max_tokens ? "max_tokens" : "context") : (reason ?? "stop");

/** Whether an answer ended before the model was done, so that it can be continued. */
export const isCut = (ending) =>
  ["max_tokens", "context", "stopped", "interrupted", "failed", "abort"].includes(ending);

const endingWords = (ending) => ENDINGS[ending] ?? ending;

/** The words of a failed request: its HTTP status and the server's message. */
export const errorWords = (error) => (error.status ? `${error.status}: ${error.message}` : error.message);

/** Shows the figures of an answer in its line. ending: null while it is generated. error: words; "" for none. */
export function showSummary(line, stats, ending, error = "") {
  const parts = [];
  const add = (name, ...value) =>
    parts.push(make("span", {}, make("span", { class: "name" }, `${name} `), ...value));
  if (stats?.prompt !== undefined) {
    const from = stats.cached ? ` (${figure(stats.cached)} of them from the cache)` : "";
    add("prompt", `${figure(stats.prompt)} tokens${from}`);
  }
  if (stats?.output) {
    const guessed = stats.guessed
      ? [", ", make("span", { class: "drafted", title: GUESSED_AHEAD }, `${figure(stats.guessed)} guessed ahead`)]
      : [];
    add(stats.isContinued ? "continuation" : "answer", `${figure(stats.output)} ${stats.output === 1 ? "token" : "tokens"}`, ...guessed);
  }
  if (stats?.firstMs !== undefined) add("first token after", duration(stats.firstMs));
  if (stats?.restMs > 0) add("speed", `${figure(((stats.output - 1) * 1000) / stats.restMs)} tokens/s`);
  if (error) parts.push(make("span", { class: "error" }, error));
  else if (ending) parts.push(make("span", { class: "ending" }, endingWords(ending)));
  line.classList.toggle("failed", Boolean(error));
  line.replaceChildren(...parts);
}
