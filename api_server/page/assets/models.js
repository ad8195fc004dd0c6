// The served models: their names in the head of the page, a menu where there are several, and what they can do.
import { request } from "./api.js";
import { byId, figure, make } from "./dom.js";
import { showDefaults } from "./parameters.js";

const RETRY_MS = 3000;
let models = [];
let chosen = null;
let isAsking = false;

/** The model in use; null before the server has answered. See GET /v1/models for its fields. */
export const model = () => chosen;

/** Returns the field of a request that names the model; {} where there is only one. */
export const modelField = () => (models.length > 1 ? { model: chosen.id } : {});

/** Shows the models; retries until the server responds. onChosen(model): called with the model in use. */
export async function showModels(onChosen) {
  if (isAsking) return;
  isAsking = true;
  const name = byId("model");
  try {
    models = (await (await request("v1/models")).json()).data;
    choose(models.find((each) => each.id === chosen?.id) ?? models[0], onChosen);
  } catch (error) {
    name.replaceChildren(error.message);
    name.classList.add("failed");
    if (error.status !== 401) setTimeout(() => showModels(onChosen), RETRY_MS);
  } finally {
    isAsking = false;
  }
}

function choose(model, onChosen) {
  chosen = model;
  const name = byId("model");
  name.title = `${model.id}: contexts of up to ${figure(model.max_model_len)} tokens`;
  name.classList.remove("failed");
  name.replaceChildren(models.length > 1 ? menu(onChosen) : model.id);
  document.title = `${model.id} · tokend`;
  showDefaults(model.default_sampling_params);
  onChosen(model);
}

function menu(onChosen) {
  const options = models.map(({ id }) => make("option", { value: id }, id));
  const list = make("select", { class: "model-menu", "aria-label": "Model" }, ...options);
  list.value = chosen.id;
  list.addEventListener("change", () => {
    choose(models.find((each) => each.id === list.value), onChosen);
    byId("model").firstChild.focus();
  });
  return list;
}
