// Creates elements; text from a server becomes a text node, never markup.

const CONFIRM_MS = 1600;

/** The element with an id. */
export const byId = (id) => document.getElementById(id);

/** A new element; children are elements, or anything that is shown as text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.map((each) => (each instanceof Node ? each : String(each))));
  return element;
}

/** A button. action: what a click does. title: more words, on hover. */
export function button(words, action, title = "") {
  const element = make("button", { class: "plain", type: "button", title }, words);
  element.addEventListener("click", action);
  return element;
}

/** A table. head: texts; rows: lists of cells, each an element or what is shown as text in one. */
export function tableOf(className, head, rows) {
  const cell = (each) => (each instanceof Node ? each : make("td", {}, each));
  const names = head.map((each) => make("th", { scope: "col" }, each));
  const body = rows.map((row) => make("tr", {}, ...row.map(cell)));
  return make("table", { class: className }, make("thead", {}, make("tr", {}, ...names)), make("tbody", {}, ...body));
}

/** Submits a form by Ctrl Enter, or by Enter in the field for messages; for its event keydown. */
export function submitByKey(event) {
  if (event.key !== "Enter" || event.isComposing) return;
  const sends = event.target.id === "message" ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (!sends) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

/** Writes a text that screen readers announce. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Copies a text; pages over plain HTTP have no clipboard, but may copy a selection. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "unseen", value: text });
    const focused = document.activeElement;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
}

/** A button that copies a text, and says so on itself. text(): returns it. */
export function copyButton(text) {
  let timer = null;
  const show = (words, isDone) => {
    element.textContent = words;
    element.classList.toggle("done", isDone);
  };
  const element = button("Copy", async () => {
    await copyText(text());
    announce("Copied.");
    show("Copied", true);
    clearTimeout(timer);
    timer = setTimeout(() => show("Copy", false), CONFIRM_MS);
  });
  element.classList.add("copy");
  return element;
}

/** Shows the hint of a box while its content is wider; the tab key stops at a box that scrolls. */
const sizes = new ResizeObserver((entries) => {
  for (const box of new Set(entries.map(({ target }) => target.closest(".scroller")))) {
    const isWider = box.scrollWidth > box.clientWidth;
    box.nextSibling.hidden = !isWider;
    box.tabIndex = isWider || box.scrollHeight > box.clientHeight ? 0 : -1;
  }
});

/** A box for a table, which scrolls by itself and says so where it is too narrow. label: for screen readers. */
export function scrollerOf(table, label) {
  const scroller = make("div", { class: "scroller", role: "region", "aria-label": label }, table);
  const hint = make("p", { class: "scroll-hint", hidden: true }, "Scroll sideways for more →");
  for (const each of [scroller, table]) sizes.observe(each);
  return make("div", {}, scroller, hint);
}

/** Places a hint near a box of the window, wholly inside the window. */
export function placeNear(hint, box) {
  hint.hidden = false;
  const { width, height } = hint.getBoundingClientRect();
  const room = 8;
  const below = box.bottom + 6 + height < innerHeight - room;
  const top = below ? box.bottom + 6 : Math.max(room, box.top - 6 - height);
  const left = Math.min(Math.max(room, box.left), innerWidth - width - room);
  hint.style.top = `${Math.round(top)}px`;
  hint.style.left = `${Math.round(Math.max(room, left))}px`;
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

/** Formats a count or rate, with a fraction only for small numbers. */
export const figure = (value) => (Math.abs(value) < 10 ? SHORT : WHOLE).format(value);

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** Formats a number for an axis: 100K. */
export const compact = (value) => COMPACT.format(value);

/** Formats a duration that is given in milliseconds. */
export const duration = (ms) =>
  ms < 1000 ? `${WHOLE.format(ms)} ms` : `${SHORT.format(ms / 1000)} s`;
