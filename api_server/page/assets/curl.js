// The dialog with the curl command of a request. The command contains no key; it refers to an
// environment variable.
import { addressOf } from "./api.js";
import { byId, copyButton } from "./dom.js";
import { key } from "./key.js";

/** Returns the shell command that sends this body. */
export function commandFor(path, body) {
  const lines = [`curl -N ${quoted(addressOf(path))}`, "-H 'Content-Type: application/json'"];
  if (key()) lines.push('-H "Authorization: Bearer $TOKEND_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body, null, 1))}`);
  return lines.join(" \\\n  ");
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Opens the dialog. */
export function showCurl(path, body) {
  const text = byId("curl-text");
  text.value = commandFor(path, body);
  byId("curl-dialog").showModal();
  text.focus();
  text.select();
}

/** Sets up the dialog. */
export function startCurl() {
  byId("curl-close").addEventListener("click", () => byId("curl-dialog").close());
  const copy = copyButton(() => byId("curl-text").value);
  copy.className = "main copy";
  byId("curl-close").before(copy);
}
