// What the Chat and Completion tabs share: the buttons, the keys, and the scrolling. Each tab has at most
// one generation; both can generate at the same time.
import { chatRequest, chatRun, forgetTurns } from "./chat.js";
import { completionRequest, completionRun } from "./completion.js";
import { showCurl } from "./curl.js";
import { byId } from "./dom.js";
import { hideTokenHint } from "./tokens.js";

const AT_END_PX = 40;

/** A tab that generates. output: the element that grows; scroller: the one that scrolls it. */
class Playground {
  constructor(name, { makeRun, makeRequest, output, scroller }) {
    this.name = name;
    this.form = byId(`${name}-form`);
    this.makeRun = makeRun;
    this.run = null;
    this.follower = new Follower(output, scroller);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    this.form.addEventListener("keydown", submitByKey);
    this.#button("curl").addEventListener("click", () => {
      const { path, body } = makeRequest();
      showCurl(path, body);
    });
    this.#button("stop").addEventListener("click", () => this.stop());
    this.#show(false);
  }

  /** Aborts the generation, if there is one. */
  stop() {
    this.run?.stop();
  }

  async #start() {
    const input = this.form.querySelector("textarea");
    if (this.run || input.value === "") {
      input.focus();
      return;
    }
    hideTokenHint(); // of a token that the run replaces
    this.run = this.makeRun();
    this.#show(true);
    this.follower.start();
    await this.run.finish();
    this.run.over?.();
    this.run = null;
    this.#show(false);
  }

  #button(action) {
    return this.form.querySelector(`[data-action=${action}]`);
  }

  #show(running) {
    const [run, stop] = [this.#button("run"), this.#button("stop")];
    const focused = document.activeElement;
    run.hidden = running;
    stop.hidden = !running;
    if (running && focused === run) stop.focus();
    if (!running && focused === stop) run.focus();
    byId(`tab-${this.name}`).classList.toggle("running", running);
    byId("busy").hidden = document.querySelector(".tabs .running") === null;
  }
}

/** Keeps the end of an output in view while it grows, unless the user scrolls away from it. */
class Follower {
  constructor(output, scroller) {
    this.output = output;
    this.scroller = scroller;
    this.follows = false;
    this.top = 0;
    const target = scroller === document.scrollingElement ? document : scroller;
    target.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    const observer = new ResizeObserver(() => this.#follow());
    observer.observe(output);
    if (target === scroller) observer.observe(scroller); // a keyboard on the screen makes it lower
  }

  /** Scrolls to the end. */
  start() {
    this.follows = true;
    this.#follow();
  }

  #follow() {
    const isShown = this.output.clientHeight > 0; // an observer is notified of a hidden output, too
    if (this.follows && isShown) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    if (scrollHeight - scrollTop - clientHeight < AT_END_PX) this.follows = true;
    else if (scrollTop < this.top) this.follows = false;
    this.top = scrollTop;
  }
}

function submitByKey(event) {
  if (event.key !== "Enter" || event.isComposing) return;
  const sends = event.target.id === "message" ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (!sends) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

/** Sets up both tabs. */
export function startPlayground() {
  const chat = new Playground("chat", {
    makeRun: chatRun,
    makeRequest: chatRequest,
    output: byId("turns"),
    scroller: byId("chat-scroller"),
  });
  const completion = new Playground("completion", {
    makeRun: completionRun,
    makeRequest: completionRequest,
    output: byId("completion-output"),
    scroller: document.scrollingElement,
  });
  byId("chat-new").addEventListener("click", () => {
    chat.stop();
    forgetTurns();
    byId("message").focus();
  });
  byId("busy").addEventListener("click", () => {
    for (const each of [chat, completion]) each.stop();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    hideTokenHint();
    for (const each of [chat, completion]) if (document.body.dataset.tab === each.name) each.stop();
  });
}
