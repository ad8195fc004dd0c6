// The Completion tab: a prompt and its continuation.
import { byId, make } from "./dom.js";
import { modelField } from "./models.js";
import { MAX_COMPLETION_TOKENS, parameters, showFieldError, structure, tokenFields } from "./parameters.js";
import { Run, STREAMED } from "./run.js";
import { completionTokens, TokenText } from "./tokens.js";

const PATH = "v1/completions";

/** The generator of the tab. run: the one that goes on; null for none. */
export class Completion {
  run = null;

  /** Returns path and body of the request that would be sent now; throws a FieldError. */
  request() {
    const prompt = byId("prompt").value;
    const form = { max_tokens: MAX_COMPLETION_TOKENS, ...parameters(), ...structure(), ...tokenFields({ logprobs: 5 }) };
    return { path: PATH, body: { ...modelField(), prompt, ...form, ...STREAMED } };
  }

  /** Replaces the text below the prompt; returns when the generation has ended. */
  async start() {
    const text = new TokenText("Tokens of the answer; arrow keys go from one to the next");
    const { body } = this.request();
    this.run = new Run(PATH, body, (choice) => {
      const tokens = completionTokens(choice);
      text.add(choice.text, tokens);
      return tokens.length || Number(choice.text !== "");
    });
    text.element.prepend(make("span", { class: "echo" }, body.prompt));
    byId("completion-output").replaceChildren(text.element, this.run.summary);
    this.onRunsChanged();
    await this.run.finish();
    if (this.run.error) showFieldError(this.run.error);
    this.run = null;
    this.onRunsChanged();
  }

  get hasDraft() {
    return byId("prompt").value !== "";
  }

  get isBusy() {
    return this.run !== null;
  }

  stopAll() {
    this.run?.stop();
  }
}
