// The table of requests: a row for each, kept from view to view, with a bar of its tokens.
//
//   |cached|computed|to be computed|generated|    as long as its tokens beside the longest row's
import { colourOf } from "./canvas.js";
import { byId, figure, make, scrollerOf } from "./dom.js";

const STATES = {
  running: "running",
  waiting: "waiting",
  preempted: "preempted",
  waiting_for_kv: "waiting for KV",
};
const SEGMENTS = ["cached", "computed", "left", "written"];

/** The name of a request; other tenants' requests have none. */
export const nameOf = (request) =>
  request.id === null ? `another tenant's request (${request.owner})` : shortId(request.id);

const shortId = (id) => (id.length > 18 ? `${id.slice(0, 16)}…` : id);

export class RequestTable {
  /** onHighlight(owner): called with the request under the pointer; 0 for none. */
  constructor(onHighlight) {
    this.body = byId("requests");
    byId("requests-more").before(scrollerOf(byId("requests-table"), "Table of requests"));
    this.rows = new Map();
    this.onHighlight = onHighlight;
    this.body.addEventListener("keydown", (event) => this.#move(event));
  }

  update(view) {
    const longest = Math.max(1, ...view.requests.map(total));
    const seen = new Set(view.requests.map((each) => each.owner));
    for (const [owner, row] of this.rows) {
      if (seen.has(owner)) continue;
      row.element.remove();
      this.rows.delete(owner);
    }
    for (const [at, request] of view.requests.entries()) {
      const row = this.rows.get(request.owner) ?? this.#add(request);
      fill(row, request, longest);
      if (this.body.children[at] !== row.element) {
        this.body.insertBefore(row.element, this.body.children[at] ?? null);
      }
    }
    const first = this.body.children[0];
    if (first && !this.body.querySelector("[tabindex='0']")) first.tabIndex = 0;
    byId("requests-empty").hidden = view.requests.length > 0;
    byId("requests-table").hidden = view.requests.length === 0;
    const more = view.num_omitted_requests;
    byId("requests-more").textContent = more ? `and ${figure(more)} more` : "";
  }

  /** Highlights the row of a request. */
  highlight(owner) {
    for (const [each, row] of this.rows) row.element.classList.toggle("pointed", each === owner);
  }

  /** Arrow keys move between rows; the tab key stops at one of them. */
  #move(event) {
    const row = event.target.closest("tr");
    const next = { ArrowDown: row?.nextSibling, ArrowUp: row?.previousSibling }[event.key];
    if (!next) return;
    event.preventDefault();
    row.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #add(request) {
    const row = makeRow(request);
    row.element.addEventListener("pointerenter", () => this.onHighlight(request.owner));
    row.element.addEventListener("pointerleave", () => this.onHighlight(0));
    row.element.addEventListener("focus", () => this.onHighlight(request.owner));
    row.element.addEventListener("blur", () => this.onHighlight(0));
    this.rows.set(request.owner, row);
    return row;
  }
}

const total = (request) => (request.prompt_tokens ?? 0) + (request.output_tokens ?? 0);

function makeRow(request) {
  const swatch = make("i", { class: "swatch" });
  const name = make("code", { title: request.id ?? "" }, nameOf(request));
  const state = make("span", { class: "state" });
  const segments = SEGMENTS.map((each) => make("i", { class: each }));
  const bar = make("div", { class: "tokens-bar", role: "img" }, ...segments);
  const cells = [make("td", { class: "number" }), make("td", { class: "number" })];
  const blocks = make("td", { class: "number" });
  const element = make(
    "tr",
    { tabIndex: -1 },
    make("td", {}, swatch, name),
    make("td", {}, state),
    ...cells,
    make("td", { class: "wide" }, bar),
    blocks,
  );
  return { element, state, segments, bar, cells, blocks };
}

function fill(row, request, longest) {
  row.element.style.setProperty("--owner", colourOf(request.owner)); // follows the theme
  row.state.textContent = STATES[request.state] ?? request.state;
  row.state.dataset.state = request.state;
  row.blocks.textContent = figure(request.num_blocks);
  const { prompt_tokens: prompt, output_tokens: output } = request;
  if (prompt === null) {
    for (const cell of row.cells) cell.textContent = "–";
    row.bar.setAttribute("aria-label", "not shown");
    for (const each of row.segments) each.style.width = "0";
    return;
  }
  const computed = Math.min(request.computed_tokens, prompt);
  const cached = Math.min(request.cached_tokens, computed);
  const images = request.images ? `, ${request.images} ${request.images === 1 ? "image" : "images"}` : "";
  row.cells[0].textContent = figure(prompt) + images;
  row.cells[1].textContent = figure(output);
  const parts = [cached, computed - cached, prompt - computed, output];
  for (const [at, part] of parts.entries()) {
    row.segments[at].style.width = `${(100 * part) / longest}%`;
  }
  row.bar.setAttribute(
    "aria-label",
    `${figure(cached)} prompt tokens cached, ${figure(computed - cached)} computed, ` +
      `${figure(prompt - computed)} to be computed, ${figure(output)} generated`,
  );
  row.bar.title = row.bar.getAttribute("aria-label");
}
