// The tabs; the visible one is also in the address, so that it can be bookmarked and linked: #chat/CONVERSATION.
import { byId } from "./dom.js";
import { MAX_COMPLETION_TOKENS } from "./parameters.js";

const NAMES = ["chat", "completion", "pooling", "live"];
const FORMS = ["chat", "completion"]; // tabs with parameters

export class Tabs {
  /** changed(name, place): called with the visible tab, and with what the address says behind it. */
  constructor(changed) {
    this.changed = changed;
    this.places = {}; // by name of the tab
    for (const name of NAMES) {
      byId(`tab-${name}`).addEventListener("click", () => this.show(name));
      byId(`tab-${name}`).addEventListener("keydown", (event) => this.#step(name, event));
    }
    addEventListener("hashchange", () => this.followAddress());
  }

  /** Shows a tab. */
  show(name, place = this.places[name] ?? "", focuses = false) {
    this.places[name] = place;
    for (const each of NAMES) {
      const tab = byId(`tab-${each}`);
      tab.setAttribute("aria-selected", String(each === name));
      tab.tabIndex = each === name ? 0 : -1;
      byId(`panel-${each}`).hidden = each !== name;
      if (focuses && each === name) tab.focus();
    }
    byId("history").hidden = byId("history-button").hidden = name !== "chat";
    byId("parameters").hidden = !FORMS.includes(name);
    for (const id of ["field-system", "field-tools"]) byId(id).hidden = name !== "chat";
    byId("p-max_tokens").placeholder = name === "chat" ? "no limit" : String(MAX_COMPLETION_TOKENS);
    document.body.dataset.tab = name;
    this.setPlace(name, place);
    this.changed(name, place);
  }

  /** Writes the place of a tab into the address, if the tab is visible. */
  setPlace(name, place) {
    this.places[name] = place;
    const wanted = place ? `#${name}/${place}` : `#${name}`;
    if (document.body.dataset.tab === name && location.hash !== wanted) history.replaceState(null, "", wanted);
  }

  /** Offers only these tabs; the first of them replaces a visible one that is not among them. */
  offer(names) {
    for (const each of NAMES) byId(`tab-${each}`).hidden = !names.includes(each);
    if (!names.includes(document.body.dataset.tab)) this.show(names[0]);
  }

  /** Shows the tab of the address. */
  followAddress() {
    const [name, place = ""] = location.hash.slice(1).split("/");
    this.show(NAMES.includes(name) ? name : "chat", place);
  }

  #step(name, event) {
    const offered = NAMES.filter((each) => !byId(`tab-${each}`).hidden);
    const at = offered.indexOf(name);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.show(offered.at(next % offered.length), undefined, true);
  }
}
