// The map of the KV blocks: one cell for each block (or for a few), its colour and its hint. Below them, round,
// the slots for states of recurrent layers.
//
//   cells of a view   [[3, 0, 0], [2, 2, 7], …]   3 free blocks, 2 held by request 7 …
//                       │  │  └ owner; 0: none
//                       │  └ state: an index of STATES
//                       └ number of cells in a row
import { colour, colourOf, penOf } from "./canvas.js";
import { byId, figure, make, placeNear } from "./dom.js";
import { nameOf } from "./requests.js";

const STATES = ["free", "cached", "held", "shared", "pinned", "reserved"];
const MEANINGS = {
  free: "free",
  cached: "free, with cached content",
  held: "held by",
  shared: "shared by several requests, one of them",
  pinned: "retained for an agent session's next turn",
  reserved: "reserved",
};
const FREE = 0;
const HELD = 2;
const SHARED = 3;
const WANTED_HEIGHT = 320;
const LARGEST_CELL = 22; // pixels

/** The side of a cell, in pixels, with which this number of cells fill the map. */
const sizeOf = (width, number) =>
  Math.min(LARGEST_CELL, Math.max(3, Math.floor(Math.sqrt((width * WANTED_HEIGHT) / Math.max(1, number)))));

export class BlockMap {
  /** onHighlight(owner): called with the request under the pointer; 0 for none. */
  constructor(onHighlight) {
    this.canvas = byId("map");
    this.hint = make("div", { class: "hint", hidden: true });
    document.querySelector("main").append(this.hint);
    this.onHighlight = onHighlight;
    this.states = new Uint8Array();
    this.owners = new Uint32Array();
    this.wasUsed = new Uint8Array(); // since the view was opened
    this.drawn = []; // the cells that are drawn, in this order
    this.requests = new Map();
    this.blocksPerCell = 1;
    this.numBlocks = 0;
    this.numSlots = 0; // for states of recurrent layers
    this.firstSlot = 0; // the cells from here on are these
    this.highlighted = 0;
    this.at = -1;
    this.#listen();
  }

  reshape(hello) {
    this.blocksPerCell = hello.blocks_per_cell;
    this.numBlocks = hello.num_blocks; // that requests can use: 1 to this number
    this.states = new Uint8Array();
  }

  update(view) {
    const slots = view.state_cells ?? [];
    const lengthOf = (cells) => cells.reduce((sum, [length]) => sum + length, 0);
    this.firstSlot = lengthOf(view.cells);
    this.numSlots = view.state_slots ?? 0;
    const size = this.firstSlot + lengthOf(slots);
    if (size !== this.states.length) {
      this.states = new Uint8Array(size);
      this.owners = new Uint32Array(size);
      this.wasUsed = new Uint8Array(size);
    }
    this.counts = STATES.map(() => 0);
    let at = 0;
    for (const [length, state, owner] of [...view.cells, ...slots]) {
      this.states.fill(state, at, at + length);
      this.owners.fill(owner, at, at + length);
      if (state !== FREE) this.wasUsed.fill(1, at, at + length);
      if (at < this.firstSlot) this.counts[state] += this.#firstBlock(at + length) - this.#firstBlock(at);
      at += length;
    }
    byId("legend-states").hidden = !this.numSlots;
    byId("count-states").textContent = `${figure(view.held_states ?? 0)} of ${figure(this.numSlots)}`;
    this.requests = new Map(view.requests.map((request) => [request.owner, request]));
    this.#showCounts();
    this.paint();
  }

  /** The first block of a cell that requests can use; block 0 counts only if it has a cell of its own. */
  #firstBlock(cell) {
    const first = Math.min(this.numBlocks + 1, cell * this.blocksPerCell);
    return this.blocksPerCell > 1 ? Math.max(1, first) : first;
  }

  /** Slots of a round cell: several if there are very many. */
  get slotsPerCell() {
    return Math.ceil(this.numSlots / (this.states.length - this.firstSlot));
  }

  /** Number of used blocks. */
  get used() {
    const [, , held, shared, pinned] = this.counts ?? [0, 0, 0, 0, 0];
    return held + shared + pinned;
  }

  /** Highlights the blocks of one request; 0 for none. */
  highlight(owner) {
    if (owner === this.highlighted) return;
    this.highlighted = owner;
    this.paint();
  }

  /** Chooses the cells to draw: all that fit in full size, otherwise those that are or were used. */
  #choose(width) {
    const all = [...this.states.keys()];
    const areAllDrawn = sizeOf(width, all.length) === LARGEST_CELL;
    this.drawn = areAllDrawn ? all : all.filter((at) => this.wasUsed[at]);
    let [blocks, slots] = [0, 0]; // that are left out
    for (const at of areAllDrawn ? [] : all.filter((each) => !this.wasUsed[each])) {
      if (at < this.firstSlot) blocks += this.#firstBlock(at + 1) - this.#firstBlock(at);
      else slots += this.slotsPerCell;
    }
    const many = this.blocksPerCell > 1 ? `Each cell is ${this.blocksPerCell} blocks. ` : "";
    const parts = [blocks && `${figure(blocks)} free blocks`, slots && `${figure(slots)} free slots for states`].filter(Boolean);
    const rest = parts.length ? `Not drawn: ${parts.join(" and ")} that were not used since the view was opened. ` : "";
    byId("map-scale").textContent = many + rest;
  }

  paint() {
    const width = this.canvas.clientWidth;
    if (!width || !this.states.length) return;
    this.#choose(width);
    const number = this.drawn.length;
    this.cell = sizeOf(width, number);
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const firstSlot = this.drawn.findIndex((at) => at >= this.firstSlot); // slots begin in a row of their own
    this.firstDrawnSlot = firstSlot < 0 ? number : firstSlot;
    this.skipped = (this.columns - (this.firstDrawnSlot % this.columns)) % this.columns;
    const height = Math.ceil((firstSlot < 0 ? number : number + this.skipped) / this.columns) * this.cell;
    const pen = penOf(this.canvas, width, height);
    const gap = this.cell > 4 ? 1 : 0;
    const side = this.cell - gap;
    const plain = STATES.map((state) => colour(`map-${state}`));
    const hues = new Map();
    for (let at = 0; at < number; at++) {
      const state = this.states[this.drawn[at]];
      const owner = this.owners[this.drawn[at]];
      const { x, y } = this.#place(at);
      pen.globalAlpha = this.highlighted && owner !== this.highlighted ? 0.25 : 1;
      pen.fillStyle = state === HELD ? held(owner, hues) : plain[state];
      if (at < this.firstDrawnSlot) pen.fillRect(x, y, side, side);
      else disc(pen, x, y, side);
      if (state === SHARED && this.cell > 5) {
        pen.fillStyle = held(owner, hues);
        pen.fillRect(x + side / 3, y + side / 3, side / 3, side / 3);
      }
    }
    pen.globalAlpha = 1;
    if (this.at >= 0 && this.at < number) this.#mark(pen, side);
  }

  #mark(pen, side) {
    const { x, y } = this.#place(this.at);
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    pen.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  }

  #place(at) {
    const place = at < this.firstDrawnSlot ? at : at + this.skipped;
    return { x: (place % this.columns) * this.cell, y: Math.floor(place / this.columns) * this.cell };
  }

  /** The cell at a place of the map, as an index of those drawn; -1 for none. */
  #at(column, row) {
    const place = row * this.columns + column;
    if (column >= this.columns) return -1;
    if (place < this.firstDrawnSlot) return place;
    return place < this.firstDrawnSlot + this.skipped ? -1 : place - this.skipped;
  }

  #showCounts() {
    for (const [state, name] of STATES.entries()) {
      const shown = document.querySelector(`[data-count=${name}]`);
      if (shown) shown.textContent = figure(this.counts[state]);
    }
    const parts = STATES.slice(0, 5).map((name, state) => `${figure(this.counts[state])} ${name === "pinned" ? "retained" : name}`);
    const about = this.blocksPerCell > 1 ? "About, of" : "Of";
    const states = this.numSlots ? ` Below, states of recurrent layers: ${byId("count-states").textContent}.` : "";
    this.canvas.setAttribute(
      "aria-label",
      `Map of the KV blocks. ${about} ${figure(this.numBlocks)} blocks: ${parts.join(", ")}.${states}`,
    );
  }

  #listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      const column = Math.floor(event.offsetX / this.cell);
      const row = Math.floor(event.offsetY / this.cell);
      this.#select(this.#at(column, row));
    });
    canvas.addEventListener("pointerleave", () => this.#select(-1));
    canvas.addEventListener("focus", () => {
      if (canvas.matches(":focus-visible")) this.#select(Math.max(0, this.at));
    });
    canvas.addEventListener("blur", () => this.#select(-1));
    canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  #step(event) {
    const last = this.drawn.length - 1;
    const steps = {
      ArrowRight: this.at + 1,
      ArrowLeft: this.at - 1,
      ArrowDown: this.at + this.columns,
      ArrowUp: this.at - this.columns,
      Home: 0,
      End: last,
      PageDown: this.#nextRun(1),
      PageUp: this.#nextRun(-1),
    };
    const next = steps[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.#select(Math.min(last, Math.max(0, next)));
    byId("map-said").textContent = this.hint.textContent;
  }

  /** The next cell that differs from the selected one. */
  #nextRun(direction) {
    const { drawn, states, owners } = this;
    const here = drawn[this.at];
    const same = (at) => states[drawn[at]] === states[here] && owners[drawn[at]] === owners[here];
    let at = this.at;
    while (at >= 0 && at < drawn.length && same(at)) at += direction;
    return at;
  }

  #select(at) {
    const inside = at >= 0 && at < this.drawn.length;
    this.at = inside ? at : -1;
    this.hint.hidden = !inside;
    this.onHighlight(inside ? this.owners[this.drawn[at]] : 0);
    this.paint();
    if (!inside) return;
    this.hint.textContent = this.#describe(this.drawn[at]);
    const { x, y } = this.#place(at);
    const box = this.canvas.getBoundingClientRect();
    const top = box.top + y;
    placeNear(this.hint, { left: box.left + x, top, bottom: top + this.cell });
  }

  #describe(at) {
    const isSlot = at >= this.firstSlot;
    const [what, number, per] = isSlot ? ["State", this.numSlots, this.slotsPerCell] : ["Block", this.numBlocks, this.blocksPerCell];
    const first = isSlot ? 1 + (at - this.firstSlot) * per : at * per; // block 0 is reserved
    const last = Math.min(number, first + per - 1);
    const which = first === last ? `${what} ${figure(first)}` : `${what}s ${figure(first)}–${figure(last)}`;
    const state = STATES[this.states[at]];
    const owner = this.owners[at];
    const who = owner && (state === "held" || state === "shared") ? ` ${this.#name(owner)}` : "";
    return `${which}: ${MEANINGS[state]}${who}`;
  }

  #name(owner) {
    const request = this.requests.get(owner);
    return request ? nameOf(request) : `request ${owner}`;
  }
}

function disc(pen, x, y, side) {
  pen.beginPath();
  pen.arc(x + side / 2, y + side / 2, side / 2, 0, 2 * Math.PI);
  pen.fill();
}

function held(owner, hues) {
  if (!hues.has(owner)) hues.set(owner, colourOf(owner));
  return hues.get(owner);
}
