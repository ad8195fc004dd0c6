// The form of parameters. An empty field is not sent, so that the server's default applies; the server
// validates the values. On a narrow screen the form is folded until it is opened.
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
/** Default of a completion; that of the API, 16, would cut it short. */
export const MAX_COMPLETION_TOKENS = 512;
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

/** Shows the model's own defaults in the fields, instead of a temperature for models without. */
export function showDefaults(defaults) {
  for (const [name, value] of Object.entries(defaults)) {
    const input = byId(`p-${name}`);
    input.placeholder = value;
    if (input.value === input.defaultValue) input.value = "";
  }
}

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

/** Returns the fields that request tokens: an endpoint's own of log-probabilities, and drafts; {} for none. */
export const tokenFields = (logprobs) =>
  byId("p-logprobs").checked ? { ...logprobs, return_accepted_drafts: true } : {};

/** Returns the system message; "" for none. */
export const systemMessage = () => byId("p-system").value.trim();

/** Folds the form whenever the screen becomes narrow, and opens it when it becomes wide. */
export function startParameters() {
  const narrow = matchMedia("(max-width: 860px)");
  const fold = () => (byId("parameters-fold").open = !narrow.matches);
  narrow.addEventListener("change", fold);
  fold();
}
