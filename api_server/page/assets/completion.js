// The Completion tab: a prompt and its continuation.
import { byId, make } from "./dom.js";
import { MAX_COMPLETION_TOKENS, parameters, tokenFields } from "./parameters.js";
import { Run } from "./run.js";
import { completionTokens, TokenText } from "./tokens.js";

const PATH = "v1/completions";

function body() {
  const fields = { prompt: byId("prompt").value, max_tokens: MAX_COMPLETION_TOKENS, ...parameters(), stream: true };
  fields.stream_options = { include_usage: true };
  return { ...fields, ...tokenFields({ logprobs: 5 }) };
}

/** Returns path and body of the request that would be sent now. */
export const completionRequest = () => ({ path: PATH, body: body() });

/** Returns a run that replaces the text below the prompt. */
export function completionRun() {
  const text = new TokenText("Tokens of the answer; arrow keys go from one to the next");
  const sent = body();
  const run = new Run(PATH, sent, (choice) => {
    const tokens = completionTokens(choice);
    text.add(choice.text, tokens);
    return tokens.length || Number(choice.text !== "");
  });
  const prompt = make("span", { class: "echo" }, sent.prompt);
  text.element.prepend(prompt);
  byId("completion-output").replaceChildren(text.element, run.summary);
  return run;
}
