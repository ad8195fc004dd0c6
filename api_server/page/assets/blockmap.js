// Owns the map of the KV blocks: one cell for each block (or a few of them), its colour, and what
// pointing at it says.
//
//   cells of a view   [[3, 0, 0], [2, 2, 7], …]   3 free ones, 2 held by request 7 …
//                       │  │  └ owner, 0: nobody
//                       │  └ state, an index of STATES
//                       └ how many in a row
import { colour, colourOf, penOf } from "./canvas.js";
import { byId, figure, make, placeNear } from "./dom.js";
import { nameOf } from "./requests.js";

const STATES = ["free", "cached", "held", "shared", "pinned", "reserved"];
const MEANINGS = {
  free: "free",
  cached: "free, but its KV can be found again",
  held: "held by",
  shared: "shared by several requests, one of them",
  pinned: "pinned for a job's next turn",
  reserved: "reserved",
};
const HELD = 2;
const SHARED = 3;
const WANTED_HEIGHT = 320;

export class BlockMap {
  /** point(owner): is told which request is pointed at, 0 for none. */
  constructor(point) {
    this.canvas = byId("map");
    this.hint = make("div", { class: "hint", hidden: true });
    document.body.append(this.hint);
    this.point = point;
    this.states = new Uint8Array();
    this.owners = new Uint32Array();
    this.requests = new Map();
    this.blocksPerCell = 1;
    this.numBlocks = 0;
    this.pointed = 0;
    this.at = -1;
    this.#listen();
  }

  reshape(hello) {
    this.blocksPerCell = hello.blocks_per_cell;
    this.numBlocks = hello.num_blocks;
    const many = hello.blocks_per_cell > 1 ? `Each cell is ${hello.blocks_per_cell} blocks. ` : "";
    byId("map-scale").textContent = many;
  }

  take(view) {
    const size = view.cells.reduce((sum, [length]) => sum + length, 0);
    if (size !== this.states.length) {
      this.states = new Uint8Array(size);
      this.owners = new Uint32Array(size);
    }
    this.counts = STATES.map(() => 0);
    let at = 0;
    for (const [length, state, owner] of view.cells) {
      this.states.fill(state, at, at + length);
      this.owners.fill(owner, at, at + length);
      this.counts[state] += length;
      at += length;
    }
    this.requests = new Map(view.requests.map((each) => [each.owner, each]));
    this.#tell();
    this.paint();
  }

  /** Blocks that are in use now. */
  get used() {
    const [, , held, shared, pinned] = this.counts ?? [0, 0, 0, 0, 0];
    return Math.min(this.usable, (held + shared + pinned) * this.blocksPerCell);
  }

  /** Blocks that requests may have. */
  get usable() {
    const reserved = this.counts?.[5] ?? 0;
    return Math.max(0, this.numBlocks - (this.blocksPerCell === 1 ? reserved : 1));
  }

  /** Shows one request's blocks, and the others faintly; 0 for all alike. */
  highlight(owner) {
    if (owner === this.pointed) return;
    this.pointed = owner;
    this.paint();
  }

  paint() {
    const width = this.canvas.clientWidth;
    const number = this.states.length;
    if (!width || !number) return;
    const fits = Math.floor(Math.sqrt((width * WANTED_HEIGHT) / number));
    this.cell = Math.min(22, Math.max(3, fits));
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const height = Math.ceil(number / this.columns) * this.cell;
    const pen = penOf(this.canvas, width, height);
    const gap = this.cell > 4 ? 1 : 0;
    const side = this.cell - gap;
    const plain = STATES.map((each) => colour(`map-${each}`));
    const hues = new Map();
    for (let at = 0; at < number; at++) {
      const state = this.states[at];
      const owner = this.owners[at];
      const x = (at % this.columns) * this.cell;
      const y = Math.floor(at / this.columns) * this.cell;
      pen.globalAlpha = this.pointed && owner !== this.pointed ? 0.25 : 1;
      pen.fillStyle = state === HELD ? held(owner, hues) : plain[state];
      pen.fillRect(x, y, side, side);
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
    return { x: (at % this.columns) * this.cell, y: Math.floor(at / this.columns) * this.cell };
  }

  #tell() {
    const blocks = this.counts.map((each) => each * this.blocksPerCell);
    for (const [state, name] of STATES.entries()) {
      const shown = document.querySelector(`[data-count=${name}]`);
      if (shown) shown.textContent = figure(blocks[state]);
    }
    const parts = STATES.slice(0, 5).map((name, state) => `${figure(blocks[state])} ${name}`);
    const about = this.blocksPerCell > 1 ? "About, of" : "Of";
    this.canvas.setAttribute(
      "aria-label",
      `Map of the KV blocks. ${about} ${figure(this.numBlocks)} blocks: ${parts.join(", ")}.`,
    );
  }

  #listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      const column = Math.floor(event.offsetX / this.cell);
      const row = Math.floor(event.offsetY / this.cell);
      this.#look(column < this.columns ? row * this.columns + column : -1);
    });
    canvas.addEventListener("pointerleave", () => this.#look(-1));
    canvas.addEventListener("focus", () => {
      if (canvas.matches(":focus-visible")) this.#look(Math.max(0, this.at));
    });
    canvas.addEventListener("blur", () => this.#look(-1));
    canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  #step(event) {
    const last = this.states.length - 1;
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
    this.#look(Math.min(last, Math.max(0, next)));
    byId("map-said").textContent = this.hint.textContent;
  }

  /** The next cell that differs from the one that is looked at. */
  #nextRun(direction) {
    const same = (at) =>
      this.states[at] === this.states[this.at] && this.owners[at] === this.owners[this.at];
    let at = this.at;
    while (at >= 0 && at < this.states.length && same(at)) at += direction;
    return at;
  }

  #look(at) {
    const inside = at >= 0 && at < this.states.length;
    this.at = inside ? at : -1;
    this.hint.hidden = !inside;
    this.point(inside ? this.owners[at] : 0);
    this.paint();
    if (!inside) return;
    this.hint.textContent = this.#describe(at);
    const { x, y } = this.#place(at);
    const box = this.canvas.getBoundingClientRect();
    const top = box.top + y;
    placeNear(this.hint, { left: box.left + x, top, bottom: top + this.cell });
  }

  #describe(at) {
    const first = at * this.blocksPerCell;
    const last = Math.min(this.numBlocks, first + this.blocksPerCell) - 1;
    const which = first === last ? `Block ${figure(first)}` : `Blocks ${figure(first)}–${figure(last)}`;
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

function held(owner, hues) {
  if (!hues.has(owner)) hues.set(owner, colourOf(owner));
  return hues.get(owner);
}
