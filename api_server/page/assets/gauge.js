// The gauge below a chat: the tokens of the next request, counted by the server, against the context.
import { post } from "./api.js";
import { byId, figure } from "./dom.js";
import { model, modelField } from "./models.js";

const PAUSE_MS = 400;
const kept = new Set(); // ids of the images that were counted, which are not sent again to be counted
let timer = null;
let counting = new AbortController();

/** Counts soon. fields(kept): returns those of /tokenize; null if there is nothing to count. kept: images. */
export function countTokens(fields) {
  clearTimeout(timer);
  counting.abort();
  timer = setTimeout(() => count(fields), PAUSE_MS);
}

async function count(fields) {
  if (!model()) return;
  const wanted = fields(kept);
  if (wanted === null) {
    showTokens(0);
    return;
  }
  counting = new AbortController();
  try {
    const response = await post("tokenize", { ...modelField(), ...wanted }, counting.signal);
    showTokens((await response.json()).count);
    for (const { content } of wanted.messages) {
      if (Array.isArray(content)) for (const { uuid } of content) if (uuid) kept.add(uuid);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    if (kept.size && error.param?.endsWith("image_url")) {
      kept.clear(); // the server had to evict one
      return count(fields);
    }
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
