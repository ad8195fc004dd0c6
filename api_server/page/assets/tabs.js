// The tabs; the visible one is also in the address, so that it can be bookmarked and linked.
import { byId } from "./dom.js";
import { MAX_COMPLETION_TOKENS } from "./parameters.js";

const NAMES = ["chat", "completion", "live"];

/** Sets up the tabs; calls changed(name) for the first visible tab, too. */
export function startTabs(changed) {
  const show = (name, focus) => {
    for (const each of NAMES) {
      const tab = byId(`tab-${each}`);
      tab.setAttribute("aria-selected", String(each === name));
      tab.tabIndex = each === name ? 0 : -1;
      byId(`panel-${each}`).hidden = each !== name;
      if (focus && each === name) tab.focus();
    }
    byId("parameters").hidden = name === "live";
    byId("field-system").hidden = name !== "chat";
    byId("p-max_tokens").placeholder = name === "chat" ? "no limit" : String(MAX_COMPLETION_TOKENS);
    document.body.dataset.tab = name;
    if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
    changed(name);
  };
  for (const [at, name] of NAMES.entries()) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => show(name, false));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) show(NAMES[(at + step + NAMES.length) % NAMES.length], true);
    });
  }
  const fromAddress = () => NAMES.find((each) => `#${each}` === location.hash) ?? "chat";
  addEventListener("hashchange", () => show(fromAddress(), false));
  show(fromAddress(), false);
}
