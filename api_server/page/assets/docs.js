// The page of the API: shows openapi.json, and sends requests that the visitor writes.
import { request } from "./api.js";
import { showCurl } from "./curl.js";
import { button, byId, make, tableOf } from "./dom.js";
import { startKey } from "./key.js";

const JSON_TYPE = "application/json";
let schemas = {};

const resolved = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").pop()] : schema);

/** Returns a type in words: "string or integer", "list of integer". Null is left out: every optional
 * field may be null. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) {
    const words = new Set(choices.flatMap((each) => typeOf(each).split(" or ")));
    if (words.size > 1) words.delete("null");
    return [...words].join(" or ");
  }
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function defaultOf(name, field, required) {
  if (required?.includes(name)) return "required";
  const value = field.default ?? field.anyOf?.[0]?.default ?? null;
  return value === null ? "" : JSON.stringify(value);
}

/** A table of the fields of an object; null if it has none. */
function fieldsOf(schema) {
  const fields = Object.entries(schema?.properties ?? {});
  if (!fields.length) return null;
  const rows = fields.map(([name, field]) => [name, typeOf(field), defaultOf(name, field, schema.required), field.description ?? ""]);
  return tableOf("fields", ["Field", "Type", "Default", ""], rows);
}

/** A heading and a table for each object that a schema allows. */
function* tablesOf(title, schema) {
  for (const each of schema?.anyOf ?? [schema]) {
    const table = fieldsOf(resolved(each));
    if (table) yield* [make("h3", {}, each.$ref ? `${title}: ${typeOf(each)}` : title), table];
  }
}

const EXAMPLES = { string: "Hello", integer: 1, number: 1, boolean: false, array: [], object: {} };

/** Returns a body with the required fields. */
function exampleOf(schema) {
  const object = resolved(schema?.anyOf?.[0] ?? schema);
  const names = object?.required ?? [];
  return Object.fromEntries(names.map((name) => [name, valueOf(name, object.properties[name])]));
}

function valueOf(name, field) {
  if (name === "messages") return [{ role: "user", content: "Hello" }];
  if (name === "max_tokens") return 32;
  const first = resolved(field.anyOf?.[0] ?? field);
  return EXAMPLES[first?.type] ?? "Hello";
}

/** A form that sends the request and shows the response as it arrives. */
function tryForm(path, method, schema) {
  const text = make("textarea", { rows: 6, spellcheck: false, value: JSON.stringify(exampleOf(schema), null, 2) });
  const said = make("pre", { hidden: true, tabIndex: 0 });
  const send = async () => {
    said.hidden = false;
    said.textContent = "…";
    try {
      const options = { method: method.toUpperCase() };
      if (schema) Object.assign(options, { headers: { "Content-Type": JSON_TYPE }, body: text.value });
      const response = await request(path.slice(1), options);
      said.textContent = "";
      const isJson = response.headers.get("Content-Type")?.startsWith(JSON_TYPE);
      if (isJson) {
        said.textContent = JSON.stringify(await response.json(), null, 2);
        return;
      }
      const decoder = new TextDecoder();
      const reader = response.body.getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        said.append(decoder.decode(part.value, { stream: true }));
      }
    } catch (error) {
      said.textContent = error.status ? `${error.status}: ${error.message}` : error.message;
    }
  };
  const form = make("form", { class: "try" }, make("h3", {}, "Try it"));
  if (schema) form.append(make("label", {}, "Body", text));
  const buttons = make("div", { class: "actions" }, make("button", { class: "main", type: "submit" }, "Send"));
  if (schema) {
    buttons.append(button("curl", () => {
      try {
        showCurl(path.slice(1), JSON.parse(text.value));
      } catch (error) {
        said.hidden = false;
        said.textContent = error.message;
      }
    }));
  }
  form.append(buttons, said);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  return form;
}

function operationOf(path, method, described) {
  const body = described.requestBody?.content[JSON_TYPE].schema;
  const head = make("summary", {}, make("span", { class: "method" }, method.toUpperCase()), make("code", {}, path));
  head.append(make("span", { class: "quiet" }, described.summary + (described.security ? " · with a key" : "")));
  const element = make("details", { class: "operation", id: `${method}${path}` }, head);
  const parts = make("div");
  const fill = () => {
    if (parts.children.length) return;
    if (described.description) parts.append(make("p", {}, described.description));
    const query = (described.parameters ?? []).map((each) => [each.name, each.schema]);
    parts.append(...tablesOf("Parameters", { properties: Object.fromEntries(query) }));
    parts.append(...tablesOf("Body", body));
    for (const [status, response] of Object.entries(described.responses)) {
      if (status.startsWith("2")) parts.append(...tablesOf("Response", response.content?.[JSON_TYPE]?.schema));
    }
    if ((body || method === "get") && !path.includes("{")) parts.append(tryForm(path, method, body));
  };
  element.append(parts);
  element.addEventListener("toggle", fill);
  const words = [path, ...[body, ...(body?.anyOf ?? [])].flatMap((each) => Object.keys(resolved(each)?.properties ?? {}))];
  element.dataset.words = words.join(" ").toLowerCase();
  return element;
}

async function show() {
  try {
    const document_ = await (await request("openapi.json")).json();
    schemas = document_.components.schemas;
    const operations = Object.entries(document_.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, described]) => operationOf(path, method, described)),
    );
    byId("operations").replaceChildren(...operations);
    byId("model").textContent = `API · ${document_.info.version}`;
    byId("failure").hidden = true;
  } catch (error) {
    byId("failure").textContent = error.message;
    byId("failure").hidden = false;
  }
}

byId("filter").addEventListener("input", (event) => {
  const wanted = event.target.value.trim().toLowerCase();
  for (const each of byId("operations").children) each.hidden = !each.dataset.words.includes(wanted);
});
startKey(show);
show();
