// One generation from the click to its last token: the stream, its abort, its duration and the summary
// line. The caller interprets the chunks and shows the text.
import { generate } from "./api.js";
import { announce, duration, figure, make } from "./dom.js";

const REASONS = {
  stop: "ended by itself",
  abort: "ended by an operator",
  repetition: "ended because it repeated itself",
  tool_calls: "called a tool",
};

/** A generation. onChoice(choice) gets each choice of a chunk, and returns its number of tokens. */
export class Run {
  constructor(path, body, onChoice) {
    this.path = path;
    this.body = body;
    this.summary = make("p", { class: "summary" });
    this.stopped = new AbortController();
    this.onChoice = onChoice;
  }

  /** Closes the connection, which aborts the request in the engine. */
  stop() {
    this.stopped.abort();
  }

  /** Reads the stream; returns whether it is complete. Errors appear in the summary. */
  async finish() {
    this.begin = performance.now();
    this.numTokens = this.numDrafted = 0;
    this.summary.textContent = "Waiting for the first token …";
    announce("Generating.");
    try {
      for await (const chunk of generate(this.path, this.body, this.stopped.signal)) {
        this.#processChunk(chunk);
      }
      this.#summarize(this.#ending());
      return true;
    } catch (error) {
      if (error.name === "AbortError") this.#summarize("stopped");
      else this.#fail(error);
      return false;
    }
  }

  #ending() {
    if (this.reason === "length") {
      return this.body.max_tokens ? "reached max_tokens" : "reached the end of the context";
    }
    return REASONS[this.reason] ?? this.reason ?? "ended";
  }

  #processChunk(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      const number = this.onChoice(choice);
      this.reason = choice.finish_reason ?? this.reason;
      this.numDrafted += (choice.accepted_drafts ?? []).filter(Boolean).length;
      if (!number) continue;
      this.last = performance.now();
      this.first ??= this.last;
      this.numTokens += number;
      this.#summarize("");
    }
  }

  #summarize(ending) {
    const output = this.usage?.completion_tokens ?? this.numTokens;
    const entries = [];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const from = cached ? ` (${figure(cached)} cached)` : "";
      entries.push(["prompt", `${figure(this.usage.prompt_tokens)}${from}`]);
    }
    entries.push(["output", `${figure(output)} tokens`]);
    if (this.numDrafted) {
      const drafts = `${figure(this.numDrafted)} accepted ${this.numDrafted === 1 ? "draft" : "drafts"}`;
      entries.push(["of these", make("span", { class: "drafted" }, drafts)]);
    }
    if (this.first !== undefined) entries.push(["first token", duration(this.first - this.begin)]);
    if (this.last > this.first) {
      const rate = ((output - 1) * 1000) / (this.last - this.first);
      entries.push(["speed", `${figure(rate)} tokens/s`]);
    }
    const parts = entries.map(([name, value]) =>
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
