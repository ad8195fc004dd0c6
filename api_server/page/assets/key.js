// The API key, which is kept only in this tab's session storage, and the dialog that asks for it.
import { closeButton, openDialog } from "./dialogs.js";
import { byId, make } from "./dom.js";

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

async function ask(reason) {
  const input = make("input", { id: "key-input", type: "password", autocomplete: "off", spellcheck: false, placeholder: "Key", autofocus: true, "aria-label": "API key" });
  const buttons = [closeButton("Use key", "yes", "main"), closeButton("Cancel")];
  if (key()) {
    buttons.push(closeButton("Forget the key", "forget"));
    buttons.at(-1).addEventListener("click", () => keep(""));
  }
  const content = [make("p", { id: "key-reason" }, reason), input];
  const isUsed = await openDialog("key-dialog", "API key", content, buttons, { "aria-describedby": "key-reason" });
  const value = input.value.trim();
  if (isUsed && value) keep(value);
  return isUsed && value !== "";
}

function show() {
  byId("key-button").classList.toggle("kept", key() !== "");
  byId("key-button").title = key() ? "An API key is kept for this tab" : "Enter an API key";
}

/** Sets up the button. onChange: called after a new key was entered. */
export function startKey(onChange) {
  show();
  byId("key-button").addEventListener("click", async () => {
    const reason = key()
      ? "A key is kept until this tab is closed. Enter another one, or forget it."
      : "Sent with every request, and kept until this tab is closed.";
    if (await askForKey(reason)) onChange();
  });
}
