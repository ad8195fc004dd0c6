// The Chat tab: shows one conversation of the store, and generates its answers. Several conversations can
// generate at once. What a request contains is the path of turns that the page shows, by `conversation.js`.
import { byId, make } from "./dom.js";
import {
  branchesAt, lastAnswered, merged, messagesTo, newConversation, pathOf, turnOf, withBranch,
  withChange, withoutTurn, withTurn,
} from "./conversation.js";
import { countTokens, showTokens } from "./gauge.js";
import { Attachments } from "./images.js";
import { modelField } from "./models.js";
import { fillForm, formValues, parameters, reportFieldError, showFieldError, structure, systemMessage, tokenFields, tools } from "./parameters.js";
import { errorWords, Run, STREAMED } from "./run.js";
import { chatTokens } from "./tokens.js";
import { viewOf } from "./turnview.js";

const PATH = "v1/chat/completions";
const SAVE_MS = 1000; // between two saves while an answer is generated
const ELSEWHERE_MS = 3000; // an unfinished answer that was saved since then is generated in another tab

/** A conversation that is shown or that generates. now: as it is; saved: as the store has it, null if not. */
class OpenConversation {
  constructor(store, conversation, saved) {
    this.store = store;
    this.now = conversation;
    this.saved = saved;
    this.run = null;
    this.isGone = false;
    this.writing = Promise.resolve();
  }

  /** Saves it with what other tabs have changed, unless it was deleted here. */
  save() {
    this.writing = this.writing.then(async () => {
      if (this.isGone) return;
      const sent = this.now;
      this.saved = await this.store.save(sent, this.saved);
      this.now = merged(sent, this.now, this.saved);
    });
    return this.writing;
  }
}

/** The generator of the tab. onShown(id): called with the id of what is shown, null for a new conversation. */
export class Chat {
  constructor(store, onShown) {
    this.store = store;
    this.onShown = onShown;
    this.views = new Map(); // by the id of a turn
    this.generating = new Map(); // OpenConversations by id
    this.wanted = null; // id of the conversation that was chosen last
    this.onRunsChanged = () => {};
    this.follow = () => {};
    this.open = new OpenConversation(store, newConversation(), null);
    this.attached = new Attachments(() => this.#count(), (words) => this.notify(words));
    store.onProblem = (words) => this.notify(words);
    byId("chat-new").addEventListener("click", () => this.showNew());
    byId("message").addEventListener("input", () => this.#count());
    byId("parameters").addEventListener("input", () => this.#keepSettings());
    byId("notice-close").addEventListener("click", () => this.notify(""));
  }

  /** The run of the conversation that is shown; null for none. */
  get run() {
    return this.open.run;
  }

  /** Whether there is something to send. */
  get hasDraft() {
    return byId("message").value !== "" || this.attached.images.length > 0;
  }

  get isBusy() {
    return this.generating.size > 0;
  }

  /** Aborts the generation of one conversation, or of all. */
  stopAll(id = null) {
    for (const open of this.generating.values()) if (id === null || open.now.id === id) open.run.stop();
  }

  /** Shows an empty conversation; what is being generated goes on in its own. */
  showNew() {
    this.wanted = null;
    this.#show(new OpenConversation(this.store, newConversation(), null));
    byId("message").focus();
  }

  /** Shows a conversation of the store. */
  async show(id) {
    this.wanted = id;
    if (id === this.open.now.id) return;
    const kept = this.generating.get(id) ?? (await this.#read(id));
    if (this.wanted !== id) return; // another one was chosen meanwhile
    if (kept) this.#show(kept);
    else {
      this.showNew();
      this.notify("This conversation is not in this browser. It was deleted, or is in another one.");
    }
  }

  /** Shows what another tab has changed in the conversation; one that was removed is left. */
  async refresh(id, isRemoved) {
    const open = this.open;
    if (open.saved === null || (id !== null && id !== open.now.id)) return;
    if (isRemoved) {
      this.stopAll(open.now.id);
      this.showNew();
      this.notify("This conversation was deleted in another tab.");
      return;
    }
    const theirs = await this.store.conversation(open.now.id);
    if (!theirs || this.open !== open) return;
    open.now = merged(open.saved, open.now, theirs);
    open.saved = theirs;
    this.#render();
  }

  /** Says something above the composer; "" for nothing. undo(): of the button, if there is one. */
  notify(words, undo = null) {
    byId("notice").hidden = words === "";
    byId("notice-words").textContent = words;
    byId("notice-undo").hidden = undo === null;
    byId("notice-undo").onclick = () => {
      this.notify("");
      undo();
    };
  }

  /** Returns path and body of the request that would be sent now; throws a FieldError. */
  request() {
    this.#keepText(this.open);
    return { path: PATH, body: this.#body(this.#asked()) };
  }

  /** Sends the message; returns when its answer has ended. */
  async start() {
    const asked = this.#asked();
    const body = this.#body(asked); // may throw
    byId("message").value = "";
    this.attached.clear();
    this.notify("");
    await this.#answer(asked, body);
  }

  /** The conversation with the message that is being written. */
  #asked() {
    const { now } = this.open;
    const turn = { parent: lastAnswered(now), role: "user", content: byId("message").value };
    const { images } = this.attached;
    return withTurn(now, images.length ? { ...turn, images } : turn);
  }

  #body(conversation, extra = {}) {
    const messages = messagesTo(conversation, conversation.leaf, systemMessage());
    const form = { ...parameters(), ...tools(), ...structure(), ...tokenFields({ logprobs: true, top_logprobs: 5 }) };
    return { ...modelField(), messages, ...form, ...STREAMED, ...extra };
  }

  async #read(id) {
    const conversation = await this.store.conversation(id);
    return conversation && new OpenConversation(this.store, conversation, conversation);
  }

  #show(open) {
    this.open = open;
    if (Object.keys(open.now.settings).length) fillForm(open.now.settings);
    this.notify("");
    byId("turns").replaceChildren();
    this.#render();
    this.follow();
    this.onRunsChanged();
    this.onShown(open.saved || open.run ? open.now.id : null);
  }

  #keepSettings() {
    const { open } = this;
    this.#showSystem();
    this.#count();
    if (!open.now.turns.length) return;
    open.now = { ...open.now, settings: formValues(), updated: Date.now() };
    clearTimeout(this.settingsTimer);
    this.settingsTimer = setTimeout(() => open.save(), SAVE_MS / 2);
  }

  /** Generates an answer to the last turn of a conversation, or, with `continued`, the rest of that turn. */
  async #answer(conversation, body, continued = false) {
    const { open } = this;
    open.now = { ...conversation, settings: formValues() };
    if (!continued) {
      open.now = withTurn(open.now, { parent: conversation.leaf, role: "assistant", content: "", ending: null });
    } else {
      open.now = withChange(open.now, conversation.leaf, { ending: null, error: undefined });
    }
    const turn = turnOf(open.now, open.now.leaf);
    const view = this.#view(turn);
    const text = { id: turn.id, content: turn.content, reasoning: turn.reasoning ?? "", toolCalls: [] };
    const run = new Run(PATH, body, (choice) => readChoice(choice, text, view));
    run.stats.isContinued = continued;
    view.begin(turn, run.summary, Boolean(body.logprobs));
    open.run = run;
    open.text = text;
    this.generating.set(open.now.id, open);
    this.#render();
    this.follow();
    this.onRunsChanged();
    const saving = setInterval(() => {
      this.#keepText(open);
      open.save();
    }, SAVE_MS);
    open.save();
    this.onShown(open.now.id);
    await run.finish();
    clearInterval(saving);
    this.#keepText(open);
    const { ending, stats, error } = run;
    open.now = withChange(open.now, turn.id, { ending, stats, error: error ? errorWords(error) : undefined });
    open.run = open.text = null;
    this.generating.delete(open.now.id);
    await open.save();
    if (this.open === open) {
      this.#render();
      if (error) showFieldError(error);
      if (stats.prompt !== undefined && !byId("message").value) showTokens(stats.prompt + stats.output);
      else this.#count();
    }
    this.onRunsChanged();
  }

  /** Puts the text that was generated so far into the conversation. */
  #keepText(open) {
    if (!open.text) return;
    const { id, content, reasoning, toolCalls } = open.text;
    const fields = { content };
    if (reasoning) fields.reasoning = reasoning;
    if (toolCalls.length) fields.toolCalls = toolCalls.filter(Boolean).map((each) => ({ ...each }));
    open.now = withChange(open.now, id, fields);
  }

  #actions = {
    remove: (id) => {
      const before = this.open.now;
      this.#change(withoutTurn(before, id));
      const open = this.open;
      this.notify("Deleted, with what followed.", () => {
        open.now = { ...before, updated: Date.now() };
        this.#change(open.now, open);
      });
    },
    showBranch: (id) => this.#change(withBranch(this.open.now, id)),
    edit: (id, content) => {
      const { parent, images } = turnOf(this.open.now, id);
      const turn = { parent, role: "user", content };
      this.#send(withTurn(this.open.now, images ? { ...turn, images } : turn));
    },
    regenerate: (id) => this.#send({ ...this.open.now, leaf: turnOf(this.open.now, id).parent }),
    continueAnswer: (id) => {
      const extra = { continue_final_message: true, add_generation_prompt: false };
      this.#send({ ...this.open.now, leaf: id }, extra);
    },
    answerCalls: (id, results) => {
      const { toolCalls } = turnOf(this.open.now, id);
      let next = this.open.now;
      for (const [at, content] of results.entries()) {
        const fields = { role: "tool", toolCallId: toolCalls[at].id, content };
        next = withTurn(next, { parent: at ? next.leaf : id, ...fields });
      }
      this.#send(next);
    },
  };

  /** Requests what follows the last turn of a conversation. */
  async #send(conversation, extra = {}) {
    if (this.open.run) return;
    this.notify("");
    try {
      await this.#answer(conversation, this.#body(conversation, extra), Boolean(extra.continue_final_message));
    } catch (error) {
      reportFieldError(error);
    }
  }

  #change(conversation, open = this.open) {
    open.now = conversation;
    open.save();
    if (open === this.open) this.#render();
  }

  #view(turn) {
    if (!this.views.has(turn.id)) this.views.set(turn.id, viewOf(turn, this.#actions));
    return this.views.get(turn.id);
  }

  /** Shows the path; elements of turns that stay are kept. */
  #render() {
    const { now, run, text, saved } = this.open;
    const path = pathOf(now);
    const after = lastAnswered(now);
    const lost = run ? path.length : path.findIndex((each) => each.id === after) + 1;
    const isElsewhere = !run && Date.now() - (saved?.updated ?? 0) < ELSEWHERE_MS;
    const elements = path.map((turn, at) => {
      const view = this.#view(turn);
      const isRunning = run !== null && turn.id === text.id;
      view.update(turn, {
        branches: branchesAt(now, turn),
        isBusy: run !== null,
        isLost: at >= lost,
        isRunning,
        isElsewhere: isElsewhere && turn.ending === null,
        canAnswer: !run && at === path.length - 1 && Boolean(turn.toolCalls?.length),
      });
      return view.element;
    });
    const box = byId("turns");
    const isSame = elements.length === box.children.length && elements.every((each, at) => each === box.children[at]);
    if (!isSame) box.replaceChildren(...elements);
    byId("chat-empty").hidden = elements.length > 0;
    this.#showSystem();
    this.#count();
    clearTimeout(this.elsewhereTimer);
    if (isElsewhere && path.some((each) => each.ending === null)) {
      this.elsewhereTimer = setTimeout(() => this.#render(), ELSEWHERE_MS);
    }
  }

  /** Shows the system message above the turns, since it is sent with them. */
  #showSystem() {
    const system = systemMessage();
    byId("system-line").hidden = system === "";
    byId("system-line").replaceChildren(make("b", {}, "System message"), ` ${system}`);
  }

  #count() {
    if (this.open.run) return;
    countTokens((kept) => {
      const { now } = this.open;
      const next = this.hasDraft ? this.#asked() : { ...now, leaf: lastAnswered(now) };
      const messages = messagesTo(next, next.leaf, systemMessage(), kept);
      if (!messages.length) return null;
      try {
        return { messages, ...tools(), add_generation_prompt: messages.at(-1).role !== "assistant" };
      } catch {
        return null; // the field of tools is being written
      }
    });
  }
}

/** Adds a choice of a chunk to the text of an answer and to its view; returns its number of tokens. */
function readChoice(choice, text, view) {
  const { content, reasoning, tool_calls: calls = [] } = choice.delta;
  const tokens = chatTokens(choice);
  if (reasoning) {
    text.reasoning += reasoning;
    view.addThought(reasoning);
  } else if (calls.length) {
    for (const { index, id, function: part } of calls) {
      const call = (text.toolCalls[index] ??= { id: "", name: "", arguments: "" });
      call.id = id ?? call.id;
      call.name += part?.name ?? "";
      call.arguments += part?.arguments ?? "";
    }
    view.tokenText.skipWaiting();
  } else {
    text.content += content ?? "";
    view.add(content ?? "", tokens);
  }
  return tokens.length || Number(Boolean(content || reasoning || calls.length));
}
