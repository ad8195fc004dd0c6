// Curves over time. Steps that share a pixel are drawn as one, the one with the highest sum.
//
//     lasting   what a step computes is drawn while it computes
//     standing  what a step found is drawn until the next one looked; while nothing computes it is
//               the lower of both, as what one of them held was given back or had not come. Of
//               sequences it is at most those that were there all the time

const PANELS = [
  { title: "Tokens a step", names: ["decode", "prefill"], stacked: true, lasting: true },
  { title: "Sequences", names: ["running", "waiting", "blocked"], stacked: false },
  { title: "KV pool, blocks", names: ["requests", "held", "pinned", "cached", "free"],
    stacked: true, most: (about) => about.blocks },
  { title: "Other media, blocks", names: ["host", "others"], stacked: true, most: (about) => about.tierBlocks,
    shown: (about) => about.tierBlocks > 0 },
  { title: "Found, tokens", names: ["local", "external"], stacked: true, lasting: true, events: true },
];

const SHOWN_AS = {
  decode: "decode", prefill: "prefill", running: "running", waiting: "waiting",
  blocked: "set aside", requests: "of sequences", held: "held by a connector",
  pinned: "retained", cached: "cached, unused", free: "free", local: "in the pool",
  external: "by a connector", host: "in host memory", others: "on a disk",
};

// For each pixel [pixel, the step in it whose sum is highest, the last step in it], one after the
// other; a pixel without a step has no entry.
function visibleSteps(view, names, width) {
  const { columns } = view.trace, times = columns.step_time;
  const scale = width / (view.to - view.from);
  const start = Math.max(view.stepAt(view.from), 0);
  const end = Math.min(lowerBound(times, view.to) + 1, times.length);
  const found = [];
  let pixel = -Infinity, best = -1, most = -1;
  for (let step = start; step < end; step++) {
    const here = Math.max(Math.floor((times[step] - view.from) * scale), 0);
    if (here !== pixel && best >= 0) { found.push(pixel, best, step - 1); most = -1; }
    let sum = 0;
    for (const name of names) sum += columns[name][step];
    if (sum > most) { most = sum; best = step; }
    pixel = here;
  }
  if (best >= 0) found.push(pixel, best, end - 1);
  return found;
}

function drawPanel(canvas, panel, view) {
  const { pen, width, height } = begin(canvas), inner = width - LEFT - RIGHT;
  const { about, columns } = view.trace;
  // What is stacked up to a constant sum is chosen by what is in use.
  const ranked = panel.most ? panel.names.slice(0, 3) : panel.names;
  const steps = visibleSteps(view, ranked, inner);
  const valuesAt = (step) => panel.names.map((name) => columns[name][step]);
  let most = panel.most ? panel.most(about) : 1;
  if (!panel.most) for (let at = 1; at < steps.length; at += 3) {
    const values = valuesAt(steps[at]);
    const high = panel.stacked ? values.reduce((sum, each) => sum + each) : Math.max(...values);
    most = Math.max(most, high);
  }
  const y = (value) => height - 2 - (value / most) * (height - 10);
  drawScale(pen, width, most, y);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, inner, height);
  pen.clip();
  const pens = panel.names.map(colour), scale = inner / (view.to - view.from);
  const next = (name, at) => columns[name][steps[at + 4] ?? steps[at + 1]];
  for (let at = 0; at < steps.length; at += 3) {
    const x = LEFT + steps[at], step = steps[at + 1], last = steps[at + 2];
    const until = at + 3 < steps.length ? Math.min(steps[at + 3], inner) : inner;
    const computed = Math.ceil((columns.step_end[last] - view.from) * scale);
    const wide = Math.max(Math.min(computed, until) - steps[at], 1);
    const idle = panel.lasting ? 0 : until - steps[at] - wide;
    const after = Math.min(last + 1, columns.step.length - 1);  // found what is there while nothing computes
    if (panel.stacked) {
      drawStack(pen, pens, valuesAt(step), x, wide, y);
      if (idle > 0) drawStack(pen, pens, valuesAt(after), x + wide, idle, y);
    } else panel.names.forEach((name, index) => {
      pen.fillStyle = pens[index];
      drawLine(pen, x, wide, idle, [columns[name][step], resting(columns, name, last), next(name, at)].map(y));
    });
  }
  if (panel.events) drawEvents(pen, view, inner, height);
  drawCursor(pen, view, inner, height);
  pen.restore();
}

// What a curve of sequences stands at between a step and the next one.
function resting(columns, name, step) {
  const { [name]: column, kept } = columns, after = step + 1;
  return after < column.length ? Math.min(column[step], column[after], kept[after]) : 0;
}

// A curve for `wide` pixels, then for `idle` pixels at rest, and on to the next value.
function drawLine(pen, x, wide, idle, [value, rest, next]) {
  pen.fillRect(x, value - 0.75, wide, 1.5);
  const edges = [[x + wide, value, idle > 0 ? rest : next]];
  if (idle > 0) {
    pen.fillRect(x + wide, rest - 0.75, idle, 1.5);
    edges.push([x + wide + idle, rest, next]);
  }
  for (const [edge, one, other] of edges)
    pen.fillRect(edge - 0.75, Math.min(one, other), 1.5, Math.abs(one - other));
}

// Values on top of each other, `wide` pixels wide.
function drawStack(pen, pens, values, x, wide, y) {
  let below = 0;
  values.forEach((value, index) => {
    pen.fillStyle = pens[index];
    if (value) pen.fillRect(x, y(below + value), wide, y(below) - y(below + value));
    below += value;
  });
}

function drawScale(pen, width, most, y) {
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const step = Math.max(roundStep(most, 3), 1);
  for (let value = 0; value <= most; value += step) {
    pen.fillStyle = colour("line");
    pen.fillRect(LEFT, y(value), width - LEFT - RIGHT, 1);
    pen.fillStyle = colour("soft");
    pen.fillText(count(value), LEFT - 6, Math.min(Math.max(y(value), 7), y(0) - 4));
  }
}

function drawEvents(pen, view, inner, height) {
  pen.textAlign = "left";
  pen.textBaseline = "top";
  for (const [time, what] of view.trace.about.events) {
    const x = LEFT + ((time - view.from) / (view.to - view.from)) * inner;
    if (x < LEFT || x > LEFT + inner) continue;
    pen.fillStyle = colour("preempted");
    pen.fillRect(x, 0, 1, height);
    pen.fillText(what, x + 4, 2);
  }
}

function drawCursor(pen, view, inner, height) {
  if (view.cursor < 0) return;
  const { step_time, step_end } = view.trace.columns;
  const scale = inner / (view.to - view.from);
  const from = LEFT + (step_time[view.cursor] - view.from) * scale;
  const end = step_end[view.cursor] || step_time[view.cursor];
  pen.globalAlpha = 0.16;
  pen.fillStyle = colour("ink");
  pen.fillRect(from, 0, Math.max((end - step_time[view.cursor]) * scale, 1), height);
  pen.globalAlpha = 1;
  pen.fillRect(from, 0, 1, height);
}
