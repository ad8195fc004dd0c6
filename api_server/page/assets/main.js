// The start of the page: shows the model's name and sets up the parts.
import { request } from "./api.js";
import { startCurl } from "./curl.js";
import { byId, figure } from "./dom.js";
import { startKey } from "./key.js";
import { LiveView } from "./live.js";
import { showDefaults, startParameters } from "./parameters.js";
import { startPlayground } from "./playground.js";
import { startTabs } from "./tabs.js";

const RETRY_MS = 3000;
let isAsking = false;

/** Shows the name of the model; retries until the server responds. */
async function showModel() {
  if (isAsking) return;
  isAsking = true;
  const name = byId("model");
  try {
    const answer = await (await request("v1/models")).json();
    const [model] = answer.data;
    name.textContent = model.id;
    name.title = `contexts of up to ${figure(model.max_model_len)} tokens`;
    name.classList.remove("failed");
    showDefaults(model.default_sampling_params);
    document.title = `${model.id} · tokend`;
  } catch (error) {
    name.textContent = error.message;
    name.classList.add("failed");
    if (error.status !== 401) setTimeout(showModel, RETRY_MS);
  } finally {
    isAsking = false;
  }
}

const live = new LiveView();
startKey(() => {
  showModel();
  live.reconnect();
});
startCurl();
startParameters();
startPlayground();
startTabs((name) => live.show(name === "live"));
showModel();
