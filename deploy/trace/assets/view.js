// What is looked at: a stretch of time and a stretch of rows, and how they become pixels.

let LEFT = 64;   // for the labels; see fitLabels
const RIGHT = 10, AXIS = 18, FEWEST_ROWS = 10;
const FONT = "11px system-ui, sans-serif";

class View {
  constructor(trace) {
    this.trace = trace;
    this.last = Math.max(trace.about.end, 1);
    this.cursor = -1;     // the step that is looked at
    this.hovered = -1;    // the row
    this.following = true;  // shown are only rows that have something in the time that is shown
    this.order = Int32Array.from({ length: trace.numRows }, (_, row) => row);
    this.lastOf = lastMoments(trace);
    this.everything();
  }

  everything() {
    this.from = 0;
    this.to = this.last;
    this.scroll = 0;      // parts of the rows that could be shown, from the first on
    this.share = 1;       // part of them that is
    this.#stay();
  }

  // The rows that could be shown, in order.
  get shown() {
    const key = this.following ? `${this.from} ${this.to} ${this.sorted}` : `${this.sorted}`;
    if (this.shownKey !== key) {
      this.shownKey = key;
      const { arrival } = this.trace.columns, { from, to, lastOf } = this;
      this.shownRows = this.following
        ? this.order.filter((row) => arrival[row] <= to && lastOf[row] >= from) : this.order;
    }
    return this.shownRows;
  }

  get rows() { return Math.max(this.shown.length * this.share, FEWEST_ROWS); }

  get top() { return this.scroll * this.shown.length; }

  // Zooms by a factor; the moment at `part` (0 to 1) of the width stays where it is.
  zoom(factor, part = 0.5) {
    const moment = this.from + part * (this.to - this.from);
    const span = Math.min(Math.max((this.to - this.from) * factor, 20), this.last * 1.02);
    this.from = moment - part * span;
    this.to = this.from + span;
    this.#stay();
  }

  move(parts) {
    const span = this.to - this.from;
    this.from += parts * span;
    this.to = this.from + span;
    this.#stay();
  }

  zoomRows(factor, part = 0.5) {
    const middle = this.scroll + part * this.share;
    this.share = Math.min(Math.max(this.share * factor, FEWEST_ROWS / Math.max(this.shown.length, FEWEST_ROWS)), 1);
    this.scroll = middle - part * this.share;
    this.#stay();
  }

  moveRows(rows) {
    this.scroll += rows / Math.max(this.shown.length, 1);
    this.#stay();
  }

  // Goes to a step, and moves so that it is seen.
  select(step) {
    if (!this.trace.numSteps) return;
    this.cursor = Math.min(Math.max(step, 0), this.trace.numSteps - 1);
    const time = this.trace.columns.step_time[this.cursor], span = this.to - this.from;
    if (time < this.from || time > this.to) {
      this.from = time - span / 2;
      this.to = this.from + span;
      this.#stay();
    }
  }

  sort(by) {
    const { columns, about } = this.trace, { arrival, end } = columns;
    const words = by === "job" ? about.jobs : about.tenants;
    const first = new Map();
    words.forEach((word, row) => { if (!first.has(word)) first.set(word, row); });
    const key = {
      arrival: () => 0,
      duration: (row) => arrival[row] - end[row],
      job: (row) => (words[row] ? first.get(words[row]) : row),
      tenant: (row) => first.get(words[row]),
    }[by];
    this.order.sort((one, other) => key(one) - key(other) || one - other);
    this.sorted = by;
  }

  // Goes to the first row, in the order shown, whose request, agent session or tenant begins so.
  find(text) {
    const { requests, jobs, tenants } = this.trace.about;
    const row = this.order.find((each) =>
      [requests[each], jobs[each], tenants[each]].some((word) => word.startsWith(text)));
    if (!text || row === undefined) return;
    const { arrival, end } = this.trace.columns, span = Math.max(end[row] - arrival[row], 1000);
    this.hovered = row;
    this.from = arrival[row] - span * 0.2;
    this.to = end[row] + span * 0.2;
    this.#stay();
    this.share = Math.min(40 / Math.max(this.shown.length, 1), 1);
    this.scroll = this.shown.indexOf(row) / this.shown.length - this.share / 2;
    this.#stay();
  }

  // The step that was being computed, or decided, at a moment; -1 before the first.
  stepAt(time) {
    return lowerBound(this.trace.columns.step_time, time + 1e-3) - 1;
  }

  #stay() {
    const span = this.to - this.from, room = Math.max(this.last * 1.02, span) - span;
    this.from = Math.min(Math.max(this.from, 0), room);
    this.to = this.from + span;
    this.scroll = Math.min(Math.max(this.scroll, 0), 1 - this.share);
  }
}

// The last moment of each row, including the time in which its KV is retained after its end.
function lastMoments({ columns, numRows }) {
  const last = new Float64Array(numRows);
  columns.segment_row.forEach((row, at) => { last[row] = Math.max(last[row], columns.segment_to[at]); });
  return last;
}

// The width of the widest of these names, in pixels.
function widest(names) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = FONT;
  return names.reduce((most, name) => Math.max(most, pen.measureText(name).width), 0);
}

// Makes the space for labels so wide, but at most a third of the window.
function fitLabels(width) {
  LEFT = Math.round(Math.max(Math.min(width + 14, innerWidth / 3), 64));
  document.documentElement.style.setProperty("--left", `${LEFT}px`);
}

// A canvas in device pixels, cleared, whose units are those of the page.
function begin(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = FONT;
  return { pen, width, height };
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A round number that divides `span` into at most `most` parts.
function roundStep(span, most) {
  const raw = span / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
}

function drawTimeAxis(pen, view, width, height) {
  const span = view.to - view.from, inner = width - LEFT - RIGHT;
  const step = roundStep(span, inner / 110);
  pen.fillStyle = colour("soft");
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
    const x = LEFT + ((tick - view.from) / span) * inner;
    const digits = Math.max(0, 6 - Math.floor(Math.log10(step)));
    pen.fillText(`${(tick / 1e6).toFixed(Math.min(digits, 6))} s`, x, height - AXIS + 4);
    pen.fillRect(x, height - AXIS, 1, 3);
  }
}
