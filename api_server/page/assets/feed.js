// Owns the connection to the engine's events: one at most, begun and ended on request, and begun
// again after a while, each time longer, when it was lost.
import { request, ServerError } from "./api.js";
import { eventsOf } from "./sse.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const SILENCE_MS = 90_000; // a connection without even a comment for so long is taken for dead

export class Feed {
  /** hear: { hello, view, notice, state }, functions of what came. */
  constructor(hear) {
    this.hear = hear;
    this.connection = null;
  }

  /** Connects, unless it is connected or about to be. */
  start() {
    if (this.connection) return;
    this.connection = new AbortController();
    this.#keep(this.connection);
  }

  /** Disconnects; nothing is heard any more. */
  stop() {
    if (!this.connection) return;
    this.connection.abort();
    this.connection = null;
    this.hear.state("off", {});
  }

  async #keep(connection) {
    let wait = FIRST_WAIT_MS;
    for (;;) {
      this.hear.state("connecting", {});
      let error;
      try {
        await this.#listen(connection.signal, () => (wait = FIRST_WAIT_MS));
        error = new ServerError("The server ended the connection.");
      } catch (caught) {
        error = caught;
      }
      if (connection.signal.aborted) return;
      if (error.status === 401 || error.status === 403 || error.status === 404) {
        this.hear.state("refused", { reason: error.message });
        return; // it would say the same again; this.connection stays, until the visitor retries
      }
      const reason = error instanceof ServerError ? error.message : "The connection was lost.";
      this.hear.state("lost", { reason, wait });
      await pause(wait, connection.signal);
      if (connection.signal.aborted) return;
      wait = Math.min(wait * 2, LONGEST_WAIT_MS) * (0.8 + 0.2 * Math.random());
    }
  }

  async #listen(signal, alive) {
    const dead = new AbortController();
    const either = AbortSignal.any([signal, dead.signal]);
    let alarm = setTimeout(() => dead.abort(), SILENCE_MS);
    try {
      const response = await request("view/events", { signal: either });
      for await (const { event, data } of eventsOf(response)) {
        if (signal.aborted) return;
        clearTimeout(alarm);
        alarm = setTimeout(() => dead.abort(), SILENCE_MS);
        this.#hand(event, data);
        alive();
      }
    } finally {
      clearTimeout(alarm);
    }
  }

  #hand(event, data) {
    if (event === "hello") {
      this.hear.state("live", {});
      this.hear.hello(JSON.parse(data));
    } else if (event === "view") {
      this.hear.view(JSON.parse(data));
    } else if (event === "notice") {
      this.hear.notice(JSON.parse(data));
    }
  }
}

/** Some time, or until the signal. */
function pause(ms, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    });
  });
}
