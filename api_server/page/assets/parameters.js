// The form of parameters. An empty field is not sent, so that the server's default applies; the server
// validates the values, and its error is shown beside the field. On a narrow screen the form is folded until
// it is opened.
import { askForText } from "./dialogs.js";
import { announce, byId, make } from "./dom.js";

/** Default of a completion; that of the API, 16, would cut it short. */
export const MAX_COMPLETION_TOKENS = 512;
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
const FIELD_OF_PARAM = { structured_outputs: "structure", response_format: "structure" };

/** A field that cannot be sent as it is. param: its name. */
class FieldError extends Error {
  constructor(message, param) {
    super(message);
    this.param = param;
  }
}

const nameOf = (input) => input.id.slice("p-".length);
const inputs = () => [...byId("parameters").querySelectorAll("[id^='p-']")];

/** Shows the model's own defaults in the fields, instead of a temperature for models without. */
export function showDefaults(defaults) {
  for (const [name, value] of Object.entries(defaults)) {
    const input = byId(`p-${name}`);
    if (!input) continue;
    input.placeholder = value;
    if (input.value === input.defaultValue) input.value = "";
    input.defaultValue = "";
  }
}

/** Returns the content of the form, as it is kept with a conversation. */
export const formValues = () =>
  Object.fromEntries(
    inputs().map((each) => [nameOf(each), each.type === "checkbox" ? each.checked : each.value]),
  );

/** Fills the form; fields without a value get their default. */
export function fillForm(values) {
  for (const each of inputs()) {
    const value = values[nameOf(each)];
    if (each.type === "checkbox") each.checked = value ?? each.defaultChecked;
    else if (each.tagName === "SELECT") each.value = value ?? each.options[0].value;
    else each.value = value ?? each.defaultValue;
    clearError(each);
  }
  showStructure();
}

/** Returns the form's fields of a request. */
export function parameters() {
  const fields = {};
  for (const input of inputs()) {
    if (input.type === "number" && input.value !== "") fields[nameOf(input)] = Number(input.value);
  }
  const stop = byId("p-stop")
    .value.split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\[nt\\]/g, (each) => ESCAPES[each]));
  if (stop.length) fields.stop = stop;
  return fields;
}

/** Returns the fields of structured output; {} for none. Throws a FieldError for a schema that is not JSON. */
export function structure() {
  const [kind, text] = [byId("p-structure_kind").value, byId("p-structure").value];
  if (!["json", "regex"].includes(kind) || text.trim() === "") return {};
  return { structured_outputs: { [kind]: kind === "json" ? parsed(text, "structure") : text } };
}

/** Returns the tools that an answer may call; {} for none. Throws a FieldError. */
export function tools() {
  const text = byId("p-tools").value;
  if (text.trim() === "") return {};
  const list = parsed(text, "tools");
  return { tools: Array.isArray(list) ? list : [list] };
}

function parsed(text, param) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(`This is not JSON: ${error.message}`, param);
  }
}

/** Returns the fields that request tokens: an endpoint's own of log-probabilities, and drafts; {} for none. */
export const tokenFields = (logprobs) =>
  byId("p-logprobs").checked ? { ...logprobs, return_accepted_drafts: true } : {};

/** Returns the system message; "" for none. */
export const systemMessage = () => byId("p-system").value.trim();

/** Shows an error beside the field that it names (`param`); returns whether there is one. */
export function showFieldError(error) {
  const name = (error.param ?? "").split(/[.[]/)[0];
  const input = byId(`p-${FIELD_OF_PARAM[name] ?? name}`);
  if (!input) return false;
  clearError(input);
  const id = `${input.id}-error`;
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-describedby", id);
  input.after(make("p", { id, class: "field-error" }, error.message));
  for (let fold = input.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  return true;
}

/** Shows an error beside its field and announces it; throws any other. */
export function reportFieldError(error) {
  if (!showFieldError(error)) throw error;
  announce(`Error: ${error.message}`);
}

function clearError(input) {
  byId(`${input.id}-error`)?.remove();
  input.removeAttribute("aria-invalid");
  input.removeAttribute("aria-describedby");
}

function showStructure() {
  const kind = byId("p-structure_kind").value;
  byId("field-structure").hidden = kind === "none";
  byId("p-structure").placeholder = kind === "regex" ? "[0-9]{4}-[0-9]{2}-[0-9]{2}" : '{"type": "object", "properties": {}}';
}

/** Presets: named contents of the form, kept in the browser. */
class Presets {
  constructor(store) {
    this.store = store;
    this.list = byId("presets");
    this.values = {};
    this.list.addEventListener("change", () => this.#use());
    byId("preset-save").addEventListener("click", () => this.#keep());
    byId("preset-delete").addEventListener("click", () => this.#remove());
  }

  async load() {
    this.values = (await this.store.setting("presets")) ?? {};
    this.#show();
  }

  #show(chosen = "") {
    const names = Object.keys(this.values).sort((one, other) => one.localeCompare(other));
    const option = (name) => make("option", { value: name }, name);
    this.list.replaceChildren(make("option", { value: "" }, names.length ? "Choose …" : "None yet"), ...names.map(option));
    this.list.value = chosen;
    byId("preset-delete").hidden = chosen === "";
  }

  #use() {
    const values = this.values[this.list.value];
    byId("preset-delete").hidden = !values;
    if (!values) return;
    fillForm(values);
    byId("parameters").dispatchEvent(new Event("input"));
  }

  async #keep() {
    const name = await askForText("Name of the preset", this.list.value);
    if (name === null) return;
    await this.load(); // another tab may have added some
    this.values = { ...this.values, [name]: formValues() };
    await this.store.keepSetting("presets", this.values);
    this.#show(name);
    announce(`Preset ${name} saved.`);
  }

  async #remove() {
    const name = this.list.value;
    await this.load();
    const { [name]: _, ...rest } = this.values;
    this.values = rest;
    await this.store.keepSetting("presets", rest);
    this.#show();
    announce(`Preset ${name} deleted.`);
  }
}

/** Sets up the form: it is folded whenever the screen becomes narrow, and opened when it becomes wide. */
export function startParameters() {
  const narrow = matchMedia("(max-width: 860px)");
  const fold = () => (byId("parameters-fold").open = !narrow.matches);
  narrow.addEventListener("change", fold);
  fold();
  byId("parameters").addEventListener("input", ({ target }) => {
    if (target.id?.startsWith("p-")) clearError(target);
    showStructure();
  });
  showStructure();
}

/** Fills the form as it was in the last visit, and the list of presets; keeps changes from then on. */
export async function keepParameters(store) {
  const values = await store.setting("form");
  if (values) fillForm(values);
  await new Presets(store).load();
  let timer = null;
  byId("parameters").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => store.keepSetting("form", formValues()), 300);
  });
}
