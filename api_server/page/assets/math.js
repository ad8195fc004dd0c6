// Mathematics in answers: TeX between $ or \( \), and on lines of its own between $$ or \[ \], as MathML. The
// renderer is loaded with the first formula. Until then, and where it refuses a formula, its source is shown.
import { make } from "./dom.js";

const OPTIONS = { trust: false, throwOnError: true, maxSize: [30, 100], maxExpand: 500 };
const INLINE = [/^\$(?!\s)((?:\\.|[^\\$\n`])+?)(?<!\s)\$(?!\d)/, /^\\\(([^]+?)\\\)/];
const DISPLAY = [/^ *\$\$([^]+?)\$\$ *(?:\n|$)/, /^ *\\\[([^]+?)\\\] *(?:\n|$)/];
const WITHIN_LINE = [/^\$\$([^\n]+?)\$\$/, /^\\\[([^]+?)\\\]/];

/** Returns the rules of Markdown for formulas. escaped(text): makes HTML of a text. */
export function mathRules(escaped) {
  const rule = (name, level, patterns, starts, className) => ({
    name,
    level,
    start: (source) => source.match(starts)?.index,
    tokenizer(source) {
      const found = patterns.map((each) => each.exec(source)).find(Boolean);
      return found && { type: name, raw: found[0], text: found[1].trim() };
    },
    renderer: ({ text }) => `<span class="math ${className}">${escaped(text)}</span>`,
  });
  return [
    rule("displayMath", "block", DISPLAY, /(?:^|\n) *(?:\$\$|\\\[)/, "math-display"),
    rule("displayMathWithin", "inline", WITHIN_LINE, /\$\$|\\\[/, "math-display"),
    rule("inlineMath", "inline", INLINE, /\$|\\\(/, "math-inline"),
  ];
}

let loading = null;

/** Loads the renderer and its style sheet. */
function loadRenderer() {
  document.head.append(make("link", { rel: "stylesheet", href: "page/vendor-math.css" }));
  return import("./vendor-math.js");
}

/** Replaces the source in an element by the formula, once the renderer is there. */
export async function showMath(element) {
  const source = element.textContent;
  loading ??= loadRenderer();
  const { temml } = await loading;
  const made = make("span");
  try {
    temml.render(source, made, { ...OPTIONS, displayMode: element.classList.contains("math-display") });
  } catch {
    element.classList.add("math-source"); // as it was written
    return;
  }
  element.replaceChildren(...made.childNodes);
}
