// The Chat tab: its turns so far, which are sent with the next message. An answer is shown as Markdown,
// or, if its probabilities were requested, as tokens.
import { announce, byId, copyText, make } from "./dom.js";
import { MarkdownText } from "./markdown.js";
import { parameters, systemMessage, tokenFields } from "./parameters.js";
import { Run } from "./run.js";
import { chatTokens, TokenText } from "./tokens.js";

const PATH = "v1/chat/completions";
let turns = [];
let showsTokens = false; // the choice at the last answer holds for the next ones

function body(messages) {
  const system = systemMessage();
  const first = system ? [{ role: "system", content: system }] : [];
  const fields = { messages: [...first, ...messages], ...parameters(), stream: true };
  fields.stream_options = { include_usage: true };
  return { ...fields, ...tokenFields({ logprobs: true, top_logprobs: 5 }) };
}

const asked = () => ({ role: "user", content: byId("message").value });

/** Returns path and body of the request that would be sent now. */
export const chatRequest = () => ({ path: PATH, body: body([...turns, asked()]) });

/** Removes all turns. */
export function forgetTurns() {
  turns = [];
  byId("turns").replaceChildren();
  byId("chat-empty").hidden = false;
}

function turn(role, ...children) {
  const article = make("article", { class: `turn ${role}` }, ...children);
  byId("turns").append(article);
  return article;
}

/** The head of an answer: buttons that copy its text and, if there are some, show its tokens. */
function answerHead(text, tokenText, hasTokens) {
  const copy = make("button", { class: "plain", type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await copyText(text.text);
    announce("Copied.");
  });
  const head = make("div", { class: "turn-head" }, make("h3", {}, "Model"), copy);
  const tokens = make("button", { class: "plain", type: "button" }, "Tokens");
  tokens.title = "Show the tokens and their probabilities";
  const show = (asTokens) => {
    text.element.hidden = asTokens;
    tokenText.element.hidden = !asTokens;
    tokens.setAttribute("aria-pressed", String(asTokens));
  };
  tokens.addEventListener("click", () => {
    showsTokens = tokenText.element.hidden;
    show(showsTokens);
  });
  show(hasTokens && showsTokens);
  if (hasTokens) head.append(tokens);
  return head;
}

/** A run that answers the message; begin() adds the turns, done(whole) keeps or takes back. */
export function chatRun() {
  const question = asked();
  const text = new MarkdownText();
  const tokenText = new TokenText("Tokens of the answer; arrow keys go from one to the next");
  const thoughts = make("div", { class: "thoughts", hidden: true });
  const sent = body([...turns, question]);
  const wantsTokens = Boolean(sent.logprobs);
  const run = new Run(PATH, sent, (choice) => {
    const { content = "", reasoning = "" } = choice.delta;
    const tokens = chatTokens(choice);
    if (reasoning) {
      thoughts.hidden = false;
      thoughts.append(reasoning);
      tokenText.waiting = []; // these tokens are not part of the text
    } else {
      text.add(content ?? "");
      if (wantsTokens) tokenText.add(content ?? "", tokens);
    }
    return tokens.length || Number(Boolean(content || reasoning));
  });
  byId("chat-empty").hidden = true;
  const said = turn("user", make("h3", {}, "You"), make("div", { class: "said" }, question.content));
  const head = answerHead(text, tokenText, wantsTokens);
  const shown = [thoughts, text.element, tokenText.element];
  const answer = turn("assistant", head, ...shown, run.summary);
  byId("message").value = "";
  run.over = () => {
    if (text.text) {
      text.finish();
      turns.push(question, { role: "assistant", content: text.text });
    } else {
      said.classList.add("lost");
      answer.classList.add("lost");
      if (!byId("message").value) byId("message").value = question.content; // to be sent again
    }
  };
  return run;
}
