// Dialogs. Each is made when it is opened, and removed when it is closed.
import { make } from "./dom.js";

/**
 * Opens a dialog; returns whether it was closed with "yes". content, buttons: elements; properties: of the
 * dialog.
 */
export function openDialog(id, title, content, buttons, properties = {}) {
  const head = make("h2", { id: `${id}-title` }, title);
  const form = make("form", { method: "dialog", autocomplete: "off" }, head, ...content, make("div", { class: "actions" }, ...buttons));
  const dialog = make("dialog", { id, "aria-labelledby": head.id, ...properties }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}

/** A button that closes its dialog. value: "yes" for what the dialog was opened for. */
export const closeButton = (words, value = "", style = "plain") =>
  make("button", { class: style, type: "submit", value }, words);

/** Asks for a short text; returns null if the user cancels or leaves it empty. */
export async function askForText(question, value = "") {
  const input = make("input", { id: "text-input", maxLength: 200, "aria-label": question, value });
  const closed = openDialog("text-dialog", question, [input], [closeButton("Save", "yes", "main"), closeButton("Cancel")]);
  input.select();
  return ((await closed) && input.value.trim()) || null;
}

/** Asks whether to do what cannot be undone. action: the word on the button. */
export function askWhether(question, action) {
  const buttons = [closeButton("Cancel"), closeButton(action, "yes", "main stop")];
  return openDialog("sure-dialog", question, [], buttons, { role: "alertdialog" });
}
