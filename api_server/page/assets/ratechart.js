// A chart of tokens per second over the last two minutes. A point is the mean of about a second; single
// views cover a few steps, so their rates would jump with each token.
import { colour, penOf } from "./canvas.js";
import { byId, compact, figure } from "./dom.js";

const SPAN_MS = 120_000;
const MEAN_MS = 1100;
const HEIGHT = 132;
const RIGHT = 46; // for the numbers of the axis
const TOP = 10;
const BOTTOM = 20;

export class RateChart {
  /** id: of a figure with a canvas and a caption with an output. field: of a view. */
  constructor(id, field) {
    this.canvas = byId(id).querySelector("canvas");
    this.now = byId(id).querySelector("output");
    this.colour = byId(id).dataset.colour;
    this.field = field;
    this.points = [];
    this.recent = null;
  }

  /** Clears the chart; the first view after that has no known duration, so its rate is not used. */
  reset() {
    this.recent = null;
  }

  update(view) {
    const at = performance.now();
    const now = this.recent === null ? 0 : view[this.field];
    this.recent = [...(this.recent ?? []), { at, now }].filter((each) => each.at > at - MEAN_MS);
    this.rest = view.running ? now : 0;
    this.#add(at, this.recent.reduce((sum, each) => sum + each.now, 0) / this.recent.length);
  }

  /** The current rate. */
  get value() {
    return this.points.at(-1)?.value ?? 0;
  }

  #add(at, value) {
    this.points.push({ at, value });
    while (this.points[0].at < at - SPAN_MS - 5000) this.points.shift();
    this.now.textContent = `${figure(value)} tokens/s`;
  }

  /** Without new views nothing has changed: the mean is the last view's rate. */
  #settle(at) {
    const last = this.points.at(-1);
    if (last && last.at < at - MEAN_MS && last.value !== this.rest) this.#add(at, this.rest);
  }

  paint() {
    const width = this.canvas.clientWidth;
    if (!width) return; // it is not visible
    const pen = penOf(this.canvas, width, HEIGHT);
    const end = performance.now();
    this.#settle(end);
    const top = ceiling(Math.max(10, ...this.points.map((each) => each.value)));
    const x = (at) => (width - RIGHT) * (1 - (end - at) / SPAN_MS);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    this.#axes(pen, width, top, y);
    this.#line(pen, width, end, x, y);
    const highest = Math.max(0, ...this.points.map((each) => each.value));
    this.canvas.setAttribute(
      "aria-label",
      `${this.now.textContent} now, at most ${figure(highest)} in the last two minutes`,
    );
  }

  #axes(pen, width, top, y) {
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.fillStyle = colour("muted");
    pen.strokeStyle = colour("line");
    pen.textBaseline = "middle";
    for (const value of [0, top / 2, top]) {
      const height = Math.round(y(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(0, height);
      pen.lineTo(width - RIGHT, height);
      pen.stroke();
      pen.fillText(compact(value), width - RIGHT + 8, height);
    }
    pen.textBaseline = "alphabetic";
    pen.fillText("2 min ago", 0, HEIGHT - 4);
    pen.textAlign = "center";
    pen.fillText("1 min", (width - RIGHT) / 2, HEIGHT - 4);
    pen.textAlign = "right";
    pen.fillText("now", width - RIGHT, HEIGHT - 4);
    pen.textAlign = "left";
  }

  #line(pen, width, end, x, y) {
    if (!this.points.length) return;
    pen.save();
    pen.beginPath();
    pen.rect(0, 0, width - RIGHT, HEIGHT);
    pen.clip();
    pen.beginPath();
    const [first] = this.points;
    pen.moveTo(x(first.at), y(first.value));
    for (const { at, value } of this.points) pen.lineTo(x(at), y(value));
    const last = this.points.at(-1);
    pen.lineTo(x(end), y(last.value)); // no view means that nothing has changed
    const hue = colour(this.colour);
    pen.strokeStyle = hue;
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.stroke();
    pen.lineTo(x(end), y(0));
    pen.lineTo(x(first.at), y(0));
    pen.globalAlpha = 0.13;
    pen.fillStyle = hue;
    pen.fill();
    pen.restore();
  }
}

/** The next larger number with a readable half: 1, 2, 4, 6 or 10 times a power of ten. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 10].map((each) => each * power).find((each) => each >= value * 0.999);
}
