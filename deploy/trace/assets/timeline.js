// The time lines of sequences, a row each: drawn as bars, or, where rows are thinner than a pixel,
// painted pixel by pixel, what is rare over what is common.

const BARS_FROM = 1.5;               // pixels of a row
const RANK = [1, 3, 2, 5, 4];        // by state; the higher one is seen

class Timeline {
  constructor(view) {
    const { columns, numRows } = view.trace;
    this.view = view;
    this.first = firstSegments(columns.segment_row, numRows);
    const { requests, jobs } = view.trace.about;
    this.names = requests.map((name, row) => jobs[row] || name);
    this.widest = widest(this.names);
  }

  draw(canvas) {
    fitLabels(this.widest);
    const { pen, width, height } = begin(canvas), view = this.view;
    const inner = width - LEFT - RIGHT, tall = height - AXIS;
    const states = view.trace.about.states.map(colour);
    const size = tall / view.rows;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, inner, tall);
    pen.clip();
    if (size >= BARS_FROM) this.#bars(pen, states, inner, tall, size);
    else this.#pixels(canvas, pen, states, inner, tall, size);
    this.#firstTokens(pen, inner, size);
    drawCursor(pen, view, inner, tall);
    pen.restore();
    this.#labels(pen, width, tall, size);
    drawTimeAxis(pen, view, width, height);
  }

  // The row at a height, in the numbering of the trace; -1 for none.
  rowAt(canvas, y) {
    const place = Math.floor(this.view.top + (y / (canvas.clientHeight - AXIS)) * this.view.rows);
    const { shown } = this.view;
    return place >= 0 && place < shown.length && y < canvas.clientHeight - AXIS ? shown[place] : -1;
  }

  // The state of a row at a moment; -1 where it has none.
  stateAt(row, time) {
    const { segment_from, segment_to, segment_state } = this.view.trace.columns;
    for (let at = this.first[row]; at < this.first[row + 1]; at++)
      if (segment_from[at] <= time && time <= segment_to[at]) return segment_state[at];
    return -1;
  }

  #visible() {
    const { view } = this, from = Math.max(Math.floor(view.top), 0);
    return [from, Math.min(Math.ceil(view.top + view.rows), view.shown.length)];
  }

  #bars(pen, states, inner, tall, size) {
    const { view } = this, { columns } = view.trace, { shown, top } = view;
    const scale = inner / (view.to - view.from), [from, to] = this.#visible();
    const gap = size > 5 ? 1 : 0;
    for (let place = from; place < to; place++) {
      const row = shown[place], y = (place - top) * size;
      if (row === view.hovered) {
        pen.fillStyle = colour("line");
        pen.fillRect(LEFT, y, inner, size);
      }
      for (let at = this.first[row]; at < this.first[row + 1]; at++) {
        if (columns.segment_to[at] < view.from || columns.segment_from[at] > view.to) continue;
        const x = LEFT + (columns.segment_from[at] - view.from) * scale;
        const wide = (columns.segment_to[at] - columns.segment_from[at]) * scale;
        const state = columns.segment_state[at], thin = state === 0 || state === 3 ? 0.3 : 0;
        pen.fillStyle = states[state];
        pen.fillRect(x, y + gap + size * thin, Math.max(wide, 0.7),
          Math.max(size - 2 * gap - 2 * size * thin, 1));
      }
    }
  }

  #pixels(canvas, pen, states, inner, tall, size) {
    const ratio = window.devicePixelRatio || 1, { view } = this, { columns } = view.trace;
    const { shown, top } = view;
    const width = Math.max(Math.round(inner * ratio), 1), height = Math.round(tall * ratio);
    const image = pen.createImageData(width, height), ranks = new Uint8Array(width * height);
    const paint = new Uint32Array(image.data.buffer), colours = states.map(packed);
    const scale = width / (view.to - view.from), [from, to] = this.#visible();
    const thick = Math.max(Math.round(size * ratio), 1);
    for (let place = from; place < to; place++) {
      const row = shown[place];
      const y = Math.max(Math.floor((place - top) * size * ratio), 0);
      for (let at = this.first[row]; at < this.first[row + 1]; at++) {
        const start = Math.max(Math.floor((columns.segment_from[at] - view.from) * scale), 0);
        const end = Math.min(Math.ceil((columns.segment_to[at] - view.from) * scale), width);
        const state = columns.segment_state[at], rank = RANK[state];
        for (let line = y; line < Math.min(y + thick, height); line++)
          for (let dot = line * width + start; dot < line * width + end; dot++)
            if (ranks[dot] < rank) { ranks[dot] = rank; paint[dot] = colours[state]; }
      }
    }
    pen.putImageData(image, Math.round(LEFT * ratio), 0);
  }

  #firstTokens(pen, inner, size) {
    if (size < 6) return;
    const { view } = this, { first } = view.trace.columns, { shown, top } = view;
    const scale = inner / (view.to - view.from), [from, to] = this.#visible();
    pen.fillStyle = colour("ink");
    for (let place = from; place < to; place++) {
      const time = first[shown[place]];
      if (time >= view.from && time <= view.to)
        pen.fillRect(LEFT + (time - view.from) * scale - 1, (place - top) * size + 1, 2, size - 2);
    }
  }

  // A name that is wider than its space goes on over the row.
  #labels(pen, width, tall, size) {
    const { view, names } = this, { shown, top } = view;
    const [from, to] = this.#visible(), [soft, paper] = ["soft", "paper"].map(colour);
    const every = Math.max(Math.ceil(14 / size), 1);
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (let place = Math.ceil(from / every) * every; place < to; place += every) {
      const name = names[shown[place]], y = Math.max((place - top + 0.5) * size, 5);
      if (y > tall - 5) continue;
      const wide = Math.min(pen.measureText(name).width, width - 8), x = Math.max(LEFT - 6 - wide, 4);
      pen.globalAlpha = 0.8;
      pen.fillStyle = paper;
      if (x + wide > LEFT) pen.fillRect(LEFT, y - 7, x + wide + 4 - LEFT, 14);
      pen.globalAlpha = 1;
      pen.fillStyle = soft;
      pen.fillText(name, x, y, wide);
    }
  }
}

// #rrggbb as a little-endian pixel.
function packed(text) {
  const value = parseInt(text.slice(1), 16);
  return 0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16);
}
