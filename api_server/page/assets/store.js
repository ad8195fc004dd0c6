// Conversations and settings in the browser's IndexedDB; nothing of them is kept on the server. Where the
// browser keeps nothing, they last as long as the page.
import { hasWords, merged, newId } from "./conversation.js";

const NAME = "tokend";
const VERSION = 1;
const OPEN_MS = 4000; // a database that answers later counts as blocked

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const committed = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error); // a full quota is known only here
  });

function openDatabase() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("settings");
  };
  const late = new Promise((_, reject) =>
    setTimeout(() => reject(new Error("the browser does not answer")), OPEN_MS),
  );
  return Promise.race([finished(request), late]);
}

export class Store {
  constructor() {
    this.database = null; // everything is kept in memory without one
    this.opened = this.#open(); // resolves once `database` is known; all methods wait for it
    this.memory = { conversations: new Map(), settings: new Map() };
    this.onProblem = () => {}; // called with words for the user; "" once it is solved
    this.hasProblem = false;
    this.onChange = () => {}; // called with { id, isRemoved } after another tab has saved or removed; id null: all
    this.channel = new BroadcastChannel(NAME);
    this.channel.onmessage = ({ data }) => this.onChange(data);
  }

  async #open() {
    try {
      this.database = await openDatabase();
    } catch {
      return; // a browser that keeps no data
    }
    this.database.onversionchange = () => {
      this.database?.close();
      this.#fallBack("A newer version of this page is open in another tab. Reload this one.");
    };
    this.database.onclose = () => this.#fallBack("The browser has deleted the data of this page.");
  }

  /** What to say about where conversations are kept. */
  get place() {
    return this.database
      ? "Kept in this browser, not on the server; in a private window, until it is closed."
      : "This browser keeps no data for this page (private mode, or storage is blocked): conversations last until the page is closed. Export keeps them.";
  }

  /** Returns the conversations with all these words, newest first. */
  async list(words = "") {
    const all = await this.#read("conversations", "getAll");
    const found = words.trim() ? all.filter((each) => hasWords(each, words.trim())) : all;
    return found.sort((one, other) => other.updated - one.updated);
  }

  /** Returns a conversation; undefined if there is none. */
  conversation(id) {
    return this.#read("conversations", "get", id);
  }

  /** Saves a conversation with what other tabs have saved since `base`; returns it as saved. */
  async save(conversation, base) {
    let saved = conversation;
    await this.#write("conversations", async (store) => {
      saved = merged(base, conversation, await store.get(conversation.id));
      store.put(saved);
    });
    this.channel.postMessage({ id: saved.id, isRemoved: false });
    return saved;
  }

  /** Adds conversations; one whose id is taken by another text gets a new id. Returns how many are new. */
  async add(conversations) {
    let number = 0;
    await this.#write("conversations", async (store) => {
      for (const each of conversations) {
        const known = await store.get(each.id);
        const isKnown = known && JSON.stringify(known.turns) === JSON.stringify(each.turns);
        if (isKnown) continue;
        store.put(known ? { ...each, id: newId() } : each);
        number += 1;
      }
    });
    this.channel.postMessage({ id: null, isRemoved: false });
    return number;
  }

  /** Removes a conversation; null: all of them. */
  async remove(id) {
    await this.#write("conversations", (store) => (id === null ? store.clear() : store.delete(id)));
    this.channel.postMessage({ id, isRemoved: true });
  }

  /** Returns a setting; undefined if it was never kept. */
  setting(name) {
    return this.#read("settings", "get", name);
  }

  keepSetting(name, value) {
    return this.#write("settings", (store) => store.put(value, name));
  }

  async #read(kind, method, key) {
    await this.opened;
    if (this.database) {
      const store = this.database.transaction(kind).objectStore(kind);
      return finished(key === undefined ? store[method]() : store[method](key));
    }
    const kept = this.memory[kind];
    return key === undefined ? [...kept.values()] : kept.get(key);
  }

  /** Runs a change; a failure is reported in words, and is not an error of the caller. */
  async #write(kind, change) {
    await this.opened;
    if (!this.database) {
      await change(inMemory(this.memory[kind]));
      return;
    }
    try {
      const transaction = this.database.transaction(kind, "readwrite");
      const store = transaction.objectStore(kind);
      const done = committed(transaction);
      const work = change({
        get: (key) => finished(store.get(key)),
        put: (value, key) => store.put(value, key),
        delete: (key) => store.delete(key),
        clear: () => store.clear(),
      });
      await Promise.all([done, work]);
      if (this.hasProblem) this.onProblem("");
      this.hasProblem = false;
    } catch (error) {
      this.hasProblem = true;
      if (this.database) this.onProblem(problem(error));
      else await change(inMemory(this.memory[kind]));
    }
  }

  #fallBack(words) {
    this.database = null;
    this.onProblem(words);
  }
}

function problem(error) {
  if (error?.name === "QuotaExceededError") {
    return "The browser's storage for this page is full: the last change is not kept. Export conversations and delete some.";
  }
  return `The browser could not keep the last change: ${error?.message ?? "unknown reason"}.`;
}

const inMemory = (kept) => ({
  get: async (key) => kept.get(key),
  put: (value, key) => kept.set(key ?? value.id, value),
  delete: (key) => kept.delete(key),
  clear: () => kept.clear(),
});
