// Owns the API key: in this tab's session storage and nowhere else, and the dialog that asks for it.
import { byId } from "./dom.js";

const NAME = "tokend.key";
let kept = null;
let asking = null;

/** The key, or "" where none was given. */
export function key() {
  if (kept === null) {
    try {
      kept = sessionStorage.getItem(NAME) ?? "";
    } catch {
      kept = ""; // storage is switched off: the key lasts as long as the page
    }
  }
  return kept;
}

/** Keeps a key, or forgets it (""). */
export function keep(value) {
  kept = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // see key()
  }
  show();
}

/** Asks for a key; whether one was given. Whoever asks meanwhile waits for the same answer. */
export function askForKey(reason) {
  asking ??= ask(reason).finally(() => (asking = null));
  return asking;
}

function ask(reason) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-reason").textContent = reason;
  input.value = "";
  dialog.returnValue = "";
  return new Promise((answer) => {
    const closed = () => {
      const value = input.value.trim();
      input.value = "";
      const given = dialog.returnValue === "use" && value !== "";
      if (given) keep(value);
      answer(given);
    };
    dialog.addEventListener("close", closed, { once: true });
    dialog.showModal();
    input.focus();
  });
}

function show() {
  byId("key-button").classList.toggle("kept", key() !== "");
  byId("key-button").title = key() ? "An API key is kept for this tab" : "Enter an API key";
  byId("key-forget").hidden = key() === "";
}

/** Wires up the button and the dialog. again: what to do with another key. */
export function startKey(again) {
  show();
  byId("key-button").addEventListener("click", async () => {
    const reason = key()
      ? "A key is kept until this tab is closed. Enter another one, or forget it."
      : "Sent with every request, and kept until this tab is closed.";
    if (await askForKey(reason)) again();
  });
  byId("key-forget").addEventListener("click", () => {
    keep("");
    byId("key-dialog").close("");
  });
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
}
