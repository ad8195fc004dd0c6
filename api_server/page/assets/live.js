// The live view: connects the event stream only while it is visible, and passes each view to the block
// map, the request table and the charts. These share only the highlighted request.
import { AdapterList } from "./adapters.js";
import { BlockMap } from "./blockmap.js";
import { byId, duration, figure, make } from "./dom.js";
import { Feed } from "./feed.js";
import { RequestTable } from "./requests.js";
import { RateChart } from "./ratechart.js";

const NOTICES = 200;
const REPAINT_MS = 500;
const DRAFTS_MS = 10_000;
const TIERS = { CPU: "host memory", disk: "disk" };
/** What waiting requests wait for, by what made the last step short (`step_limit`). */
const WAITS_FOR = {
  preemption: "for KV blocks, after a preemption",
  "prompt tokens": "so that answers keep their pace",
  sequences: "as many run as may",
  drafts: "until drafts are verified",
  tenants: "other clients were served less",
  chunks: "for a step with room",
  blocks: "for KV blocks",
  encoder: "for their images",
  blocked: "for a grammar, KV or an adapter",
  results: "for a result",
  pause: "the engine is paused",
};

/** The tile of drafts: those verified in the last seconds. It appears with the first one. */
class DraftTile {
  constructor() {
    this.recent = [];
  }

  update(view) {
    const { drafts, draft_tokens: drafted, accepted_tokens: accepted } = view;
    if (!drafts) return;
    byId("drafts").hidden = false;
    this.recent.push({ at: performance.now(), drafts, drafted, accepted });
  }

  paint() {
    this.recent = this.recent.filter((each) => each.at > performance.now() - DRAFTS_MS);
    const [drafts, drafted, accepted] = ["drafts", "drafted", "accepted"].map((name) =>
      this.recent.reduce((sum, each) => sum + each[name], 0),
    );
    byId("tile-drafts").textContent = drafts ? `${figure((100 * accepted) / drafted)} %` : "–";
    byId("tile-drafts-detail").textContent = drafts
      ? `${figure(1 + accepted / drafts)} tokens a step`
      : `none in ${duration(DRAFTS_MS)}`;
  }
}

/** How full the media are to which a KV connector copies; nothing without one. The map shows the pool. */
function showTiers(tiers) {
  const media = tiers.filter(({ medium }) => medium !== "GPU");
  byId("tiers").hidden = !media.length;
  byId("tiers").replaceChildren(
    ...media.flatMap(({ medium, blocks, used }) => {
      const name = TIERS[medium] ?? medium;
      const words = `${figure(used)} of ${figure(blocks)} blocks`;
      const bar = make("meter", { min: 0, max: blocks, value: used, "aria-label": `KV in ${name}` }, words);
      return [make("dt", {}, name), make("dd", {}, bar, make("span", {}, words))];
    }),
  );
}

export class LiveView {
  constructor() {
    this.shown = false;
    const highlight = (owner) => {
      this.map.highlight(owner);
      this.table.highlight(owner);
    };
    this.map = new BlockMap(highlight);
    this.table = new RequestTable(highlight);
    this.charts = [
      new RateChart("chart-generation", "generation_tokens_per_s"),
      new RateChart("chart-prompt", "prompt_tokens_per_s"),
    ];
    this.drafts = new DraftTile();
    this.adapters = new AdapterList(() => this.#paint());
    this.totals = { queries: 0, hits: 0, preemptions: 0 };
    this.feed = new Feed({
      hello: (hello) => this.#hello(hello),
      view: (view) => this.#view(view),
      notice: (notice) => this.#notice(notice),
      state: (state, detail) => this.#state(state, detail),
    });
    byId("live-retry").addEventListener("click", () => this.reconnect());
    byId("live-engine").addEventListener("change", (event) => this.#showEngine(Number(event.target.value)));
    document.addEventListener("visibilitychange", () => this.#connect());
    document.addEventListener("themechange", () => this.#paint());
    new ResizeObserver(() => this.#paint()).observe(byId("panel-live"));
    setInterval(() => this.shown && !document.hidden && this.#paintCharts(), REPAINT_MS);
  }

  /** Shows or hides the view. */
  show(shown) {
    this.shown = shown;
    this.#connect();
    if (shown) this.#paint();
  }

  /** Reconnects immediately. */
  reconnect() {
    this.feed.stop();
    this.#connect();
  }

  #connect() {
    if (this.shown && !document.hidden) this.feed.start();
    else this.feed.stop();
  }

  /** Shows another engine of the daemon, with counts from 0. */
  #showEngine(engine) {
    this.feed.engine = engine;
    this.totals = { queries: 0, hits: 0, preemptions: 0 };
    this.reconnect();
  }

  /** The choice of an engine; hidden if there is one only. */
  #offerEngines({ engine, num_engines: number }) {
    byId("live-engines").hidden = number < 2;
    const select = byId("live-engine");
    if (select.options.length !== number) {
      const options = Array.from({ length: number }, (_, index) => make("option", { value: index }, String(index)));
      select.replaceChildren(...options);
    }
    select.value = String(engine);
  }

  #hello(hello) {
    this.hello = hello;
    this.#offerEngines(hello);
    this.map.reshape(hello);
    for (const chart of this.charts) chart.reset();
    byId("live-shape").textContent =
      `${hello.model} · ${figure(hello.num_blocks)} KV blocks of ${hello.block_size} tokens · ` +
      `at most ${figure(hello.max_num_seqs)} requests at once`;
  }

  #view(view) {
    this.totals.queries += view.prefix_cache_queries;
    this.totals.hits += view.prefix_cache_hits;
    this.totals.preemptions += view.preemptions;
    this.adapters.update(view); // first: it decides the colours
    this.map.update(view);
    this.table.update(view);
    for (const chart of this.charts) chart.update(view);
    this.drafts.update(view);
    showTiers(view.tiers ?? []);
    this.#tiles(view);
    this.#paintCharts();
  }

  #tiles(view) {
    const { queries, hits, preemptions } = this.totals;
    const { used, numBlocks } = this.map;
    const show = (name, value, detail) => {
      byId(`tile-${name}`).textContent = value;
      byId(`tile-${name}-detail`).textContent = detail;
    };
    show("running", figure(view.running), `of ${figure(this.hello?.max_num_seqs ?? 0)} at most`);
    const reason = WAITS_FOR[view.step_limit] ?? "for their first step";
    show("waiting", figure(view.waiting), view.waiting ? reason : "the queue is empty");
    const share = numBlocks ? (100 * used) / numBlocks : 0;
    show("used", `${figure(share)} %`, `${figure(used)} of ${figure(numBlocks)} blocks`);
    const hitRate = queries ? `${figure((100 * hits) / queries)} %` : "–";
    show("hits", hitRate, `${figure(hits)} of ${figure(queries)} tokens`);
    show("preemptions", figure(preemptions), "since the view opened");
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
    const texts = {
      off: "not connected",
      connecting: "connecting …",
      live: "live",
      lost: `disconnected: ${detail.reason} Next try in ${duration(detail.wait)}.`,
      refused: detail.reason,
    };
    byId("live-state").textContent = texts[state];
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
    this.drafts.paint();
  }
}
