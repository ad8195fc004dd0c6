// Owns the form of parameters and what it adds to a request. A field that is empty is not sent:
// the server's default counts, and what is wrong with a value the server says.
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

/** The fields of a request that the form stands for. */
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

/** Whether probabilities of tokens are wanted. */
export const wantsProbabilities = () => byId("p-logprobs").checked;

/** The system message, "" for none. */
export const systemMessage = () => byId("p-system").value.trim();
