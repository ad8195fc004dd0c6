// What the Chat and Completion tabs share: at most one generation, the buttons, the keys.
import { chatRequest, chatRun, forgetTurns } from "./chat.js";
import { completionRequest, completionRun } from "./completion.js";
import { showCurl } from "./curl.js";
import { byId } from "./dom.js";
import { hideTokenHint } from "./tokens.js";

let current = null;

async function start(form, makeRun) {
  const input = form.querySelector("textarea");
  if (current || input.value === "") {
    input.focus();
    return;
  }
  const run = makeRun();
  current = run;
  show(true);
  const follow = following(run.summary);
  await run.finish();
  follow.disconnect();
  run.over?.();
  current = null;
  show(false);
}

/** Scrolls to the end, unless the user has scrolled away from it. */
function following(summary) {
  const page = document.scrollingElement;
  const scroll = () => {
    if (page.scrollHeight - page.scrollTop - innerHeight < 160) page.scrollTop = page.scrollHeight;
  };
  page.scrollTop = page.scrollHeight;
  const watch = new MutationObserver(scroll);
  watch.observe(summary, { childList: true });
  return watch;
}

function show(running) {
  const focused = document.activeElement;
  for (const button of document.querySelectorAll("[data-action=stop]")) button.hidden = !running;
  for (const button of document.querySelectorAll("[data-action=run]")) {
    const stop = button.parentElement.querySelector("[data-action=stop]");
    button.hidden = running;
    if (running && focused === button) stop.focus();
    if (!running && focused === stop) button.focus();
  }
  byId("busy").hidden = !running;
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
  const tabs = [
    [byId("completion-form"), completionRun, completionRequest],
    [byId("chat-form"), chatRun, chatRequest],
  ];
  for (const [form, makeRun, makeRequest] of tabs) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      start(form, makeRun);
    });
    form.addEventListener("keydown", submitByKey);
    form.querySelector("[data-action=curl]").addEventListener("click", () => {
      const { path, body } = makeRequest();
      showCurl(path, body);
    });
    form.querySelector("[data-action=stop]").addEventListener("click", () => current?.stop());
  }
  byId("chat-new").addEventListener("click", () => {
    current?.stop();
    forgetTurns();
    byId("message").focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    hideTokenHint();
    current?.stop();
  });
  show(false);
}
