// The tokens of an answer, each with its most likely alternatives on hover and keyboard focus. A piece is
// a text with its tokens: several if they form a character together, or if the server held text back.
import { make, placeNear } from "./dom.js";

const hint = make("div", { class: "hint token-hint", role: "tooltip", id: "token-hint" });
hint.hidden = true;

const DRAFTED = "guessed ahead";

/** Hides the hint. */
export const hideTokenHint = () => (hint.hidden = true);

/** The element with the tokens of one answer. */
export class TokenText {
  constructor(label) {
    this.element = make("div", { class: "tokens", role: "group", "aria-label": label });
    this.waiting = [];
    this.element.addEventListener("pointerover", (event) => this.#show(event.target));
    this.element.addEventListener("pointerleave", hideTokenHint);
    this.element.addEventListener("focusin", (event) => this.#show(event.target));
    this.element.addEventListener("focusout", hideTokenHint);
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Appends received text and its tokens ([] if not requested). */
  add(text, tokens) {
    this.waiting.push(...tokens);
    if (text === "") return;
    if (!this.waiting.length) {
      this.element.append(text);
      return;
    }
    const pieces = split(text, this.waiting);
    this.waiting = [];
    for (const piece of pieces) this.element.append(this.#span(piece));
  }

  /** Forgets tokens whose text has not come: they are not part of this text. */
  skipWaiting() {
    this.waiting = [];
  }

  #span({ text, tokens }) {
    const span = make("span", { class: "token" }, text);
    span.tokens = tokens;
    span.tabIndex = this.element.querySelector(".token") ? -1 : 0;
    const likelihood = Math.exp(Math.min(...tokens.map((each) => each.logprob)));
    const doubt = (1 - likelihood) ** 2; // likely tokens stay untinted
    span.style.setProperty("--doubt", doubt.toFixed(2));
    if (tokens.every((each) => each.isDrafted)) {
      span.classList.add("drafted");
      span.setAttribute("aria-description", DRAFTED);
    }
    return span;
  }

  #show(target) {
    const span = target.closest?.(".token");
    if (!span) return;
    hint.replaceChildren(...span.tokens.flatMap(describe));
    document.querySelector("dialog[open], main").append(hint);
    placeNear(hint, span.getClientRects()[0] ?? span.getBoundingClientRect());
    span.setAttribute("aria-describedby", hint.id);
  }

  #move(event) {
    const span = event.target.closest(".token");
    if (!span) return;
    const all = [...this.element.querySelectorAll(".token")];
    const at = all.indexOf(span);
    const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 };
    const next = all[steps[event.key]];
    if (!next) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** Splits a text into a piece per token if their texts add up to it, else one piece. */
function split(text, tokens) {
  if (tokens.map((each) => each.text).join("") !== text) return [{ text, tokens }];
  return tokens.map((each) => ({ text: each.text, tokens: [each] }));
}

function describe(token) {
  const rows = token.best.slice(0, 5);
  if (!rows.some((each) => each.text === token.text)) rows.push(token);
  const list = make("ol", { class: "choices" });
  for (const row of rows) {
    const chance = Math.exp(row.logprob);
    const bar = make("i", { class: "bar" });
    bar.style.setProperty("--part", String(chance));
    const chosen = row.text === token.text;
    const share = make("b", {}, `${(chance * 100).toFixed(chance < 0.0995 ? 2 : 1)} %`);
    const item = make("li", {}, make("code", {}, visible(row.text)), bar, share);
    item.classList.toggle("chosen", chosen);
    if (chosen) item.append(make("span", { class: "unseen" }, "chosen"));
    list.append(item);
  }
  return token.isDrafted ? [list, make("p", { class: "quiet" }, DRAFTED)] : [list];
}

/** Replaces blanks and line breaks by visible characters. */
function visible(text) {
  if (text === "") return "(empty)";
  return text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

/** Returns the tokens of a choice in a chunk of /v1/completions. */
export function completionTokens({ logprobs, accepted_drafts: drafts }) {
  if (!logprobs) return [];
  return logprobs.tokens.map((text, at) => ({
    text,
    logprob: logprobs.token_logprobs[at] ?? 0,
    best: Object.entries(logprobs.top_logprobs?.[at] ?? {})
      .map(([each, logprob]) => ({ text: each, logprob }))
      .sort((one, other) => other.logprob - one.logprob),
    isDrafted: drafts?.[at] ?? false,
  }));
}

/** Returns the tokens of a choice in a chunk of /v1/chat/completions. */
export function chatTokens({ logprobs, accepted_drafts: drafts }) {
  return (logprobs?.content ?? []).map((each, at) => ({
    text: each.token,
    logprob: each.logprob,
    best: each.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob })),
    isDrafted: drafts?.[at] ?? false,
  }));
}
