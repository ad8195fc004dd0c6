// The API key, which is kept only in this tab's session storage, and the dialog that asks for it.
import { byId } from "./dom.js";

const NAME = "tokend.key";
let kept = null;
let asking = null;

/** Returns the key; "" if none is known. */
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

/** Stores a key; "" removes it. */
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

/** Asks the user for a key; returns whether one was entered. Concurrent calls share the dialog. */
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

/** Sets up the button and the dialog. onChange: called after a new key was entered. */
export function startKey(onChange) {
  show();
  byId("key-button").addEventListener("click", async () => {
    const reason = key()
      ? "A key is kept until this tab is closed. Enter another one, or forget it."
      : "Sent with every request, and kept until this tab is closed.";
    if (await askForKey(reason)) onChange();
  });
  byId("key-forget").addEventListener("click", () => {
    keep("");
    byId("key-dialog").close("");
  });
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
}
