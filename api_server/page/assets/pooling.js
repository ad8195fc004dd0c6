// The tab of models that pool instead of generating: embeddings and their similarities, ranking, labels.
import { post } from "./api.js";
import { showCurl } from "./curl.js";
import { byId, make, scrollerOf, submitByKey, tableOf } from "./dom.js";
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
    show: ({ results }) => scores(["Text", "Score"], results.map((each) => [each.document.text, each.relevance_score])),
  },
  classify: {
    path: "classify",
    body: () => ({ input: lines("classify-texts") }),
    show: ({ data }, { input }) =>
      scores(["Text", "Label", "Probability"], data.map(({ index, label, probs }) => {
        const highest = Math.max(...probs);
        return [input[index], label ?? probs.indexOf(highest), highest]; // a model may not name its labels
      })),
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
        output.replaceChildren(show(await (await post(path, sent)).json(), sent));
      } catch (error) {
        output.replaceChildren(make("p", { class: "error" }, errorWords(error)));
      }
    });
    form.addEventListener("keydown", submitByKey);
    form.querySelector("[data-action=curl]").addEventListener("click", () => showCurl(path, whole()));
  }
}

/** The similarities of each pair of vectors of length 1; a row and a column for each text. */
function matrix(texts, vectors) {
  const rows = vectors.map((one, at) => {
    const cells = vectors.map((other) => {
      const value = one.reduce((sum, each, index) => sum + each * other[index], 0);
      const cell = make("td", { class: "number similarity" }, value.toFixed(2));
      cell.style.setProperty("--part", String(Math.max(0, value)));
      return cell;
    });
    return [make("th", { scope: "row", title: texts[at] }, `${at + 1}. ${texts[at]}`), ...cells];
  });
  const head = ["Text", ...texts.map((_, at) => at + 1)];
  return scrollerOf(tableOf("matrix", head, rows), "Similarities");
}

/** A table whose last column is a number from 0 to 1, with a bar. */
function scores(head, rows) {
  const cells = rows.map((row) => {
    const value = row.at(-1);
    const bar = make("i", { class: "bar" });
    bar.style.setProperty("--part", String(Math.min(1, Math.max(0, value))));
    const texts = row.slice(0, -1).map((each) => make("td", { class: "text" }, each));
    return [...texts, make("td", { class: "number" }, bar, value.toFixed(3))];
  });
  return scrollerOf(tableOf("scores", head, cells), head.at(-1));
}
