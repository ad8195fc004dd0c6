// The connection to the event stream of the live view: at most one, opened and closed on request, and
// reopened after a growing delay if it is lost.
import { request, ServerError } from "./api.js";
import { eventsOf } from "./sse.js";

const EVENTS = ["hello", "view", "notice"];
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const SILENCE_MS = 90_000; // a connection without even an empty line for this time is dead

export class Feed {
  /** handlers: { hello, view, notice, state }, called with the content of each event. */
  constructor(handlers) {
    this.handlers = handlers;
    this.engine = 0; // whose events the next connection has
    this.connection = null;
  }

  /** Connects, unless a connection exists or is being opened. */
  start() {
    if (this.connection) return;
    this.connection = new AbortController();
    this.#stayConnected(this.connection);
  }

  /** Disconnects; no handler is called any more, except state("off"). */
  stop() {
    if (!this.connection) return;
    this.connection.abort();
    this.connection = null;
    this.handlers.state("off", {});
  }

  async #stayConnected(connection) {
    let wait = FIRST_WAIT_MS;
    for (;;) {
      this.handlers.state("connecting", {});
      let error;
      try {
        await this.#readEvents(connection.signal, () => (wait = FIRST_WAIT_MS));
        error = new ServerError("The server ended the connection.");
      } catch (caught) {
        error = caught;
      }
      if (connection.signal.aborted) return;
      if (error.status === 401 || error.status === 403 || error.status === 404) {
        this.handlers.state("refused", { reason: error.message });
        return; // a retry would get the same error; this.connection stays set until the user retries
      }
      const reason = error instanceof ServerError ? error.message : "The connection was lost.";
      this.handlers.state("lost", { reason, wait });
      await pause(wait, connection.signal);
      if (connection.signal.aborted) return;
      wait = Math.min(wait * 2, LONGEST_WAIT_MS) * (0.8 + 0.2 * Math.random());
    }
  }

  async #readEvents(signal, onEvent) {
    const dead = new AbortController();
    const either = AbortSignal.any([signal, dead.signal]);
    let timeout = setTimeout(() => dead.abort(), SILENCE_MS);
    try {
      const response = await request(`view/events?engine=${this.engine}`, { signal: either });
      for await (const { event, data } of eventsOf(response)) {
        if (signal.aborted) return;
        clearTimeout(timeout);
        timeout = setTimeout(() => dead.abort(), SILENCE_MS);
        this.#dispatch(event, data);
        onEvent();
      }
    } finally {
      clearTimeout(timeout);
    }
  }

  #dispatch(event, data) {
    if (event === "hello") this.handlers.state("live", {});
    if (EVENTS.includes(event)) this.handlers[event](JSON.parse(data));
  }
}

/** Returns after some time, or when the signal aborts. */
function pause(ms, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    });
  });
}
