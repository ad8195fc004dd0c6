// Owns the live view: when it is connected (only while somebody can see it), and which part shows
// what of a view. The parts know nothing of each other, but for the request that is pointed at.
import { BlockMap } from "./blockmap.js";
import { byId, duration, figure, make } from "./dom.js";
import { Feed } from "./feed.js";
import { RequestTable } from "./requests.js";
import { RateChart } from "./ratechart.js";

const NOTICES = 200;
const REPAINT_MS = 500;

export class LiveView {
  constructor() {
    this.shown = false;
    const point = (owner) => {
      this.map.highlight(owner);
      this.table.highlight(owner);
    };
    this.map = new BlockMap(point);
    this.table = new RequestTable(point);
    this.charts = [
      new RateChart("chart-generation", "generation_tokens_per_s"),
      new RateChart("chart-prompt", "prompt_tokens_per_s"),
    ];
    this.totals = { queried: 0, found: 0, preemptions: 0 };
    this.feed = new Feed({
      hello: (hello) => this.#hello(hello),
      view: (view) => this.#view(view),
      notice: (notice) => this.#notice(notice),
      state: (state, detail) => this.#state(state, detail),
    });
    byId("live-retry").addEventListener("click", () => this.again());
    document.addEventListener("visibilitychange", () => this.#connect());
    document.addEventListener("themechange", () => this.#paint());
    new ResizeObserver(() => this.#paint()).observe(byId("panel-live"));
    setInterval(() => this.shown && !document.hidden && this.#paintCharts(), REPAINT_MS);
  }

  /** Whether its tab is the one that is shown. */
  show(shown) {
    this.shown = shown;
    this.#connect();
    if (shown) this.#paint();
  }

  /** Connects anew, at once. */
  again() {
    this.feed.stop();
    this.#connect();
  }

  #connect() {
    if (this.shown && !document.hidden) this.feed.start();
    else this.feed.stop();
  }

  #hello(hello) {
    this.hello = hello;
    this.map.reshape(hello);
    for (const chart of this.charts) chart.reset();
    byId("live-shape").textContent =
      `${hello.model} · ${figure(hello.num_blocks)} blocks of ${hello.block_size} tokens · ` +
      `at most ${figure(hello.max_num_seqs)} requests at once`;
  }

  #view(view) {
    this.totals.queried += view.queried_tokens;
    this.totals.found += view.found_tokens;
    this.totals.preemptions += view.preemptions;
    this.map.take(view);
    this.table.take(view);
    for (const chart of this.charts) chart.take(view);
    this.#tiles(view);
    this.#paintCharts();
  }

  #tiles(view) {
    const { queried, found, preemptions } = this.totals;
    const { used, usable } = this.map;
    const tell = (name, value, detail) => {
      byId(`tile-${name}`).textContent = value;
      byId(`tile-${name}-detail`).textContent = detail;
    };
    tell("running", figure(view.running), `of ${figure(this.hello?.max_num_seqs ?? 0)} at most`);
    tell("waiting", figure(view.waiting), view.waiting ? "for their first step" : "nobody waits");
    const part = usable ? (100 * used) / usable : 0;
    tell("used", `${figure(part)} %`, `${figure(used)} of ${figure(usable)} blocks`);
    const hits = queried ? `${figure((100 * found) / queried)} %` : "–";
    tell("hits", hits, `${figure(found)} of ${figure(queried)} tokens`);
    tell("preemptions", figure(preemptions), "since you watch");
  }

  #notice(notice) {
    const time = new Date().toLocaleTimeString("en-GB");
    const line = make(
      "li",
      { class: `notice ${notice.kind.replace(/\W/g, "")}` },
      make("time", {}, time),
      make("b", {}, notice.kind),
      make("span", {}, notice.text),
    );
    byId("log-empty").hidden = true;
    byId("log").prepend(line);
    while (byId("log").children.length > NOTICES) byId("log").lastChild.remove();
  }

  #state(state, detail) {
    const words = {
      off: "not connected",
      connecting: "connecting …",
      live: "live",
      lost: `disconnected: ${detail.reason} Next try in ${duration(detail.wait)}.`,
      refused: detail.reason,
    };
    byId("live-state").textContent = words[state];
    byId("live-state").dataset.state = state;
    byId("live-retry").hidden = state !== "lost" && state !== "refused";
    byId("live-body").classList.toggle("stale", state === "lost" || state === "refused");
  }

  #paint() {
    if (!this.shown) return;
    this.map.paint();
    this.#paintCharts();
  }

  #paintCharts() {
    for (const chart of this.charts) chart.paint();
    byId("tile-rate").textContent = figure(this.charts[0].value);
  }
}
