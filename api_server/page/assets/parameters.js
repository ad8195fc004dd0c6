// The form of parameters. An empty field is not sent, so that the server's default applies; the server
// validates the values.
import { byId } from "./dom.js";

const NUMBERS = [
  "max_tokens",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
];
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

/** Returns the form's fields of a request. */
export function parameters() {
  const fields = {};
  for (const name of NUMBERS) {
    const input = byId(`p-${name}`);
    if (input.value !== "") fields[name] = Number(input.value);
  }
  const stop = byId("p-stop")
    .value.split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\[nt\\]/g, (each) => ESCAPES[each]));
  if (stop.length) fields.stop = stop;
  return fields;
}

/** Returns whether token probabilities are requested. */
export const wantsProbabilities = () => byId("p-logprobs").checked;

/** Returns the system message; "" for none. */
export const systemMessage = () => byId("p-system").value.trim();
