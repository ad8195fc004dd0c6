// The start of the page: it is shown at once, then the store and the server's models fill it.
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { byId } from "./dom.js";
import { History } from "./history.js";
import { startKey } from "./key.js";
import { LiveView } from "./live.js";
import { showModels } from "./models.js";
import { keepParameters, startParameters } from "./parameters.js";
import { startPlayground } from "./playground.js";
import { offerForms, startPooling } from "./pooling.js";
import { Store } from "./store.js";
import { Tabs } from "./tabs.js";

const live = new LiveView();
const store = new Store();
const tabs = new Tabs((name, place) => {
  live.show(name === "live");
  if (name === "chat") showConversation(place);
});
const chat = new Chat(store, (id) => {
  tabs.setPlace("chat", id ?? "");
  past.showSoon();
});
const past = new History(store, chat);

function showConversation(place) {
  if (place) chat.show(place);
  else if (chat.open.saved || chat.run) chat.showNew();
}

/** Offers the tabs of what the model can do. */
function onModel({ supported_tasks: tasks, input_modalities: inputs = [] }) {
  offerForms(tasks);
  chat.attached.offer(inputs.includes("image"));
  const can = {
    chat: tasks.includes("chat"),
    completion: tasks.includes("generate"),
    pooling: !tasks.includes("generate"),
  };
  tabs.offer([...Object.keys(can).filter((each) => can[each]), "live"]);
  byId("message").dispatchEvent(new Event("input")); // its tokens can be counted now
}

store.onChange = ({ id, isRemoved }) => {
  chat.refresh(id, isRemoved);
  past.showSoon();
};
startKey(() => {
  showModels(onModel);
  live.reconnect();
});
startParameters();
startPooling();
startPlayground(chat, new Completion(), () => past.markShown());
tabs.followAddress();
past.show();
keepParameters(store);
showModels(onModel);
