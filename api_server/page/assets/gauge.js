// The gauge below a chat: the tokens of the next request, counted by the server, against the context.
import { post } from "./api.js";
import { byId, figure } from "./dom.js";
import { model, modelField } from "./models.js";

const PAUSE_MS = 400;
let timer = null;
let counting = new AbortController();

/** Counts soon. fields(withImages): returns those of /tokenize; null if there is nothing to count. */
export function countTokens(fields) {
  clearTimeout(timer);
  counting.abort();
  timer = setTimeout(() => count(fields), PAUSE_MS);
}

/** Counts, with the names of images first: they are sent only if the server has not kept them. */
async function count(fields, withImages = false) {
  if (!model()) return;
  const wanted = fields(withImages);
  if (wanted === null) {
    showTokens(0);
    return;
  }
  counting = new AbortController();
  try {
    const response = await post("tokenize", { ...modelField(), ...wanted }, counting.signal);
    showTokens((await response.json()).count);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!withImages && error.param?.endsWith("image_url")) return count(fields, true);
    if (error.param === "messages" && error.status === 400) showTokens(Infinity); // longer than is counted
    else byId("gauge").hidden = true; // the request itself will say why
  }
}

/** Shows a number of tokens that is known, as from the usage of an answer. */
export function showTokens(number) {
  if (!model()) return;
  const limit = model().max_model_len;
  const gauge = byId("gauge");
  const isFull = number >= limit;
  byId("gauge-bar").style.setProperty("--part", String(Math.min(1, number / limit)));
  byId("gauge-words").textContent = Number.isFinite(number)
    ? `${figure(number)} of ${figure(limit)} tokens`
    : `far more than ${figure(limit)} tokens`;
  gauge.classList.toggle("full", isFull);
  gauge.title = isFull
    ? "The conversation is longer than the context of the model: delete turns or begin a new chat."
    : "What the model reads with the next message, of what it can read and write at once. Counted by the server.";
  gauge.setAttribute("aria-label", `Context: ${byId("gauge-words").textContent}${isFull ? ", full" : ""}`);
  gauge.hidden = false;
}
