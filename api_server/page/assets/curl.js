// The dialog with the curl command of a request. The command contains no key; it refers to an
// environment variable.
import { addressOf } from "./api.js";
import { closeButton, openDialog } from "./dialogs.js";
import { copyButton, make } from "./dom.js";
import { key } from "./key.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Returns the shell command that sends this body. */
function commandFor(path, body) {
  const lines = [`curl -N ${quoted(addressOf(path))}`, "-H 'Content-Type: application/json'"];
  if (key()) lines.push('-H "Authorization: Bearer $TOKEND_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body, null, 1))}`);
  return lines.join(" \\\n  ");
}

/** Opens the dialog. */
export function showCurl(path, body) {
  const value = commandFor(path, body);
  const text = make("textarea", { id: "curl-text", rows: 14, readOnly: true, spellcheck: false, "aria-label": "Command", value });
  const copy = copyButton(() => value);
  copy.classList.replace("plain", "main");
  openDialog("curl-dialog", "The same request from a shell", [text], [copy, closeButton("Close")], { class: "wide-dialog" });
  text.select();
  text.scrollTop = 0;
}
