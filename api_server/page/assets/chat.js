// The Chat tab: its turns so far, which are sent with the next message.
import { byId, make } from "./dom.js";
import { parameters, systemMessage, wantsProbabilities } from "./parameters.js";
import { Run } from "./run.js";
import { chatTokens, TokenText } from "./tokens.js";

const PATH = "v1/chat/completions";
let turns = [];

function body(messages) {
  const system = systemMessage();
  const first = system ? [{ role: "system", content: system }] : [];
  const fields = { messages: [...first, ...messages], ...parameters(), stream: true };
  fields.stream_options = { include_usage: true };
  if (wantsProbabilities()) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  return fields;
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

function turn(role, name, ...children) {
  const article = make("article", { class: `turn ${role}` }, make("h3", {}, name), ...children);
  byId("turns").append(article);
  return article;
}

/** A run that answers the message; begin() adds the turns, done(whole) keeps or takes back. */
export function chatRun() {
  const question = asked();
  const text = new TokenText("Tokens of the answer; arrow keys go from one to the next");
  const thoughts = make("div", { class: "thoughts", hidden: true });
  const run = new Run(PATH, body([...turns, question]), (choice) => {
    const { content = "", reasoning = "" } = choice.delta;
    const tokens = chatTokens(choice.logprobs);
    if (reasoning) {
      thoughts.hidden = false;
      thoughts.append(reasoning);
      text.waiting = []; // these tokens are not part of the text
    } else {
      text.add(content ?? "", tokens);
    }
    return tokens.length || Number(Boolean(content || reasoning));
  });
  byId("chat-empty").hidden = true;
  const said = turn("user", "You", make("div", { class: "said" }, question.content));
  const answer = turn("assistant", "Model", thoughts, text.element, run.summary);
  byId("message").value = "";
  run.over = () => {
    if (text.text) {
      turns.push(question, { role: "assistant", content: text.text });
    } else {
      said.classList.add("lost");
      answer.classList.add("lost");
      if (!byId("message").value) byId("message").value = question.content; // to be sent again
    }
  };
  return run;
}
