// The list of conversations: search, rename, delete, export and import. On a narrow screen it is a drawer.
import { exported, imported, titleOf } from "./conversation.js";
import { askForText, askWhether } from "./dialogs.js";
import { announce, button, byId, figure, make } from "./dom.js";

const PAUSE_MS = 150;
const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const TIME = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });

export class History {
  constructor(store, chat) {
    this.store = store;
    this.chat = chat;
    this.list = byId("conversations");
    this.search = byId("history-search");
    this.search.addEventListener("input", () => this.showSoon());
    byId("history-button").addEventListener("click", () => this.#openDrawer());
    byId("chat-new").addEventListener("click", () => this.#closeDrawer());
    byId("history-close").addEventListener("click", () => this.#closeDrawer());
    byId("history-export").addEventListener("click", () => this.#export());
    byId("history-import").addEventListener("click", () => byId("history-file").click());
    byId("history-file").addEventListener("change", () => this.#import());
    byId("history-clear").addEventListener("click", () => this.#clear());
    byId("history").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isDrawer) return;
      event.preventDefault();
      this.#closeDrawer();
    });
    document.addEventListener("pointerdown", ({ target }) => {
      if (!byId("history").contains(target) && !target.closest("dialog, #history-button")) this.#closeDrawer();
    });
    store.opened.then(() => {
      byId("history-place").textContent = store.place;
      if (!store.database) chat.notify(store.place);
    });
  }

  /** Shows the list after a pause, since several changes may follow each other. */
  showSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.show(), PAUSE_MS);
  }

  async show() {
    const found = await this.store.list(this.search.value);
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    const items = new Map([...this.list.children].map((item) => [item.dataset.id, item]));
    found.forEach((conversation, place) => {
      const item = items.get(conversation.id) ?? this.#item(conversation.id);
      this.#fill(item, conversation);
      if (this.list.children[place] !== item) this.list.insertBefore(item, this.list.children[place] ?? null);
    });
    while (this.list.children.length > found.length) this.list.lastChild.remove();
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"] a`)?.focus();
    const isSearch = this.search.value.trim() !== "";
    byId("history-empty").hidden = found.length > 0;
    byId("history-empty").textContent = isSearch ? "No conversation has these words." : "No conversations yet.";
    const hasNone = found.length === 0 && !isSearch;
    for (const id of ["history-export", "history-clear"]) byId(id).disabled = hasNone;
    this.markShown();
  }

  /** Marks the conversation that is shown, and those that generate. */
  markShown() {
    for (const item of this.list.children) {
      const link = item.querySelector("a");
      if (item.dataset.id === this.chat.open.now.id) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
      item.classList.toggle("running", this.chat.generating.has(item.dataset.id));
    }
  }

  /** Makes the row of a conversation. It stays while the list changes, so that a click on it is not lost. */
  #item(id) {
    const link = make("a", { href: `#chat/${id}` }, make("span", { class: "title" }), make("time"));
    link.addEventListener("click", () => this.#closeDrawer());
    return make("li", { data: { id } }, link, button("Rename", () => this.#rename(id)), button("Delete", () => this.#remove(id)));
  }

  /** Writes into a row what may have changed. */
  #fill(item, conversation) {
    const title = titleOf(conversation);
    const isToday = new Date(conversation.updated).toDateString() === new Date().toDateString();
    const [link, ...buttons] = item.children;
    link.title = title;
    link.firstChild.textContent = title;
    link.lastChild.textContent = (isToday ? TIME : DAY).format(conversation.updated);
    for (const each of buttons) each.ariaLabel = `${each.textContent} ${title}`;
  }

  async #rename(id) {
    const kept = await this.store.conversation(id);
    const title = await askForText("Name of the conversation", titleOf(kept));
    if (title === null) return;
    const { open } = this.chat;
    if (open.now.id === id) {
      open.now = { ...open.now, title };
      await open.save();
    } else {
      await this.store.save({ ...kept, title }, kept);
    }
    this.show();
  }

  async #remove(id) {
    const title = titleOf(await this.store.conversation(id));
    if (!(await askWhether(`Delete “${title}”? It cannot be restored.`, "Delete"))) return;
    this.#leave(id);
    await this.store.remove(id);
    announce("Deleted.");
    this.show();
  }

  async #clear() {
    const number = (await this.store.list()).length;
    const question = `Delete all ${figure(number)} conversations of this browser? They cannot be restored; Export keeps a copy.`;
    if (!(await askWhether(question, "Delete all"))) return;
    this.#leave(null);
    await this.store.remove(null);
    announce("All conversations are deleted.");
    this.show();
  }

  /** Forgets a conversation, or all; their generations end and are not saved again. */
  #leave(id) {
    for (const open of [...this.chat.generating.values(), this.chat.open]) {
      if (id === null || open.now.id === id) open.isGone = true;
    }
    this.chat.stopAll(id);
    if (id === null || this.chat.open.now.id === id) this.chat.showNew();
  }

  async #export() {
    const text = exported(await this.store.list());
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const link = make("a", { href: address, download: `tokend-conversations-${new Date().toISOString().slice(0, 10)}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  }

  async #import() {
    const input = byId("history-file");
    const [file] = input.files;
    if (!file) return;
    try {
      const number = await this.store.add(imported(await file.text()));
      this.chat.notify(`${figure(number)} ${number === 1 ? "conversation" : "conversations"} imported.`);
    } catch (error) {
      this.chat.notify(`Nothing was imported. ${error.message}`);
    }
    input.value = "";
    this.show();
  }

  get isDrawer() {
    return byId("history").classList.contains("open");
  }

  #openDrawer() {
    byId("history").classList.add("open");
    byId("history-button").setAttribute("aria-expanded", "true");
    this.search.focus();
  }

  #closeDrawer() {
    if (!this.isDrawer) return;
    byId("history").classList.remove("open");
    byId("history-button").setAttribute("aria-expanded", "false");
    if (byId("history").contains(document.activeElement)) byId("history-button").focus();
  }
}
