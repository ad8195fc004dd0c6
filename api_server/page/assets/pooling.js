// The tab of models that pool instead of generating: embeddings and their similarities, ranking, labels.
import { request } from "./api.js";
import { showCurl } from "./curl.js";
import { byId, make, scrollerOf } from "./dom.js";
import { modelField } from "./models.js";
import { errorWords } from "./run.js";

const NAMES = { embed: "Embeddings", rank: "Ranking", classify: "Labels" };

const lines = (id) => byId(id).value.split("\n").filter((each) => each.trim() !== "");

const FORMS = {
  embed: {
    path: "v1/embeddings",
    body: () => ({ input: lines("embed-texts"), normalize: true }),
    show: ({ data }, { input }) => matrix(input, data.map((each) => each.embedding)),
  },
  rank: {
    path: "rerank",
    body: () => ({ query: byId("rank-query").value, documents: lines("rank-texts") }),
    show: ({ results }) => table(["Text", "Score"], results.map((each) => [each.document.text, each.relevance_score])),
  },
  classify: {
    path: "classify",
    body: () => ({ input: lines("classify-texts") }),
    show: ({ data }, { input }) =>
      table(
        ["Text", "Label", "Probability"],
        data.map((each) => [input[each.index], each.label ?? String(each.probs.indexOf(Math.max(...each.probs))), Math.max(...each.probs)]),
      ),
  },
};

/** Shows the forms of a model's tasks. */
export function offerForms(tasks) {
  const offered = Object.keys(FORMS).filter((each) => tasks.includes(each === "rank" ? "score" : each));
  for (const each of Object.keys(FORMS)) byId(`${each}-form`).hidden = !offered.includes(each);
  if (offered.length) byId("tab-pooling").textContent = NAMES[offered[0]];
}

/** Sets up the forms. */
export function startPooling() {
  for (const [name, { path, body, show }] of Object.entries(FORMS)) {
    const form = byId(`${name}-form`);
    const output = byId(`${name}-output`);
    const whole = () => ({ ...modelField(), ...body() });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const sent = whole();
      try {
        const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) };
        output.replaceChildren(show(await (await request(path, options)).json(), sent));
      } catch (error) {
        output.replaceChildren(make("p", { class: "error" }, errorWords(error)));
      }
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    form.querySelector("[data-action=curl]").addEventListener("click", () => showCurl(path, whole()));
  }
}

/** The similarities of each pair of vectors of length 1; a row and a column for each text. */
function matrix(texts, vectors) {
  const number = (at) => make("th", { scope: "col" }, String(at + 1));
  const head = make("tr", {}, make("th", { scope: "col" }, "Text"), ...texts.map((_, at) => number(at)));
  const rows = vectors.map((one, at) => {
    const cells = vectors.map((other) => {
      const value = one.reduce((sum, each, index) => sum + each * other[index], 0);
      const cell = make("td", { class: "number similarity" }, value.toFixed(2));
      cell.style.setProperty("--part", String(Math.max(0, value)));
      return cell;
    });
    return make("tr", {}, make("th", { scope: "row", title: texts[at] }, `${at + 1}. ${texts[at]}`), ...cells);
  });
  return scrollerOf(make("table", { class: "matrix" }, make("thead", {}, head), make("tbody", {}, ...rows)), "Similarities");
}

/** A table whose last column is a number from 0 to 1, with a bar. */
function table(names, rows) {
  const head = make("tr", {}, ...names.map((each) => make("th", { scope: "col" }, each)));
  const body = rows.map((row) => {
    const value = row.at(-1);
    const bar = make("i", { class: "bar" });
    bar.style.setProperty("--part", String(Math.min(1, Math.max(0, value))));
    const cells = row.slice(0, -1).map((each) => make("td", { class: "text" }, each));
    return make("tr", {}, ...cells, make("td", { class: "number" }, bar, value.toFixed(3)));
  });
  return scrollerOf(make("table", { class: "scores" }, make("thead", {}, head), make("tbody", {}, ...body)), names.at(-1));
}
