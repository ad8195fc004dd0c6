// Answers as Markdown. The text of a model is not trusted: HTML in it stays text, images become links,
// and what marked makes of the rest passes DOMPurify.
import { copyButton, make, scrollerOf } from "./dom.js";
import { mathRules, showMath } from "./math.js";
import { DOMPurify, highlighter, Marked } from "./vendor.js";

const SANITIZER = {
  ALLOWED_TAGS: [
    ...["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input"],
    ...["li", "ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "type"],
  ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"], // no addresses
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const FENCE = "~".repeat(8);
const PAUSE_MS = 50;
const SHARE_OF_TIME = 0.25; // at most, for rendering while an answer streams

const escaped = (text) =>
  text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const marked = new Marked({
  extensions: mathRules(escaped),
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    code({ text, lang }) {
      const name = (lang ?? "").trim().split(/\s/)[0].toLowerCase();
      const known = name !== "" && highlighter.getLanguage(name);
      const code = known ? highlighter.highlight(text, { language: name }).value : escaped(text);
      return `<pre class="${escaped(name)}"><code>${code}</code></pre>`;
    },
  },
});

/** Whether a text that grows is JSON so far, which is shown as code: it begins so, and no line with a word. */
const isJson = (text) => /^\s*[[{]\s*["{]/.test(text) && !/^\s*[A-Z]/m.test(text);

/** An answer that grows. Blocks of Markdown that did not change keep their elements. */
export class MarkdownText {
  constructor() {
    this.element = make("div", { class: "markdown" });
    this.text = "";
    this.blocks = []; // { source, nodes }
    this.timer = null;
  }

  /** Appends received text, and shows it soon. */
  add(text) {
    if (text === "") return;
    this.text += text;
    if (this.timer !== null) return;
    if (this.text === text) this.#render();
    else this.timer = setTimeout(() => this.#render(), this.pause);
  }

  /** Shows another text instead. */
  set(text) {
    this.text = text;
    this.finish();
  }

  /** Shows the whole answer; a link may be defined after the block that uses it. */
  finish() {
    this.blocks = [];
    this.element.replaceChildren();
    this.#render();
  }

  #render() {
    clearTimeout(this.timer);
    this.timer = null;
    const begin = performance.now();
    const tokens = marked.lexer(isJson(this.text) ? `${FENCE}json\n${this.text}` : this.text);
    const same = tokens.findIndex((token, at) => token.raw !== this.blocks[at]?.source);
    const kept = same < 0 ? tokens.length : same;
    for (const { nodes } of this.blocks.splice(kept)) for (const node of nodes) node.remove();
    for (const token of tokens.slice(kept)) {
      const nodes = nodesOf(token);
      this.element.append(...nodes);
      this.blocks.push({ source: token.raw, nodes });
    }
    this.pause = Math.max(PAUSE_MS, (performance.now() - begin) / SHARE_OF_TIME);
  }
}

/** The elements of one block; tables and code are in boxes that scroll by themselves. */
function nodesOf(token) {
  const fragment = DOMPurify.sanitize(marked.parser([token]), SANITIZER);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const box of fragment.querySelectorAll("input")) {
    if (box.type === "checkbox") box.disabled = true;
    else box.remove();
  }
  for (const table of fragment.querySelectorAll("table")) table.replaceWith(scrollerOf(table.cloneNode(true), "Table"));
  for (const formula of fragment.querySelectorAll(".math")) showMath(formula);
  for (const code of fragment.querySelectorAll("pre")) {
    const box = make("div", { class: "code" });
    code.replaceWith(box);
    code.tabIndex = 0;
    const copy = copyButton(() => code.textContent);
    box.append(make("div", { class: "code-head" }, make("span", {}, code.className), copy), code);
    code.className = "";
  }
  return [...fragment.childNodes];
}
