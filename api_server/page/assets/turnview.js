// How a turn of a chat is shown: a question, a tool's result, or an answer as Markdown or as tokens. An answer
// grows while it is generated.
import { isEmptyAnswer } from "./conversation.js";
import { announce, button, copyButton, figure, make } from "./dom.js";
import { picturesOf } from "./images.js";
import { MarkdownText } from "./markdown.js";
import { isCut, showSummary } from "./run.js";
import { TokenText } from "./tokens.js";

let showsTokens = false; // the choice at the last answer holds for the next ones

/**
 * Returns the view of a turn. actions: of the chat, each called with the id of the turn: remove, showBranch,
 * edit(id, text), regenerate, continueAnswer, answerCalls(id, results).
 */
export const viewOf = (turn, actions) =>
  turn.role === "assistant" ? new AnswerView(turn, actions) : new SaidView(turn, actions);

/** The buttons below a turn, and the way to its other branches: ‹ 2 of 3 › */
class TurnActions {
  constructor(actions) {
    this.actions = actions;
    this.element = make("div", { class: "turn-actions" });
  }

  show(turn, { branches, isBusy }, buttons) {
    const parts = [];
    if (branches.length > 1) {
      const at = branches.indexOf(turn.id);
      const go = (step, sign, words) => {
        const each = button(sign, () => this.actions.showBranch(branches[at + step]));
        each.ariaLabel = words;
        each.disabled = isBusy || !branches[at + step];
        return each;
      };
      const place = make("span", { class: "branch-place" }, `${at + 1} of ${branches.length}`);
      const what = turn.role === "assistant" ? "answer" : "question";
      const ways = [go(-1, "‹", `Previous ${what}`), place, go(1, "›", `Next ${what}`)];
      parts.push(make("span", { class: "branches", role: "group", "aria-label": "Branches" }, ...ways));
    }
    this.element.replaceChildren(...parts, ...buttons);
  }
}

/** A question, or the result of a tool. */
class SaidView {
  constructor(turn, actions) {
    this.actions = actions;
    this.said = make("div", { class: "said" });
    this.buttons = new TurnActions(actions);
    const name = turn.role === "user" ? "You" : "Result of the tool";
    this.element = make("article", { class: `turn ${turn.role}` }, make("h2", {}, name), this.said, this.buttons.element);
  }

  /** Shows the turn. context: { branches, isBusy, isLost }. */
  update(turn, context) {
    this.element.classList.toggle("lost", context.isLost);
    if (this.isEdited) return;
    this.said.replaceChildren(...picturesOf(turn), turn.content);
    const buttons = [copyButton(() => turn.content)];
    if (!context.isBusy) {
      if (turn.role === "user") buttons.push(button("Edit", () => this.#edit(turn, context)));
      buttons.push(button("Delete", () => this.actions.remove(turn.id), "Delete this and what follows"));
    }
    this.buttons.show(turn, context, buttons);
  }

  #edit(turn, context) {
    this.isEdited = true;
    const area = make("textarea", { class: "edited", value: turn.content, rows: 3, "aria-label": "Question" });
    const end = () => {
      this.isEdited = false;
      this.element.classList.remove("editing");
      this.update(turn, context);
    };
    const send = () => {
      if (!area.value.trim() && !turn.images) return;
      end();
      this.actions.edit(turn.id, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault();
        end();
        this.element.querySelector(".turn-actions button")?.focus();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.element.classList.add("editing");
    this.said.replaceChildren(...picturesOf(turn), area);
    this.buttons.element.replaceChildren(button("Send", send, "Ask this instead; the old question stays beside it"), button("Cancel", end));
    area.focus();
  }
}

/** An answer. While it is generated, add() gets its parts, and then update() its end. */
class AnswerView {
  constructor(turn, actions) {
    this.actions = actions;
    this.text = new MarkdownText();
    this.tokenText = new TokenText("Tokens of the answer; arrow keys go from one to the next");
    this.thought = make("div", { class: "thought" });
    this.thoughts = make("details", { class: "thoughts" }, make("summary", {}, "Reasoning"), this.thought);
    this.thoughts.hidden = true;
    this.calls = make("div", { class: "calls" });
    this.summary = make("p", { class: "summary" });
    this.buttons = new TurnActions(actions);
    this.hasTokens = false;
    this.element = make(
      "article",
      { class: "turn assistant" },
      ...[make("h2", {}, "Model"), this.thoughts, this.text.element, this.tokenText.element, this.calls],
      ...[this.summary, this.buttons.element],
    );
    this.#showAs(false);
  }

  /** Begins the part of an answer that a run generates; line: its figures. withTokens: they were requested. */
  begin(turn, line, withTokens) {
    if (withTokens && !this.hasTokens) this.tokenText.add(turn.content, []);
    this.hasTokens = withTokens;
    this.summary.replaceWith(line);
    this.summary = line;
    this.#showAs(withTokens && showsTokens);
  }

  /** Appends generated text and its tokens. */
  add(text, tokens) {
    this.text.add(text);
    if (this.hasTokens) this.tokenText.add(text, tokens);
  }

  /** Appends reasoning. */
  addThought(text) {
    this.thoughts.hidden = false;
    this.thought.append(text);
    this.tokenText.skipWaiting();
  }

  /** Shows the turn. context: as of a question; isRunning: it is being generated; canAnswer: its calls wait. */
  update(turn, context) {
    this.element.classList.toggle("lost", context.isLost && !context.isRunning);
    if (!context.isRunning) {
      if (this.text.text !== turn.content) {
        this.hasTokens = false; // it was changed elsewhere, or comes from the store
        this.#showAs(false);
        this.text.set(turn.content);
      } else {
        this.text.finish();
      }
      if (this.thought.textContent !== (turn.reasoning ?? "")) this.thought.textContent = turn.reasoning;
      this.thoughts.hidden = !turn.reasoning;
      showSummary(this.summary, turn.stats, turn.ending ?? "interrupted", turn.error);
    }
    this.#showCalls(turn, context);
    this.buttons.show(turn, context, context.isRunning ? [] : this.#buttonsOf(turn, context));
  }

  #buttonsOf(turn, { isBusy, isElsewhere }) {
    const buttons = [];
    if (turn.content) {
      buttons.push(copyButton(() => turn.content));
      if (this.hasTokens) {
        const tokens = button("Tokens", () => {
          showsTokens = this.tokenText.element.hidden;
          this.#showAs(showsTokens);
          tokens.setAttribute("aria-pressed", String(showsTokens));
        }, "Show the tokens and their probabilities");
        tokens.setAttribute("aria-pressed", String(!this.tokenText.element.hidden));
        buttons.push(tokens);
      }
    }
    if (isBusy) return buttons;
    const again = isEmptyAnswer(turn) ? "Try again" : "Regenerate";
    buttons.push(button(again, () => this.actions.regenerate(turn.id), "Answer again; this answer stays beside the new one"));
    if (turn.content && isCut(turn.ending ?? "interrupted") && !isElsewhere && !turn.toolCalls?.length) {
      buttons.push(button("Continue", () => this.actions.continueAnswer(turn.id), "Let the model go on where the answer was cut"));
    }
    buttons.push(button("Delete", () => this.actions.remove(turn.id), "Delete this answer and what follows"));
    return buttons;
  }

  #showAs(asTokens) {
    this.text.element.hidden = asTokens;
    this.tokenText.element.hidden = !asTokens;
  }

  /** The calls of tools, each with a field for its result while none was given. */
  #showCalls(turn, { canAnswer, isRunning }) {
    const calls = turn.toolCalls ?? [];
    const key = JSON.stringify([calls, canAnswer, isRunning]);
    if (key === this.shownCalls) return; // keep what is being typed
    this.shownCalls = key;
    const fields = [];
    const boxes = calls.map((call) => {
      const head = make("div", { class: "call-head" }, "The model calls ", make("code", {}, call.name));
      const box = make("div", { class: "call" }, head, make("pre", { tabIndex: 0 }, indented(call.arguments)));
      if (canAnswer) {
        const label = `Result of ${call.name}`;
        fields.push(make("textarea", { rows: 2, placeholder: label, "aria-label": label }));
        box.append(fields.at(-1));
      }
      return box;
    });
    if (canAnswer) {
      const send = button(calls.length > 1 ? "Send results" : "Send result", () => {
        this.actions.answerCalls(turn.id, fields.map((each) => each.value));
        announce(`${figure(calls.length)} results sent.`);
      });
      send.className = "main";
      boxes.push(send);
    }
    this.calls.replaceChildren(...boxes);
  }
}

/** JSON with line breaks; a text that is not JSON as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
