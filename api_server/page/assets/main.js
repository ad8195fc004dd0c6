// Owns the start of the page: who the server is, and which parts there are.
import { request } from "./api.js";
import { startCurl } from "./curl.js";
import { byId, figure } from "./dom.js";
import { startKey } from "./key.js";
import { LiveView } from "./live.js";
import { startPlayground } from "./playground.js";
import { startTabs } from "./tabs.js";

const AGAIN_MS = 3000;
let asks = false;

/** Shows the name of the model; asks again until the server answers. */
async function showModel() {
  if (asks) return;
  asks = true;
  const name = byId("model");
  try {
    const answer = await (await request("v1/models")).json();
    const [model] = answer.data;
    name.textContent = model.id;
    name.title = `contexts of up to ${figure(model.max_model_len)} tokens`;
    name.classList.remove("failed");
    document.title = `${model.id} · tokend`;
  } catch (error) {
    name.textContent = error.message;
    name.classList.add("failed");
    if (error.status !== 401) setTimeout(showModel, AGAIN_MS);
  } finally {
    asks = false;
  }
}

const live = new LiveView();
startKey(() => {
  showModel();
  live.again();
});
startCurl();
startPlayground();
startTabs((name) => live.show(name === "live"));
showModel();
