// The page put together: figures, pointer, keys.

const stage = document.getElementById("stage"), tip = document.getElementById("tip");

function figure(title, names, share) {
  const element = document.createElement("figure"), caption = document.createElement("figcaption");
  const canvas = document.createElement("canvas"), head = document.createElement("b");
  element.style.flex = `${share} 1 0`;
  head.textContent = title;
  caption.append(head);
  for (const name of names) {
    const item = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = `var(--${name})`;
    item.append(mark, SHOWN_AS[name] || name);
    caption.append(item);
  }
  element.append(caption, canvas);
  stage.append(element);
  return canvas;
}

class Page {
  constructor(trace) {
    this.trace = trace;
    this.view = new View(trace);
    this.timeline = new Timeline(this.view);
    this.lines = figure("Requests", trace.about.states, 10);
    this.panels = PANELS.filter(({ shown }) => shown?.(trace.about) ?? true).map((panel) => [figure(panel.title, panel.names, 3), panel]);
    this.introduce();
    this.listen();
    this.draw();
  }

  introduce() {
    const { about, columns, numSteps, numRows } = this.trace;
    document.getElementById("title").textContent = `${about.name}: the scheduler's trace`;
    const sum = (name) => columns[name].reduce((total, each) => total + each, 0);
    const prompt = sum("prompt"), parts = [
      many(numRows, "request"), many(numSteps, "step"), duration(about.end),
      `${about.policy}`, `${count(about.blocks)} blocks of ${about.blockSize} tokens`,
      `up to ${about.seats} sequences and ${about.budget} tokens a step`,
      many(sum("preempted"), "preemption"),
      `${prompt ? ((100 * sum("hit")) / prompt).toFixed(1) : 0} % of prompts found`,
    ];
    document.getElementById("summary").textContent = parts.join(" · ");
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.timeline.draw(this.lines);
      for (const [canvas, panel] of this.panels) drawPanel(canvas, panel, this.view);
      document.getElementById("step").textContent = this.stepText();
      stage.dataset.drawn = String(Number(stage.dataset.drawn || 0) + 1);
      stage.dataset.span = `${this.view.from} ${this.view.to}`;
      stage.dataset.rows = `${this.view.top} ${this.view.rows}`;
    });
  }

  stepText() {
    const at = this.view.cursor, { about, columns } = this.trace;
    if (at < 0) return "Hover over a step, or press the comma and point keys to go from one to the next.";
    const of = (name) => count(columns[name][at]), end = columns.step_end[at];
    const time = columns.step_time[at], limit = about.limits[columns.limit[at]];
    return [
      `Step ${of("step")} at ${(time / 1e6).toFixed(4)} s`,
      end ? `took ${duration(end - time)}` : "computed nothing",
      `${of("prefill")} prefill + ${of("decode")} decode tokens`,
      `${of("running")} running, ${of("waiting")} waiting, ${of("blocked")} set aside`,
      `blocks: ${of("requests")} of sequences, ${of("held")} held, ${of("pinned")} retained, `
        + `${of("cached")} cached, ${of("free")} free`,
      `found ${of("local")} + ${of("external")}`, `${of("preempted")} preempted`,
      ...(limit ? [`limited by ${limit}`] : []),
    ].join(" · ");
  }

  rowText(row, time) {
    const { about, columns } = this.trace, first = columns.first[row];
    const state = this.timeline.stateAt(row, time);
    const lines = [
      `request ${about.requests[row]}   seq_id ${columns.seq_id[row]}`
        + (about.jobs[row] ? `   agent session ${about.jobs[row]}` : "")
        + (about.tenants[row] ? `   tenant ${about.tenants[row]}` : "")
        + (columns.priority[row] ? `   priority ${columns.priority[row]}` : ""),
      state < 0 ? "" : `${about.states[state]} at ${(time / 1e6).toFixed(4)} s`,
      `${count(columns.prompt[row])} prompt tokens, ${count(columns.hit[row])} of them found; `
        + `${count(columns.output[row])} output tokens`,
      `first token after ${first < 0 ? "-" : duration(first - columns.arrival[row])}, `
        + `${about.reasons[row] || "unfinished"} after `
        + duration(columns.end[row] - columns.arrival[row]),
      columns.preemptions[row] ? `preempted ${many(columns.preemptions[row], "time")}` : "",
    ];
    return lines.filter(Boolean).join("\n");
  }

  listen() {
    stage.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    stage.addEventListener("pointerdown", (event) => this.grab(event));
    stage.addEventListener("pointermove", (event) => this.point(event));
    stage.addEventListener("pointerup", () => { this.held = null; stage.classList.remove("dragging"); });
    stage.addEventListener("pointerleave", () => { tip.hidden = true; });
    stage.addEventListener("dblclick", (event) => this.change(() => this.view.zoom(0.25, this.part(event))));
    stage.addEventListener("keydown", (event) => this.key(event));
    const click = (id, act) => document.getElementById(id).addEventListener("click", act);
    click("in", () => this.change(() => this.view.zoom(0.5)));
    click("out", () => this.change(() => this.view.zoom(2)));
    click("fit", () => this.change(() => this.view.everything()));
    click("help", (event) => {
      const keys = document.getElementById("keys");
      keys.hidden = !keys.hidden;
      event.target.setAttribute("aria-expanded", String(!keys.hidden));
      this.draw();
    });
    document.getElementById("order").addEventListener("change", (event) =>
      this.change(() => this.view.sort(event.target.value)));
    document.getElementById("follow").addEventListener("change", (event) =>
      this.change(() => { this.view.following = event.target.checked; }));
    document.getElementById("find").addEventListener("input", (event) =>
      this.change(() => this.view.find(event.target.value.trim())));
    new ResizeObserver(() => this.draw()).observe(stage);
    matchMedia("(prefers-color-scheme:dark)").addEventListener("change", () => this.draw());
  }

  change(act) {
    act();
    this.draw();
  }

  part(event) {
    const box = this.lines.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT), 0), 1);
  }

  wheel(event) {
    event.preventDefault();
    const box = this.lines.getBoundingClientRect(), { view } = this;
    const amount = Math.sign(event.deltaY || event.deltaX) * Math.min(Math.abs(event.deltaY || event.deltaX), 120);
    const down = Math.min(Math.max((event.clientY - box.top) / (box.height - AXIS), 0), 1);
    this.change(() => {
      if (event.shiftKey) view.zoomRows(1.0025 ** amount, down);
      else if (event.altKey) view.moveRows((amount / 600) * view.rows);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.move(event.deltaX / 1000);
      else view.zoom(1.0025 ** amount, this.part(event));
    });
  }

  grab(event) {
    if (event.button !== 0) return;
    this.held = { x: event.clientX, y: event.clientY };
    stage.setPointerCapture(event.pointerId);
    stage.classList.add("dragging");
    stage.focus({ preventScroll: true });
  }

  point(event) {
    const { view } = this, box = this.lines.getBoundingClientRect();
    if (this.held) {
      const inner = box.width - LEFT - RIGHT;
      view.move((this.held.x - event.clientX) / inner);
      view.moveRows(((this.held.y - event.clientY) / (box.height - AXIS)) * view.rows);
      this.held = { x: event.clientX, y: event.clientY };
      tip.hidden = true;
    } else {
      const time = view.from + this.part(event) * (view.to - view.from);
      view.cursor = view.stepAt(time);
      const inside = event.clientY >= box.top && event.clientY < box.bottom;
      view.hovered = inside ? this.timeline.rowAt(this.lines, event.clientY - box.top) : -1;
      this.showTip(event, inside ? view.hovered : -1, time);
    }
    this.draw();
  }

  showTip(event, row, time) {
    const text = row >= 0 ? this.rowText(row, time)
      : event.clientY > this.lines.getBoundingClientRect().bottom
        ? this.stepText().replaceAll(" · ", "\n") : "";
    tip.hidden = !text;
    tip.textContent = text;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - width - 8), 8)}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
  }

  key(event) {
    const { view } = this, page = view.rows * 0.9;
    const acts = {
      ArrowLeft: () => view.move(-0.1), ArrowRight: () => view.move(0.1),
      ArrowUp: () => view.moveRows(-Math.max(view.rows * 0.1, 1)),
      ArrowDown: () => view.moveRows(Math.max(view.rows * 0.1, 1)),
      PageUp: () => view.moveRows(-page), PageDown: () => view.moveRows(page),
      "+": () => view.zoom(0.7), "=": () => view.zoom(0.7), "-": () => view.zoom(1 / 0.7),
      "]": () => view.zoomRows(0.7), "[": () => view.zoomRows(1 / 0.7),
      ",": () => view.select(view.cursor - 1), ".": () => view.select(view.cursor + 1),
      0: () => view.everything(), Home: () => view.move(-1e9), End: () => view.move(1e9),
      Escape: () => { tip.hidden = true; },
    };
    if (event.ctrlKey || event.metaKey || !acts[event.key]) return;
    event.preventDefault();
    this.change(acts[event.key]);
  }
}

unpack().then((trace) => { window.page = new Page(trace); }, (error) => {
  document.getElementById("title").textContent = `This page cannot be shown: ${error}`;
});
