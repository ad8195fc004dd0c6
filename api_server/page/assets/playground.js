// What the Chat and Completion tabs share: the buttons, the keys, and the scrolling. Both can generate at
// the same time.
import { showCurl } from "./curl.js";
import { byId, submitByKey } from "./dom.js";
import { reportFieldError } from "./parameters.js";
import { hideTokenHint } from "./tokens.js";

const AT_END_PX = 40;

/**
 * A tab that generates. generator: has run (of what the tab shows; null for none), isBusy, hasDraft, request(),
 * start() and stopAll(), and calls onRunsChanged(). output: the element that grows; scroller: the one that scrolls it.
 */
class Playground {
  constructor(name, generator, output, scroller, onRunsChanged) {
    this.name = name;
    this.form = byId(`${name}-form`);
    this.generator = generator;
    this.follower = new Follower(output, scroller);
    generator.onRunsChanged = () => {
      this.#show();
      onRunsChanged();
    };
    generator.follow = () => this.follower.start();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start().catch(reportFieldError);
    });
    this.form.addEventListener("keydown", submitByKey);
    this.#button("curl").addEventListener("click", () => {
      try {
        const { path, body } = generator.request();
        showCurl(path, body);
      } catch (error) {
        reportFieldError(error);
      }
    });
    this.#button("stop").addEventListener("click", () => this.stop());
    this.#show();
  }

  /** Aborts the generation that the tab shows, if there is one. */
  stop() {
    this.generator.run?.stop();
  }

  async #start() {
    hideTokenHint(); // of a token that the run replaces
    const text = this.form.querySelector("textarea");
    if (this.generator.run || !this.generator.hasDraft) {
      text.focus();
      return;
    }
    const ended = this.generator.start();
    this.follower.start();
    await ended;
  }

  #button(action) {
    return this.form.querySelector(`[data-action=${action}]`);
  }

  #show() {
    const running = this.generator.run !== null;
    const [run, stop] = [this.#button("run"), this.#button("stop")];
    const focused = document.activeElement;
    run.hidden = running;
    stop.hidden = !running;
    if (running && focused === run) stop.focus();
    if (!running && focused === stop) run.focus();
    byId(`tab-${this.name}`).classList.toggle("running", this.generator.isBusy);
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

/** Sets up both tabs. chat, completion: their generators. onRunsChanged: called when one begins or ends. */
export function startPlayground(chat, completion, onRunsChanged) {
  const tabs = [
    new Playground("chat", chat, byId("turns"), byId("chat-scroller"), onRunsChanged),
    new Playground("completion", completion, byId("completion-output"), document.scrollingElement, onRunsChanged),
  ];
  byId("busy").addEventListener("click", () => {
    for (const each of [chat, completion]) each.stopAll();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    hideTokenHint();
    for (const each of tabs) if (document.body.dataset.tab === each.name) each.stop();
  });
}
