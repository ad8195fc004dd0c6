// Owns one generation from the click to its last token: the stream, the stop, the clock and the
// line that says how it went. What chunks mean, and where text goes, is its caller's.
import { generate } from "./api.js";
import { announce, duration, figure, make } from "./dom.js";

const REASONS = {
  stop: "ended by itself",
  length: "reached max_tokens",
  abort: "ended by an operator",
  repetition: "ended for repeating itself",
  tool_calls: "called a tool",
};

/** A generation. take(choice) gets each choice of a chunk, and returns how many tokens it had. */
export class Run {
  constructor(path, body, take) {
    this.path = path;
    this.body = body;
    this.summary = make("p", { class: "summary" });
    this.stopped = new AbortController();
    this.take = take;
  }

  /** Ends it: the connection closes, and with it the engine's work on the request. */
  stop() {
    this.stopped.abort();
  }

  /** Whether all of it came. Errors are shown in the summary, not thrown. */
  async finish() {
    this.begin = performance.now();
    this.numTokens = 0;
    this.summary.textContent = "Waiting for the first token …";
    announce("Generating.");
    try {
      for await (const chunk of generate(this.path, this.body, this.stopped.signal)) {
        this.#take(chunk);
      }
      this.#say(REASONS[this.reason] ?? this.reason ?? "ended");
      return true;
    } catch (error) {
      if (error.name === "AbortError") this.#say("stopped");
      else this.#fail(error);
      return false;
    }
  }

  #take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      const number = this.take(choice);
      this.reason = choice.finish_reason ?? this.reason;
      if (!number) continue;
      this.last = performance.now();
      this.first ??= this.last;
      this.numTokens += number;
      this.#say("");
    }
  }

  #say(ending) {
    const output = this.usage?.completion_tokens ?? this.numTokens;
    const said = [];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const from = cached ? ` (${figure(cached)} cached)` : "";
      said.push(["prompt", `${figure(this.usage.prompt_tokens)}${from}`]);
    }
    said.push(["output", `${figure(output)} tokens`]);
    if (this.first !== undefined) said.push(["first token", duration(this.first - this.begin)]);
    if (this.last > this.first) {
      const rate = ((output - 1) * 1000) / (this.last - this.first);
      said.push(["speed", `${figure(rate)} tokens/s`]);
    }
    const parts = said.map(([name, value]) =>
      make("span", {}, make("span", { class: "name" }, `${name} `), value),
    );
    if (ending) parts.push(make("span", { class: "ending" }, ending));
    this.summary.replaceChildren(...parts);
    if (ending) announce(`${figure(output)} tokens, ${ending}.`);
  }

  #fail(error) {
    const status = error.status ? `${error.status}: ` : "";
    this.summary.replaceChildren(make("span", { class: "error" }, status + error.message));
    this.summary.classList.add("failed");
    announce(`Error: ${error.message}`);
  }
}
