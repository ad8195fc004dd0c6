// The adapters of the live view: where each is, and how many requests it has. They appear with the first one.
import { colourByGroup } from "./canvas.js";
import { byId, figure, make } from "./dom.js";

const MIB = 1 << 20;

export class AdapterList {
  /** onChange(): called when requests get other colours. */
  constructor(onChange) {
    this.numbers = new Map();
    this.view = null;
    byId("adapters-colour").addEventListener("change", () => {
      this.#colour();
      onChange();
    });
  }

  update(view) {
    this.view = view;
    this.#colour();
    const adapters = view.adapters ?? [];
    if (adapters.length) byId("adapters").hidden = false;
    byId("adapters-list").replaceChildren(...adapters.map(item));
    byId("adapters-empty").hidden = adapters.length > 0;
  }

  /** Gives the requests of an adapter one colour if that is chosen; those without have one, too. */
  #colour() {
    const groups = new Map();
    if (byId("adapters-colour").checked) {
      for (const { owner, adapter } of this.view?.requests ?? []) {
        const name = adapter ?? "";
        if (!this.numbers.has(name)) this.numbers.set(name, this.numbers.size + 1);
        groups.set(owner, this.numbers.get(name));
      }
    }
    colourByGroup(groups);
  }
}

function item(adapter) {
  const size = adapter.bytes ? `, ${figure(adapter.bytes / MIB)} MiB` : "";
  const requests = adapter.requests
    ? `${figure(adapter.running)} of ${figure(adapter.requests)} requests run`
    : "no requests";
  return make(
    "li",
    {},
    make("code", {}, adapter.name),
    make("span", { class: "state" }, ` ${adapter.state}${size}, ${requests}`),
  );
}
